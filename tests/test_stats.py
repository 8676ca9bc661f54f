"""Statistics against scipy, brute-force enumeration and exact coverage."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from scipy import stats as scipy_stats

from xsparse import stats


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 7), (3, 7), (25, 25), (485, 500)])
def test_wilson_is_scipys(k, n):
    expected = scipy_stats.binomtest(k, n).proportion_ci(method="wilson")
    assert stats.wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("k", "n"), [(0, 0), (-1, 4), (5, 4)])
def test_wilson_refuses_impossible_counts(k, n):
    with pytest.raises(ValueError, match="wilson needs"):
        stats.wilson(k, n)


def test_mean_ci_of_binary_scores_is_wilson():
    assert stats.mean_ci([1, 1, 0, 1]) == (0.75, *stats.wilson(3, 4))


def test_mean_ci_of_fractions_agrees_with_scipys_bootstrap():
    scores = np.random.default_rng(1).choice([0, 0.25, 0.5, 0.75, 1.0], size=60)
    expected = scipy_stats.bootstrap(
        (scores,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(2)
    ).confidence_interval
    mean, low, high = stats.mean_ci(scores)
    assert mean == pytest.approx(scores.mean())
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.01)
    assert stats.mean_ci(scores) == (mean, low, high)  # seeded


@pytest.mark.parametrize("scores", [[0.5] * 25, [0.25, 0.75], [1 / 3] * 3])
def test_mean_ci_never_collapses(scores):
    mean, low, high = stats.mean_ci(scores)
    assert low < mean < high
    assert (low, high) == pytest.approx(stats.wilson(sum(scores), len(scores)))


@pytest.mark.parametrize("scores", [[], [0.5, math.nan], [[1.0]]])
def test_bad_scores_are_refused(scores):
    with pytest.raises(ValueError, match="scores must be"):
        stats.mean_ci(scores)


@pytest.mark.parametrize("losses", range(6))
@pytest.mark.parametrize("gains", range(6))
def test_paired_delta_of_binary_scores_is_mcnemars_test(losses, gains):
    sparse = [0] * losses + [1] * gains + [1] * 5
    dense = [1] * losses + [0] * gains + [1] * 5
    delta, low, high, p = stats.paired_delta(sparse, dense)
    discordant = losses + gains
    expected = scipy_stats.binomtest(min(losses, gains), discordant).pvalue if discordant else 1.0
    assert p == pytest.approx(expected)
    assert delta == pytest.approx((gains - losses) / len(sparse))
    assert -1 <= low < delta < high <= 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 1]), max_size=9))
def test_sign_flips_match_enumeration(differences):
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product([1, -1], repeat=len(differences))
    ]
    expected = np.mean(np.array(sums) >= abs(sum(differences)) - 1e-9)
    assert stats.sign_flip_p(differences) == pytest.approx(expected)


def test_sampled_sign_flips_approach_the_exact_p():
    d = np.random.default_rng(3).normal(0.3, 1, size=stats.EXACT_FLIPS)
    padded = np.concatenate([d, [1e-9, 2e-9]])  # two more pairs: sampled instead of enumerated
    assert stats.sign_flip_p(padded) == pytest.approx(stats.sign_flip_p(d), abs=0.015)


def _likeliest_loss_rate(delta, gain, loss, n):
    """The most likely rate of losing prompts if the true difference were `delta`, by search."""

    def negative(q):  # q: probability of a losing prompt, q + delta: of a gaining one
        cells = [(gain, q + delta), (loss, q), (n - gain - loss, 1 - 2 * q - delta)]
        return -sum(count * math.log(max(p, 1e-300)) for count, p in cells if count)

    bounds = (max(0.0, -delta), (1 - delta) / 2)
    found = optimize.minimize_scalar(
        negative, bounds=bounds, method="bounded", options={"xatol": 1e-12}
    )
    return found.x


@pytest.mark.parametrize(("gain", "loss", "n"), [(0, 8, 100), (3, 12, 100), (1, 4, 20), (5, 5, 20)])
def test_tango_bounds_solve_the_score_equation(gain, loss, n):
    for bound, sign in zip(stats.tango(gain, loss, n), (1, -1), strict=True):
        q = _likeliest_loss_rate(bound, gain, loss, n)
        z = (gain - loss - n * bound) / math.sqrt(n * (2 * q + bound * (1 - bound)))
        assert z == pytest.approx(sign * stats.Z, abs=1e-3)


def test_tango_without_discordant_prompts_is_closed_form():
    low, high = stats.tango(0, 0, 25)
    assert high == pytest.approx(stats.Z**2 / (25 + stats.Z**2), abs=1e-6)
    assert low == -high


def test_tango_covers_its_target():
    """Exact coverage by enumeration of every outcome of 15 prompts, 12 % losses and 4 % gains."""
    n, p_loss, p_gain = 15, 0.12, 0.04
    covered = 0.0
    for loss in range(n + 1):
        for gain in range(n + 1 - loss):
            low, high = stats.tango(gain, loss, n)
            if low <= p_gain - p_loss <= high:
                covered += scipy_stats.multinomial.pmf(
                    [loss, gain, n - loss - gain], n, [p_loss, p_gain, 1 - p_loss - p_gain]
                )
    assert covered >= 0.93


def test_paired_delta_of_fractions():
    rng = np.random.default_rng(4)
    dense = rng.choice([0.5, 0.75, 1.0], size=40)
    sparse = np.clip(dense - rng.choice([0, 0.25], size=40), 0, 1)
    delta, low, high, p = stats.paired_delta(sparse, dense)
    assert delta == pytest.approx((sparse - dense).mean())
    assert low < delta < high < 0
    assert p < 0.001


def test_paired_delta_of_equal_fractions_is_guarded():
    delta, low, high, p = stats.paired_delta([0.5] * 25, [0.5] * 25)
    assert (delta, p) == (0.0, 1.0)
    assert low < 0 < high


def test_pairs_must_be_of_one_length():
    with pytest.raises(ValueError, match="must be paired, got 2 and 1 values"):
        stats.paired_delta([1, 1], [1])


def test_macro_weighs_tasks_and_not_prompts():
    mean, low, high = stats.macro_ci([[1] * 10, [0] * 30])
    assert mean == 0.5
    below = math.hypot(1 - stats.wilson(10, 10)[0], 0) / 2
    above = math.hypot(0, stats.wilson(0, 30)[1]) / 2
    assert (low, high) == pytest.approx((0.5 - below, 0.5 + above))


def test_macro_p_weighs_tasks_and_not_prompts():
    """By enumeration: one of 2 prompts gained against one of 10 lost, so sums differ by weight."""
    pairs = [([1, 0], [0, 0]), ([0, 1, *[1] * 8], [1, 0, *[1] * 8])]
    weights = [1 / 2, -1 / 10, 1 / 10]
    sums = [
        sum(s * w for s, w in zip(signs, weights, strict=True))
        for signs in itertools.product([1, -1], repeat=3)
    ]
    expected = np.mean([abs(x) >= abs(sum(weights)) - 1e-9 for x in sums])
    delta, _, _, p = stats.macro_delta(pairs)
    assert (delta, p) == pytest.approx((0.25, expected))
    assert p != stats.sign_flip_p([1, -1, 1])


def test_macro_of_one_task_is_the_task():
    sparse, dense = [1, 0, 1, 1, 0.5], [1, 1, 1, 1, 1]
    assert stats.macro_delta([(sparse, dense)]) == pytest.approx(stats.paired_delta(sparse, dense))
    assert stats.macro_ci([sparse]) == pytest.approx(stats.mean_ci(sparse))


def test_combine_refuses_nothing():
    with pytest.raises(ValueError, match="at least one"):
        stats.combine([])


def test_speedup_is_a_ratio_of_medians_and_needs_five_pairs_for_an_interval():
    assert stats.speedup([2, 4, 100, 3], [1, 2, 2, 2]) == (3.5 / 2, None, None)
    dense = np.random.default_rng(5).uniform(1.9, 2.1, size=30)
    ratio, low, high = stats.speedup(dense, dense / 2)
    assert ratio == pytest.approx(2)
    assert low is not None
    assert high is not None
    # Pairs are drawn together, so a constant ratio has no spread.
    assert (low, high) == pytest.approx((2, 2))


def test_a_ratio_of_sums_weighs_prompts_by_their_size():
    kept, causal = [10.0, 30.0, 20.0, 90.0, 25.0, 40.0], [100.0, 100.0, 50.0, 150.0, 50.0, 100.0]
    ratio, low, high = stats.ratio_ci(kept, causal)
    assert ratio == 215 / 550
    assert low is not None
    assert high is not None
    # The error of a ratio by the delta method; a percentile interval of six is narrower.
    residual = np.array(kept) - ratio * np.array(causal)
    error = np.sqrt((residual**2).sum() / 5 * 6) / 550
    assert 0.7 < (high - low) / (2 * 1.96 * error) < 1.1
    assert low < ratio < high
    assert stats.ratio_ci(kept[:4], causal[:4]) == (150 / 400, None, None)
    assert stats.ratio_ci([0.0] * 5, [1.0] * 5) == (0.0, 0.0, 0.0)


def test_a_ratio_of_sums_refuses_an_empty_denominator():
    with pytest.raises(ValueError, match="above 0"):
        stats.ratio_ci([1.0, 0.0], [1.0, 0.0])


def test_speedup_refuses_zero_times():
    with pytest.raises(ValueError, match="above 0 s"):
        stats.speedup([1.0, 0.0], [1.0, 1.0])


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_rejects_what_the_step_down_rule_rejects(p_values):
    adjusted = stats.holm(p_values)
    for alpha in (0.01, 0.05, 0.2):
        rejected = set()
        for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
            if p_values[i] * (len(p_values) - rank) > alpha:
                break
            rejected.add(i)
        assert {i for i, p in enumerate(adjusted) if p <= alpha} == rejected


@pytest.mark.parametrize("n", [6, 25, 50, 100, 500])
def test_smallest_visible_loss_has_the_stated_power(n):
    loss = stats.smallest_visible_loss(n)
    assert loss is not None
    seen = sum(
        scipy_stats.binom.pmf(k, n, loss)
        for k in range(n + 1)
        if stats.sign_flip_p([-1.0] * k) < stats.ALPHA
    )
    assert seen == pytest.approx(0.8)


def test_five_prompts_show_no_loss_at_all():
    assert stats.smallest_visible_loss(5) is None
    assert stats.sign_flip_p([-1.0] * 5) > stats.ALPHA

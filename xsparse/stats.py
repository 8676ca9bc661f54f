"""Intervals and tests for paired scores and times.

Sample counts here are small and scores sit near 1, where normal theory gives intervals of width
zero. So: score intervals where every score is 0 or 1, a percentile bootstrap where scores are
fractions, and tests that are exact. Scores are in 0..1; every random draw is seeded.

Where a bootstrap is degenerate (all values equal, or fewer than `MIN_BOOTSTRAP_N` of them) the
binary interval is used on the sums of the scores instead: among all scores in 0..1 with a given
mean the binary ones have the largest variance, so that interval errs on the wide side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.special import bdtr, betaincinv, ndtri

ALPHA = 0.05
Z = float(ndtri(1 - ALPHA / 2))
RESAMPLES = 10_000
MIN_BOOTSTRAP_N = 5
EXACT_FLIPS = 18  # 2**18 sign patterns are enumerated, more are sampled
BATCH_VALUES = 4_000_000  # bounds the memory of a bootstrap: 32 MB of indices

Scores = Sequence[float] | np.ndarray


def wilson(k: float, n: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927); `k` may be a sum of fractional scores."""
    if n < 1 or not 0 <= k <= n:
        raise ValueError(f"wilson needs n >= 1 and 0 <= k <= n, got k={k}, n={n}")
    p = k / n
    centre = p + Z**2 / (2 * n)
    half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    low = 0.0 if k == 0 else (centre - half) / scale
    high = 1.0 if k == n else (centre + half) / scale
    return max(0.0, low), min(1.0, high)


def mean_ci(scores: Scores) -> tuple[float, float, float]:
    """Mean of scores with its 95 % interval: (mean, low, high)."""
    x = _scores("scores", scores)
    mean = float(x.mean())
    if _is_binary(x) or _is_degenerate(x):
        return mean, *wilson(min(float(x.sum()), x.size), x.size)
    return mean, *_bootstrap(lambda r: r.mean(axis=-1), x)


def paired_delta(sparse: Scores, dense: Scores) -> tuple[float, float, float, float]:
    """Sparse minus dense on the same prompts: (delta, low, high, p), p two-sided.

    Binary scores: the score interval of Tango (1998) and the exact McNemar test. Fractions: a
    bootstrap of the differences and a sign-flip permutation test, which for binary scores is
    McNemar's test.
    """
    s, d = _pair("sparse", sparse, "dense", dense)
    differences = s - d
    delta, p = float(differences.mean()), sign_flip_p(differences)
    if (_is_binary(s) and _is_binary(d)) or _is_degenerate(differences):
        gain = float(differences[differences > 0].sum())
        loss = float(-differences[differences < 0].sum())
        return delta, *tango(gain, loss, s.size), p
    return delta, *_bootstrap(lambda r: r.mean(axis=-1), differences), p


def tango(gain: float, loss: float, n: int) -> tuple[float, float]:
    """95 % score interval of a paired difference (gain - loss) / n (Tango 1998, equation 7).

    gain, loss: prompts where only one side is right (or sums of fractional differences).
    """
    if n < 1 or gain < 0 or loss < 0 or gain + loss > n * (1 + 1e-12):
        raise ValueError(
            f"tango needs gain, loss >= 0 and gain + loss <= n, got {gain}, {loss}, n={n}"
        )
    return _tango_low(gain, loss, n), -_tango_low(loss, gain, n)


def _tango_low(gain: float, loss: float, n: int) -> float:
    def excess(delta: float) -> float:
        # q: the share of losing prompts that is most likely if the true difference were delta
        a, b = 2 * n, -gain - loss + (2 * n - gain + loss) * delta
        c = -loss * delta * (1 - delta)
        q = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        variance = n * (2 * q + delta * (1 - delta))
        return gain - loss - n * delta - Z * math.sqrt(max(0.0, variance))

    # With no discordant prompt the estimate itself is a second root: start just below it.
    start = (gain - loss) / n - 1e-9
    if start <= -1:
        return -1.0
    return float(brentq(excess, -1.0, start, xtol=1e-12))  # pyright: ignore[reportArgumentType]


def sign_flip_p(differences: Scores) -> float:
    """Two-sided p of a mean of paired differences under exchange of the two sides of each pair.

    Exact for equal magnitudes (then it is McNemar's exact test) and for up to `EXACT_FLIPS`
    differing pairs; 10,000 seeded sign patterns otherwise.
    """
    d = np.asarray(differences, dtype=np.float64)
    d = d[d != 0]
    if d.size == 0:
        return 1.0
    magnitude = np.abs(d)
    if np.allclose(magnitude, magnitude[0], rtol=1e-9, atol=0):
        fewer = min(int((d > 0).sum()), int((d < 0).sum()))
        return min(1.0, 2 * float(bdtr(fewer, d.size, 0.5)))
    # Sums that are equal in exact arithmetic must count as ties.
    observed = abs(float(d.sum())) - 1e-12 * float(magnitude.sum())
    if d.size <= EXACT_FLIPS:
        sums = np.zeros(1)
        for value in d:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= observed).mean())
    rng = np.random.default_rng(0)
    hits = 0
    for batch in _batches(d.size):
        signs = rng.integers(0, 2, size=(batch, d.size), dtype=np.int8) * 2 - 1
        hits += int((np.abs(signs @ d) >= observed).sum())
    return (1 + hits) / (1 + RESAMPLES)


def macro_ci(groups: Sequence[Scores]) -> tuple[float, float, float]:
    """Mean over tasks of the task means, with its interval: (mean, low, high).

    groups: the scores of each task. See `combine` for the interval.
    """
    return combine([mean_ci(scores) for scores in groups])


def macro_delta(pairs: Sequence[tuple[Scores, Scores]]) -> tuple[float, float, float, float]:
    """`paired_delta` of the mean over tasks; pairs: (sparse, dense) scores of each task."""
    delta, low, high = combine([paired_delta(s, d)[:3] for s, d in pairs])
    weighted = [np.subtract(s, d) / len(s) for s, d in pairs]
    return delta, low, high, sign_flip_p(np.concatenate(weighted))


def combine(estimates: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Mean of independent estimates (value, low, high), their distances added in quadrature.

    The method of variance estimates recovery (Zou and Donner 2008): it keeps the asymmetry of
    each interval and never collapses when every task is perfect, where it is conservative.
    """
    if not estimates:
        raise ValueError("combine needs at least one estimate, got none")
    value, low, high = np.array(estimates, dtype=np.float64).T
    mean, count = float(value.mean()), len(estimates)
    below = math.sqrt(float(((value - low) ** 2).sum())) / count
    above = math.sqrt(float(((high - value) ** 2).sum())) / count
    return mean, mean - below, mean + above


def speedup(dense_s: Scores, sparse_s: Scores) -> tuple[float, float | None, float | None]:
    """Ratio of the medians of paired times, dense over sparse: (ratio, low, high).

    The bootstrap draws pairs; below `MIN_BOOTSTRAP_N` pairs the interval is (None, None).
    """
    d, s = _pair("dense_s", dense_s, "sparse_s", sparse_s)
    if not (np.all(d > 0) and np.all(s > 0)):
        raise ValueError("speedup needs times above 0 s")
    ratio = float(np.median(d) / np.median(s))
    if d.size < MIN_BOOTSTRAP_N:
        return ratio, None, None
    low, high = _bootstrap(lambda a, b: np.median(a, axis=-1) / np.median(b, axis=-1), d, s)
    return ratio, low, high


def ratio_ci(numerators: Scores, denominators: Scores) -> tuple[float, float | None, float | None]:
    """Ratio of two sums over prompts, such as a density: (ratio, low, high).

    The bootstrap draws prompts; below `MIN_BOOTSTRAP_N` of them the interval is (None, None).
    """
    a, b = _pair("numerators", numerators, "denominators", denominators)
    if not np.all(b > 0):
        raise ValueError("ratio_ci needs denominators above 0")
    ratio = float(a.sum() / b.sum())
    if a.size < MIN_BOOTSTRAP_N:
        return ratio, None, None
    low, high = _bootstrap(lambda x, y: x.sum(axis=-1) / y.sum(axis=-1), a, b)
    return ratio, low, high


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for the number of tests (Holm 1979), in the given order."""
    p = np.asarray(p_values, dtype=np.float64)
    if p.size == 0:
        return []
    if not np.all((p >= 0) & (p <= 1)):
        raise ValueError(f"holm needs p-values in 0..1, got {list(p_values)}")
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, stepped)
    return adjusted.tolist()


def smallest_visible_loss(n: int, *, power: float = 0.8) -> float | None:
    """Smallest true loss (0..1) that n paired prompts show with probability `power`.

    The best case: a lost prompt is wholly lost and none is gained, so that McNemar's test rejects
    from k = 6 losses on, 2 * 0.5**k < 0.05. None where n < k: no loss of any size is visible.
    """
    if n < 1 or not 0 < power < 1:
        raise ValueError(f"need n >= 1 and power in 0..1, got n={n}, power={power}")
    k = math.floor(math.log2(2 / ALPHA)) + 1
    if k > n:
        return None
    return float(betaincinv(k, n - k + 1, power))


def _scores(name: str, values: Scores) -> np.ndarray:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"{name} must be a non-empty list of numbers, got shape {x.shape}")
    if not np.all(np.isfinite(x)):
        raise ValueError(f"{name} must be finite, got {x[~np.isfinite(x)][0]}")
    return x


def _pair(
    first_name: str, first: Scores, second_name: str, second: Scores
) -> tuple[np.ndarray, np.ndarray]:
    a, b = _scores(first_name, first), _scores(second_name, second)
    if a.size != b.size:
        raise ValueError(
            f"{first_name} and {second_name} must be paired, got {a.size} and {b.size} values"
        )
    return a, b


def _is_binary(x: np.ndarray) -> bool:
    return bool(np.all((x == 0) | (x == 1)))


def _is_degenerate(x: np.ndarray) -> bool:
    return x.size < MIN_BOOTSTRAP_N or bool(np.ptp(x) < 1e-12)


def _batches(n: int) -> list[int]:
    """Split `RESAMPLES` so that a batch of n-value resamples stays within `BATCH_VALUES`."""
    size = max(1, min(RESAMPLES, BATCH_VALUES // n))
    return [min(size, RESAMPLES - done) for done in range(0, RESAMPLES, size)]


def _bootstrap(statistic: Callable[..., np.ndarray], *columns: np.ndarray) -> tuple[float, float]:
    """Percentile interval of a statistic over resampled rows of `columns`, each [n]."""
    rng = np.random.default_rng(0)
    n = columns[0].size
    values = []
    for batch in _batches(n):
        index = rng.integers(0, n, size=(batch, n))
        values.append(statistic(*(column[index] for column in columns)))
    low, high = np.quantile(np.concatenate(values), [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)

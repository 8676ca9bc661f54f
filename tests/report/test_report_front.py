"""The Pareto front against brute force."""

import numpy as np
import pytest

from xsparse.report.front import pareto_front


def brute_force(x, y, minimise_x):
    """Points that no other point dominates; of equal points the first; NaN never."""
    sign = 1 if minimise_x else -1
    known = [i for i in range(len(x)) if not (np.isnan(x[i]) or np.isnan(y[i]))]
    front = []
    for i in known:
        dominated = any(
            sign * x[j] <= sign * x[i] and y[j] >= y[i] and ((x[j], y[j]) != (x[i], y[i]) or j < i)
            for j in known
            if j != i
        )
        if not dominated:
            front.append(i)
    return sorted(front, key=lambda i: x[i])


@pytest.mark.parametrize("minimise_x", [True, False])
def test_front_matches_brute_force(minimise_x):
    rng = np.random.default_rng(0)
    for _ in range(300):
        n = rng.integers(1, 14)
        # Few distinct values, so that ties in one and in both coordinates are common.
        x, y = rng.integers(0, 5, (2, n)).astype(float)
        x[rng.random(n) < 0.1] = np.nan
        y[rng.random(n) < 0.1] = np.nan
        assert pareto_front(x, y, minimise_x=minimise_x).tolist() == brute_force(x, y, minimise_x)


def test_front_of_nothing_and_of_nan_only_is_empty():
    assert pareto_front([], [], minimise_x=True).tolist() == []
    assert pareto_front([np.nan], [1.0], minimise_x=True).tolist() == []


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="of one length"):
        pareto_front([1.0], [1.0, 2.0], minimise_x=True)

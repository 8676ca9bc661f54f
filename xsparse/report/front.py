"""Non-dominated points of a cost (or gain) against a value."""

from __future__ import annotations

import numpy as np


def pareto_front(
    x: np.ndarray | list[float], y: np.ndarray | list[float], *, minimise_x: bool
) -> np.ndarray:
    """Indices of the non-dominated points, x ascending; y is always better when larger.

    x, y: [n]. A point with NaN in either is never on the front and dominates nothing. Of points
    equal in both only the first stays.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"x and y must be lists of one length, got {x.shape} and {y.shape}")
    cost = x if minimise_x else -x
    known = np.flatnonzero(~(np.isnan(x) | np.isnan(y)))
    best, front = -np.inf, []
    # Cheapest first, the better of equal costs first, the earlier of equal points first.
    for i in known[np.lexsort((known, -y[known], cost[known]))]:
        if y[i] > best:
            best = y[i]
            front.append(i)
    return np.array(front if minimise_x else front[::-1], dtype=np.intp)

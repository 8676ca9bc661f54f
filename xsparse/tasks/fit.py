"""How much filler fits: a search over a monotone function size -> tokens.

Every probe is an exact encoding of the whole prompt, so nothing is estimated in the result. The
next size is extrapolated from the tokens per unit seen so far and grows at most 16-fold at a time;
all probes but the last two are therefore short, and a 128k prompt costs two or three encodings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TooLong(ValueError):
    """Even the smallest prompt exceeds the budget; `tokens` is what it needs."""

    def __init__(self, tokens: int):
        super().__init__(f"the smallest prompt has {tokens} tokens")
        self.tokens = tokens


def fit(
    encode: Callable[[int], T],
    tokens: Callable[[T], int],
    *,
    smallest: int,
    largest: int | None,
    enough: int,
    budget: int,
) -> tuple[int, T]:
    """A size with enough <= tokens(encode(size)) <= budget, or else the largest that fits.

    Raises TooLong if `smallest` does not fit.
    """
    size, best = smallest, encode(smallest)
    count = first_count = tokens(best)
    if count > budget:
        raise TooLong(count)
    over: int | None = None if largest is None else largest + 1
    over_count: int | None = None
    aim = (enough + budget) // 2
    for probe in range(1, 1000):
        if count >= enough or (over is not None and over - size <= 1):
            return size, best
        if over is not None and over_count is not None:
            slope = (over_count - count) / (over - size)
        else:
            slope = (count - first_count) / (size - smallest) if size > smallest else 0.0
        step = int((aim - count) / slope) if slope > 0 else 32
        if over is not None and over_count is not None and probe > 8:
            step = (over - size) // 2  # interpolation is slow at a kink; bisection never is
        guess = size + max(1, min(step, 16 * size + 32))
        if over is not None:
            guess = min(guess, over - 1)
        candidate = encode(guess)
        guess_count = tokens(candidate)
        if guess_count <= budget:
            size, best, count = guess, candidate, guess_count
        else:
            over, over_count = guess, guess_count
    raise RuntimeError("size search did not end: the number of tokens does not grow with the size")

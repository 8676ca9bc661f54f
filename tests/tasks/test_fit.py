"""The size search against an exhaustive one, and its number of probes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsparse.tasks.fit import TooLong, fit


@given(
    steps=st.lists(st.integers(0, 300), min_size=1, max_size=300),
    budget=st.integers(0, 20_000),
    smallest=st.integers(0, 5),
)
def test_finds_the_largest_size(steps, budget, smallest):
    """With nothing below the budget enough, the result is the largest size that fits."""
    cumulative = [0]
    for step in steps:
        cumulative.append(cumulative[-1] + step)
    largest = len(steps)
    smallest = min(smallest, largest)

    def run():
        return fit(
            lambda n: cumulative[n],
            lambda t: t,
            smallest=smallest,
            largest=largest,
            enough=budget,
            budget=budget,
        )

    if cumulative[smallest] > budget:
        with pytest.raises(TooLong) as caught:
            run()
        assert caught.value.tokens == cumulative[smallest]
        return
    size, tokens = run()
    assert tokens == cumulative[size] <= budget
    assert tokens == max(t for t in cumulative[smallest:] if t <= budget)


@pytest.mark.parametrize(
    "tokens",
    [
        lambda n: 50 + 20 * n,
        lambda n: 2000 + int(n * (3 + math.log10(n + 1))),
        lambda n: 300 + 3 * n + (n // 7),
    ],
)
def test_few_long_probes(tokens):
    probes = []

    def encode(n):
        probes.append(n)
        return tokens(n)

    budget = 131_000
    size, found = fit(
        encode, lambda t: t, smallest=1, largest=None, enough=int(0.98 * budget), budget=budget
    )
    assert 0.98 * budget <= found <= budget
    assert sum(tokens(n) for n in probes) < 3.2 * budget
    assert len(probes) < 10

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.ops import oracle
from tests.ops.cases import CASES, make
from xsparse.ops import naive_backend, torch_backend
from xsparse.ops.selection.fast import keep_mass
from xsparse.ops.tiles import block_lists

FORMS = [naive_backend, torch_backend]
# Multiples of 1/64 add without rounding, so every comparison with the need is exact.
eighths = st.integers(0, 64).map(lambda x: x / 64)


@st.composite
def rows(draw):
    start = draw(st.integers(0, 5))
    count = draw(st.integers(1, 4))
    values = draw(hnp.arrays("float32", (2, count, start + count), elements=eighths))
    scores = torch.from_numpy(values)
    return scores.tril(start), start


@pytest.mark.parametrize("ops", FORMS, ids=lambda o: o.name)
@given(case=rows(), threshold=st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0]))
@settings(deadline=None, max_examples=100)
def test_selection_is_the_rule(ops, case, threshold):
    scores, start = case
    mask = ops.select_blocks(scores, threshold, q_block_start=start)
    for head in range(len(scores)):
        for a in range(scores.shape[1]):
            row, diagonal = scores[head, a].tolist(), start + a
            kept = set(mask[head, a].nonzero().flatten().tolist())
            assert kept == oracle.select_row(row, threshold, diagonal)
            assert {0, diagonal} <= kept
            assert max(kept) == diagonal
            need = threshold * math.fsum(row)
            assert math.fsum(row[b] for b in kept) >= need
            chosen = kept - {0, diagonal}
            if chosen and threshold < 1:
                last = max(chosen, key=lambda b: (-row[b], b))
                assert math.fsum(row[b] for b in kept - {last}) < need


@pytest.mark.parametrize("ops", FORMS, ids=lambda o: o.name)
def test_ties_go_to_the_lowest_index(ops):
    scores = torch.ones(1, 1, 9)
    mask = ops.select_blocks(scores, 0.5, q_block_start=8)
    assert mask[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 8]


@pytest.mark.parametrize("ops", FORMS, ids=lambda o: o.name)
def test_threshold_per_head(ops):
    scores = torch.rand(3, 4, 8).tril(4)
    thresholds = torch.tensor([0.0, 0.6, 1.0])
    mask = ops.select_blocks(scores, thresholds, q_block_start=4)
    for head, threshold in enumerate(thresholds.tolist()):
        want = ops.select_blocks(scores[head : head + 1], threshold, q_block_start=4)
        assert torch.equal(mask[head], want[0])
    assert (mask[0].sum(-1) == 2).all()
    assert mask[2].sum(-1).tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("threshold", [0.5, 0.9, 0.95])
def test_agrees_with_fp64_away_from_the_threshold(case, threshold):
    q, k, _ = make(case)
    scores = torch_backend.antidiagonal_scores(
        q,
        k,
        stride=case.stride,
        block_size=case.block_size,
        q_start=case.q_start,
        scaling=case.scaling,
    )
    start = case.q_start // case.block_size
    fast = torch_backend.select_blocks(scores, threshold, q_block_start=start)
    for head in range(case.q_heads):
        for a in range(case.q_blocks):
            row = scores[head, a].tolist()
            kept = set(fast[head, a].nonzero().flatten().tolist())
            assert kept == oracle.select_row(row, threshold, start + a)


def test_full_threshold_keeps_mass_that_rounds_away():
    scores = torch.zeros(1, 1, 6)
    scores[0, 0, 0] = 1
    scores[0, 0, 3] = 1e-30
    assert torch_backend.select_blocks(scores, 1.0, q_block_start=5).all()
    assert torch_backend.select_blocks(scores, torch.ones(1), q_block_start=5).all()


def test_keep_mass_counts_every_forced_block():
    scores = torch.tensor([[[4.0, 1.0, 3.0, 2.0]]])
    forced = torch.tensor([True, True, False, False])
    everywhere = torch.ones(4, dtype=torch.bool)
    kept = keep_mass(scores, 0.5, forced=forced, allowed=everywhere)
    assert kept[0, 0].tolist() == [True, True, False, False]
    kept = keep_mass(scores, 0.6, forced=forced, allowed=everywhere)
    assert kept[0, 0].tolist() == [True, True, True, False]


@given(hnp.arrays("bool", hnp.array_shapes(min_dims=3, max_dims=3, max_side=6)))
@settings(deadline=None, max_examples=50)
def test_block_lists_compact_a_mask(values):
    mask = torch.from_numpy(values)
    lists = block_lists(mask)
    assert torch.equal(lists.counts.long(), mask.sum(-1))
    for h in range(mask.shape[0]):
        for a in range(mask.shape[1]):
            kept = lists.indices[h, a, : lists.counts[h, a]].tolist()
            assert kept == mask[h, a].nonzero().flatten().tolist()

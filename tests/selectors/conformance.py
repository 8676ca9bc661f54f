"""What every selection method must do; test_conformance runs it over the registry."""

import dataclasses

import torch

from tests.ops.cases import CONTENTS, Case, make
from tests.selectors.views import StreamedKeys, causal, select, site
from xsparse.selectors import TensorKeys, build

LENGTHS = (1, 7, 127, 128, 129, 385, 1000, 1023, 1025)
CHUNKS = (Case(1025, 129), Case(1000, 360), Case(640, 256), Case(129, 1), Case(700, 37))


def declares(name: str) -> None:
    """The class says what engines and reductions must know, and names its parameters."""
    selector = build(name)
    assert dataclasses.is_dataclass(selector)
    assert selector.name == name
    assert selector.digests
    assert set(selector.digests) <= {
        "none",
        "streamed",
        "resident_k",
        "strided_k",
        "minmax",
        "block_mean",
        "quantised_k",
    }
    assert {f.name for f in dataclasses.fields(selector)} >= set(selector.keep_all)
    assert selector.dense or selector.keep_all


def masks_are_well_formed(name: str) -> None:
    """Any length and chunk: block 0 and the diagonal kept, the future never, density in (0, 1]."""
    cases = (
        [Case(n) for n in LENGTHS] + list(CHUNKS) + [Case(650, 394, content=c) for c in CONTENTS]
    )
    for case in cases:
        selection = select(build(name), case)
        mask, allowed = selection.mask, causal(case)
        assert mask.dtype == torch.bool
        assert mask.shape == (case.q_heads, case.q_blocks, case.k_blocks), case
        assert mask[..., 0].all(), case
        first = case.q_start // case.block_size
        assert mask.diagonal(first, 1, 2).all(), case
        assert not (mask & ~allowed).any(), case
        assert 0 < (mask.sum() / (allowed.sum() * case.q_heads)).item() <= 1
        assert (selection.scores is not None) == type(build(name)).has_scores
        if selection.scores is not None:
            assert selection.scores.shape == mask.shape
            assert selection.scores.isfinite().all()
            assert not selection.scores[:, ~allowed].any()


def the_first_query_block_keeps_one_block(name: str) -> None:
    mask = select(build(name), Case(400)).mask
    assert (mask[:, 0].sum(-1) == 1).all()


def keep_all_keeps_everything(name: str) -> None:
    for case in (Case(1000), Case(1025, 129), Case(650, 394, content="huge")):
        selector = build(name, **build(name).keep_all)
        assert torch.equal(select(selector, case).mask, causal(case).expand(case.q_heads, -1, -1))


def chunks_equal_one_shot(name: str) -> None:
    for length, chunk in ((1000, 256), (1025, 512)):
        case = Case(length, q_heads=4, kv_heads=2, content="structured")
        q, k, _ = make(case)
        whole = select(build(name), case)
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            part = build(name).select(
                q[:, start:stop], TensorKeys(k[:, :stop]), site(case, q_start=start)
            )
            first = start // case.block_size
            rows = (slice(None), slice(first, first + part.mask.shape[1]))
            columns = part.mask.shape[2]
            if part.scores is not None:
                torch.testing.assert_close(
                    part.scores, whole.scores[rows][..., :columns], atol=4e-6, rtol=1e-5
                )
            differs = part.mask != whole.mask[rows][..., :columns]
            assert differs.float().mean() < 0.01  # scores on the threshold may round either way


def streaming_equals_resident(name: str) -> None:
    if "streamed" not in build(name).digests:
        return
    for case in (Case(1025, 129), Case(1000, 360), Case(700, 37)):
        q, k, _ = make(case)
        whole = select(build(name), case)
        view = StreamedKeys(k, piece=256, chunk_start=case.q_start)
        streamed = build(name).select(q, view, site(case))
        torch.testing.assert_close(streamed.scores, whole.scores, atol=4e-5, rtol=1e-5)
        assert (streamed.mask != whole.mask).float().mean() < 0.01


def grouped_heads_equal_repeated_keys(name: str) -> None:
    for heads, kv_heads in ((9, 3), (28, 4), (32, 8)):
        case = Case(520, 264, heads, kv_heads)
        q, k, _ = make(case)
        grouped = build(name).select(q, TensorKeys(k), site(case))
        repeated = build(name).select(
            q, TensorKeys(k.repeat_interleave(heads // kv_heads, 0)), site(case)
        )
        assert (grouped.mask != repeated.mask).float().mean() < 0.01


def repeats_itself(name: str) -> None:
    """No state is left behind: another prompt in between changes nothing."""
    case = Case(700)
    selector = build(name)
    first = select(selector, case).mask
    select(selector, Case(333, content="huge"))
    assert torch.equal(select(selector, case).mask, first)
    assert torch.equal(select(build(name), case).mask, first)


CHECKS = (
    declares,
    masks_are_well_formed,
    the_first_query_block_keeps_one_block,
    keep_all_keeps_everything,
    chunks_equal_one_shot,
    streaming_equals_resident,
    grouped_heads_equal_repeated_keys,
    repeats_itself,
)

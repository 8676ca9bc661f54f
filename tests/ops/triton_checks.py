"""What the Triton operators must satisfy, for the interpreter (CPU) and for a GPU alike.

Every check compares with `tests.ops.oracle`, which shares no code with the operators, on the
inputs as rounded to the tested dtype.
"""

import torch

from tests.ops import oracle
from tests.ops.cases import Case, make, random_mask, tiles
from xsparse.ops import torch_backend, triton_backend
from xsparse.ops.selection import naive as naive_selection
from xsparse.ops.tiles import BlockLists

SCORE_TOLERANCE = 3e-6  # absolute, on A, for exact inputs
OUTPUT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def place(case: Case) -> dict:
    return {"stride": case.stride, "q_start": case.q_start, "scaling": case.scaling}


def scores(case: Case, device: str, dtype: torch.dtype) -> None:
    q, k, _ = make(case, dtype=dtype)
    got = triton_backend.antidiagonal_scores(
        q.to(device), k.to(device), block_size=case.block_size, **place(case)
    )
    assert not got.isnan().any()
    # Logits of hundreds carry their own rounding into the softmax.
    tolerance = SCORE_TOLERANCE * (100 if case.content == "huge" else 1)
    want = oracle.antidiagonal_scores(case, q, k)
    torch.testing.assert_close(got.double().cpu(), want, atol=tolerance, rtol=1e-5)


def streamed_scores(case: Case, piece: int, device: str) -> None:
    """Two passes over pieces of K equal the one-shot scores."""
    q, k, _ = (x.to(device) for x in make(case))
    want = triton_backend.antidiagonal_scores(q, k, block_size=case.block_size, **place(case))
    starts = range(0, case.length, piece)
    stats = [
        triton_backend.antidiagonal_stats(q, k[:, s : s + piece], k_start=s, **place(case))
        for s in starts
    ]
    m, l = stats[0]  # noqa: E741
    for more in stats[1:]:
        m, l = triton_backend.merge_stats((m, l), more)  # noqa: E741
    assert m.isfinite().all()
    sums = [
        triton_backend.antidiagonal_block_sums(
            q, k[:, s : s + piece], m, l, block_size=case.block_size, k_start=s, **place(case)
        )
        for s in starts
    ]
    torch.testing.assert_close(torch.cat(sums, -1), want, atol=SCORE_TOLERANCE, rtol=1e-5)


def selection(values: torch.Tensor, threshold, q_block_start: int) -> None:
    """Mask and lists are exactly those of the naive rule. values: as scores, on any device."""
    want = naive_selection.select_blocks(values.cpu(), threshold, q_block_start=q_block_start)
    mask, lists = triton_backend.select_block_lists(values, threshold, q_block_start=q_block_start)
    alone = triton_backend.select_blocks(values, threshold, q_block_start=q_block_start)
    assert torch.equal(mask.cpu(), want)
    assert torch.equal(alone, mask)
    same_lists(lists, want)
    same_lists(triton_backend.block_lists(mask), want)


def same_lists(lists: BlockLists, mask: torch.Tensor) -> None:
    indices, counts = lists.indices.cpu(), lists.counts.cpu()
    assert torch.equal(counts, mask.sum(-1, dtype=torch.int32))
    # In range everywhere, ascending in the part that counts.
    assert torch.equal(
        indices.sort(-1).values, torch.arange(mask.shape[-1]).expand_as(indices).int()
    )
    for row, count, kept in zip(
        indices.flatten(0, 1), counts.flatten(), mask.flatten(0, 1), strict=True
    ):
        assert torch.equal(row[:count].long(), kept.nonzero().flatten())


def causal_scores(heads: int, q_blocks: int, k_blocks: int, seed: int = 0) -> torch.Tensor:
    """Peaked random rows, zero past the diagonal, with ties and zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(heads, q_blocks, k_blocks, generator=generator) ** 8
    values[:, ::2] = (values[:, ::2] * 8).round() / 8
    block = torch.arange(k_blocks)
    diagonal = k_blocks - q_blocks + torch.arange(q_blocks)[:, None]
    return values.masked_fill(block > diagonal, 0)


def attention(case: Case, density: float, device: str, dtype: torch.dtype, **kwargs) -> None:
    q, k, v = make(case, dtype=dtype)
    mask = random_mask(case, density)
    want, want_lse = oracle.attention(
        q, k, v, scaling=case.scaling, visible=oracle.token_mask(case, mask)
    )
    kv = tiles(k.to(device), v.to(device), case.block_size)
    out, lse = triton_backend.block_sparse_attention(
        q.to(device),
        kv,
        triton_backend.block_lists(mask.to(device)),
        q_start=case.q_start,
        scaling=case.scaling,
        **kwargs,
    )
    close(case, out, lse, want, want_lse, dtype)


def close(case: Case, out, lse, want, want_lse, dtype: torch.dtype) -> None:
    assert not out.isnan().any()
    assert not lse.isnan().any()
    scale = 8 if case.content == "huge" else 1
    tolerance = OUTPUT_TOLERANCE[dtype] * scale
    torch.testing.assert_close(out.double().cpu(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=1e-5 * scale, rtol=1e-5)


def attention_in_windows(case: Case, device: str, dtype: torch.dtype) -> None:
    """Columns of a window may lie in any order, differ per head, and be unused; parts merge."""
    q, k, v = make(case, dtype=dtype)
    mask = random_mask(case, 0.5)
    want, want_lse = oracle.attention(
        q, k, v, scaling=case.scaling, visible=oracle.token_mask(case, mask)
    )
    generator = torch.Generator().manual_seed(3)
    group = case.q_heads // case.kv_heads
    orders = torch.stack(
        [torch.randperm(case.k_blocks, generator=generator) for _ in range(case.kv_heads)]
    )
    parts = []
    for window in orders.split(2, 1):
        blocks = torch.cat([window, torch.full_like(window[:, :1], -1)], 1)
        local = torch.stack([mask[h][:, window[h // group]] for h in range(case.q_heads)])
        local = torch.nn.functional.pad(local, (0, 1))
        parts.append(
            triton_backend.block_sparse_attention(
                q.to(device),
                tiles(k.to(device), v.to(device), case.block_size, blocks),
                triton_backend.block_lists(local.to(device)),
                q_start=case.q_start,
                scaling=case.scaling,
                out_dtype=torch.float32,
            )
        )
    outs, lses = zip(*parts, strict=True)
    out, lse = triton_backend.merge_states(outs, lses)
    close(case, out, lse, want, want_lse, dtype)


def empty_rows(device: str, dtype: torch.dtype, queries: int, **kwargs) -> None:
    """Rows without any block: zeros and -inf, and nothing added by a merge."""
    case = Case(queries + 128, queries, q_heads=4, kv_heads=2, head_dim=64)
    q, k, v = (x.to(device) for x in make(case, dtype=dtype))
    kv = tiles(k, v, case.block_size)
    mask = random_mask(case, 1.0)
    mask[1] = False
    out, lse = triton_backend.block_sparse_attention(
        q,
        kv,
        triton_backend.block_lists(mask.to(device)),
        q_start=case.q_start,
        scaling=case.scaling,
        **kwargs,
    )
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    assert lse[0].isfinite().all()
    merged, merged_lse = triton_backend.merge_states([out, out], [lse, lse])
    assert (merged[1] == 0).all()
    assert (merged_lse[1] == -torch.inf).all()
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse[0], lse[0] + torch.log(torch.tensor(2.0)).item())


def merging(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    outs = [torch.randn(3, 37, 80, generator=generator).to(device, dtype) for _ in range(4)]
    lses = [torch.randn(3, 37, generator=generator).to(device) * 9 for _ in range(4)]
    lses[1][0] = -torch.inf
    out, lse = triton_backend.merge_states(outs, lses)
    want, want_lse = torch_backend.merge_states(
        [o.double() for o in outs], [x.double() for x in lses]
    )
    tolerance = OUTPUT_TOLERANCE[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


def gathering(source: torch.Tensor, device: str) -> None:
    """source: [tiles, block_size, d], on the host (pinned for a GPU) or on the device."""
    index = torch.tensor([5, 0, -1, 5, 2], dtype=torch.int32, device=device)
    out = torch.full((5, *source.shape[1:]), 7.0, dtype=source.dtype, device=device)
    triton_backend.gather_tiles(source, index, out)
    want = source.to(device)[index.clamp_min(0).long()]
    want[2] = 7
    assert torch.equal(out, want)

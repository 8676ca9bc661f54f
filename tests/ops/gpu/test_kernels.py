"""The Triton operators on a GPU, in bf16, fp16 and fp32 (pytest -m gpu)."""

import dataclasses

import pytest
import torch

from tests.ops import oracle
from tests.ops import triton_checks as checks
from tests.ops.cases import CASES, Case, make, random_mask, tiles
from xsparse.ops import triton_backend
from xsparse.ops.attention.hopper import HopperTiling, why_not
from xsparse.ops.attention.kernel import Tiling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or triton_backend.why_not("cuda") is not None,
        reason="no GPU for the Triton kernels",
    ),
]

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
WIDE = [dataclasses.replace(c, head_dim=64) for c in CASES if c.head_dim == 16]
HOPPER = [HopperTiling(), HopperTiling(stages=3), HopperTiling(persistent=True)]
PLAIN = [Tiling(), Tiling(keys=64, stages=3)]


def skip_unless_hopper(case: Case, dtype: torch.dtype) -> None:
    q, k, v = make(dataclasses.replace(case, length=8, chunk=None), device="cuda", dtype=dtype)
    if reason := why_not(q, tiles(k, v, case.block_size)):
        pytest.skip(f"the Hopper kernel {reason}")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scores(case, dtype):
    checks.scores(case, "cuda", dtype)


@pytest.mark.parametrize("piece", [128, 384])
@pytest.mark.parametrize("case", [Case(1000, 360), Case(700, 37), Case(1025)], ids=str)
def test_streamed_scores(case, piece):
    checks.streamed_scores(case, piece, "cuda")


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9, 0.999, 1.0, torch.tensor([0.2, 0.9, 1.0])])
@pytest.mark.parametrize("k_blocks", [4, 40, 1100])
def test_selection(threshold, k_blocks):
    checks.selection(checks.causal_scores(3, 4, k_blocks).cuda(), threshold, k_blocks - 4)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention(case, dtype):
    checks.attention(case, 0.4, "cuda", dtype)


@pytest.mark.parametrize("tiling", HOPPER, ids=str)
@pytest.mark.parametrize("case", WIDE, ids=str)
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_hopper_attention(case, dtype, tiling):
    skip_unless_hopper(case, dtype)
    checks.attention(case, 0.4, "cuda", dtype, tiling=tiling)


@pytest.mark.parametrize("tiling", PLAIN, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_plain_attention_where_another_kernel_is_the_default(head_dim, dtype, tiling):
    for case in (Case(1025, 129), Case(700, 37), Case(650, 394, content="huge")):
        case = dataclasses.replace(case, head_dim=head_dim)
        checks.attention(case, 0.4, "cuda", dtype, tiling=tiling)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("queries", [1, 61])
def test_attention_in_windows(block_size, queries):
    case = Case(300, queries, q_heads=4, kv_heads=2, block_size=block_size, head_dim=64)
    checks.attention_in_windows(case, "cuda", torch.bfloat16)


@pytest.mark.parametrize("queries", [1, 200])
def test_empty_rows(queries):
    checks.empty_rows("cuda", torch.bfloat16, queries)


def test_empty_rows_of_the_hopper_kernel():
    skip_unless_hopper(Case(8, head_dim=64), torch.bfloat16)
    checks.empty_rows("cuda", torch.bfloat16, 200, tiling=HopperTiling())


@pytest.mark.parametrize("tiling", [None, *HOPPER, *PLAIN], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_error_at_most_twice_that_of_sdpa(head_dim, tiling):
    case = Case(2048, q_heads=8, kv_heads=2, head_dim=head_dim, content="structured")
    if isinstance(tiling, HopperTiling):
        skip_unless_hopper(case, torch.bfloat16)
    q, k, v = make(case, dtype=torch.bfloat16)
    mask = random_mask(case, 0.5)
    visible = oracle.token_mask(case, mask)
    want, _ = oracle.attention(q, k, v, scaling=case.scaling, visible=visible)
    q, k, v = q.cuda(), k.cuda(), v.cuda()
    out, _ = triton_backend.block_sparse_attention(
        q,
        tiles(k, v, 128),
        triton_backend.block_lists(mask.cuda()),
        q_start=0,
        scaling=case.scaling,
        tiling=tiling,
    )
    torch_out = torch.nn.functional.scaled_dot_product_attention(
        q[None],
        k.repeat_interleave(4, 0)[None],
        v.repeat_interleave(4, 0)[None],
        attn_mask=visible.cuda()[None],
        scale=case.scaling,
    )[0]
    assert not out.isnan().any()
    error = (out.double().cpu() - want).norm()
    torch_error = (torch_out.double().cpu() - want).norm()
    assert error <= 2 * torch_error


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_merge(dtype):
    checks.merging("cuda", dtype)


def test_gather_from_pinned_memory_and_from_the_device():
    source = torch.randn(6, 128, 128).bfloat16()
    checks.gathering(source.pin_memory(), "cuda")
    checks.gathering(source.cuda(), "cuda")


def test_gather_refuses_pageable_memory():
    with pytest.raises(ValueError, match="pinned"):
        triton_backend.gather_tiles(
            torch.zeros(2, 16, 16),
            torch.zeros(1, dtype=torch.int32).cuda(),
            torch.zeros(1, 16, 16).cuda(),
        )


def test_decode_inside_a_graph_follows_its_inputs():
    """Position, lists and tiles change between replays; the launch does not."""
    case = Case(1000, 1, q_heads=8, kv_heads=2, head_dim=64)
    q, k, v = make(case, device="cuda", dtype=torch.bfloat16)
    kv = tiles(k, v, 128)
    mask = random_mask(case, 0.5, device="cuda")
    position = torch.tensor([999], device="cuda")

    def step():
        lists = triton_backend.block_lists(mask)
        return triton_backend.block_sparse_attention(
            q, kv, lists, q_start=position, scaling=case.scaling
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for position_now, density in ((999, 0.3), (920, 1.0)):
        position.fill_(position_now)
        mask.copy_(random_mask(case, density))
        q.normal_()
        graph.replay()
        want, want_lse = step()
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(lse, want_lse)


def test_indices_beyond_32_bits():
    """A pool of more than 2^31 numbers, as a million tokens of many heads make."""
    kv_heads, length, head_dim = 32, 1 << 20, 128
    blocks = length // 128
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of GPU memory")
    pool = torch.empty(kv_heads * blocks, 128, head_dim, dtype=torch.bfloat16, device="cuda")
    pool.normal_()
    k = pool.view(kv_heads, length, head_dim)
    case = Case(length, 128, q_heads=kv_heads, kv_heads=kv_heads, head_dim=head_dim, stride=16)
    q = torch.randn(kv_heads, 128, head_dim, device="cuda").bfloat16()
    from xsparse.ops.tiles import BlockLists, KVTiles

    numbers = torch.arange(blocks, dtype=torch.int32, device="cuda").expand(kv_heads, -1)
    index = numbers + torch.arange(kv_heads, device="cuda", dtype=torch.int32)[:, None] * blocks
    columns = torch.tensor([0, 5, blocks - 2, blocks - 1], dtype=torch.int32, device="cuda")
    lists = BlockLists(
        columns.expand(kv_heads, 1, -1).contiguous(),
        torch.full((kv_heads, 1), 4, dtype=torch.int32, device="cuda"),
    )
    kv = KVTiles(pool, pool, index.contiguous(), index.contiguous(), numbers.contiguous())
    tilings = [None, Tiling()]
    near = torch.cat([k[:, c * 128 : (c + 1) * 128] for c in columns.tolist()], 1)
    visible = torch.ones(128, 512, dtype=torch.bool).tril(384).expand(kv_heads, -1, -1)
    want, _ = oracle.attention(
        q.cpu(), near.cpu(), near.cpu(), scaling=case.scaling, visible=visible
    )
    for tiling in tilings:
        out, _ = triton_backend.block_sparse_attention(
            q, kv, lists, q_start=case.q_start, scaling=case.scaling, tiling=tiling
        )
        torch.testing.assert_close(out.double().cpu(), want, atol=2e-2, rtol=2e-2)
    a = triton_backend.antidiagonal_scores(q, k, block_size=128, **checks.place(case))
    assert a.isfinite().all()
    torch.testing.assert_close(a.sum(-1), torch.full_like(a[..., 0], 8.0), atol=1e-3, rtol=0)

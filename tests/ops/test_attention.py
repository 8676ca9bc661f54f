import pytest
import torch

from tests.ops import oracle
from tests.ops.cases import CASES, Case, make, random_mask, tiles
from xsparse.ops import naive_backend, torch_backend
from xsparse.ops.attention import dense, fast
from xsparse.ops.tiles import BlockLists, KVTiles, block_lists

close = torch.testing.assert_close


def sparse(ops, case, q, k, v, mask, **kwargs):
    return ops.block_sparse_attention(
        q,
        tiles(k, v, case.block_size),
        block_lists(mask),
        q_start=case.q_start,
        scaling=case.scaling,
        **kwargs,
    )


def compare(case, got, want, tolerance=1e-5):
    out, lse = got
    assert not out.isnan().any()
    assert not lse.isnan().any()
    # Sums of products of size |logit| carry its rounding.
    scale = 8 if case.content == "huge" else 1
    close(out.double(), want[0], atol=tolerance * scale, rtol=0)
    close(lse.double(), want[1], atol=tolerance * scale, rtol=1e-6)


@pytest.mark.parametrize("density", [0.4, 1.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_sparse(case, density):
    q, k, v = make(case)
    mask = random_mask(case, density)
    visible = oracle.token_mask(case, mask)
    want = oracle.attention(q, k, v, scaling=case.scaling, visible=visible)
    compare(case, sparse(torch_backend, case, q, k, v, mask), want)


@pytest.mark.parametrize(
    "case",
    [Case(150, 70, block_size=32), Case(40, 1, block_size=16, q_heads=4, kv_heads=2)],
    ids=str,
)
def test_naive_block_sparse(case):
    q, k, v = make(case, dtype=torch.float64)
    mask = random_mask(case, 0.4)
    want = oracle.attention(q, k, v, scaling=case.scaling, visible=oracle.token_mask(case, mask))
    compare(case, sparse(naive_backend, case, q, k, v, mask), want, 1e-12)


def test_fp64_stays_fp64():
    case = Case(300, 172)
    q, k, v = make(case, dtype=torch.float64)
    mask = random_mask(case, 0.5)
    want = oracle.attention(q, k, v, scaling=case.scaling, visible=oracle.token_mask(case, mask))
    compare(case, sparse(torch_backend, case, q, k, v, mask), want, 1e-12)


@pytest.mark.parametrize(
    "case", [Case(600, 344, 6, 2), Case(600, 1, 6, 2), Case(515, 2, 6, 2)], ids=str
)
def test_heads_of_a_group_may_share_their_lists(case):
    q, k, v = make(case)
    mask = random_mask(case, 0.5)[::3].repeat_interleave(3, 0)
    assert fast._same(*vars(block_lists(mask)).values(), 2)
    want = oracle.attention(q, k, v, scaling=case.scaling, visible=oracle.token_mask(case, mask))
    compare(case, sparse(torch_backend, case, q, k, v, mask), want)


@pytest.mark.parametrize("ops", [naive_backend, torch_backend], ids=lambda o: o.name)
def test_windows_of_any_columns_merge_to_the_whole(ops):
    """Columns differ per KV head, come in any order, and some are unused (-1)."""
    case = Case(420, 164, 4, 2, block_size=64)
    q, k, v = make(case)
    mask = random_mask(case, 0.5)
    deal = torch.stack([torch.randperm(case.k_blocks) for _ in range(2)])
    parts = []
    for columns in (deal[:, :3], deal[:, 3:4], deal[:, 4:]):
        unused = torch.full((2, 1), -1)
        blocks = torch.cat([columns, unused], 1)
        window = tiles(k, v, 64, blocks)
        per_head = blocks.repeat_interleave(2, 0)[:, None].expand(-1, case.q_blocks, -1)
        kept = mask.gather(2, per_head.clamp_min(0)) & (per_head >= 0)
        parts.append(
            ops.block_sparse_attention(
                q, window, block_lists(kept), q_start=case.q_start, scaling=case.scaling
            )
        )
    want = oracle.attention(q, k, v, scaling=case.scaling, visible=oracle.token_mask(case, mask))
    compare(case, ops.merge_states(*zip(*parts, strict=True)), want)


@pytest.mark.parametrize("ops", [naive_backend, torch_backend], ids=lambda o: o.name)
def test_empty_rows_and_listed_future_blocks(ops):
    case = Case(200, 72, 2, 1, block_size=64)
    q, k, v = make(case)
    window = tiles(k, v, 64)
    counts = torch.tensor([[0, 1], [4, 0]], dtype=torch.int32)
    indices = torch.tensor([[[0] * 4, [3] * 4], [[0, 1, 2, 3], [0] * 4]], dtype=torch.int32)
    out, lse = ops.block_sparse_attention(
        q, window, BlockLists(indices, counts), q_start=128, scaling=case.scaling
    )
    visible = torch.zeros(2, 2, 4, dtype=torch.bool)
    visible[0, 1, 3] = visible[1, 0] = True
    want = oracle.attention(q, k, v, scaling=case.scaling, visible=oracle.token_mask(case, visible))
    compare(case, (out, lse), want)
    assert (out[0, :64] == 0).all()
    assert (lse[0, :64] == -torch.inf).all()


def test_garbage_behind_the_last_token_is_masked():
    case = Case(200, 72, block_size=64)
    q, k, v = make(case)
    window = tiles(k, v, 64)
    last = window.k_index[0, -1].item(), window.v_index[0, -1].item()
    window.k_pool[last[0], 200 - 192 :] = 1e4
    window.v_pool[last[1], 200 - 192 :] = 1e4
    mask = random_mask(case, 1.0)
    out, _ = torch_backend.block_sparse_attention(
        q, window, block_lists(mask), q_start=128, scaling=case.scaling
    )
    want, _ = oracle.attention(q, k, v, scaling=case.scaling, visible=oracle.token_mask(case, mask))
    close(out.double(), want, atol=1e-5, rtol=0)


def test_one_pool_may_hold_k_and_v():
    case = Case(256, 128)
    q, k, v = make(case)
    apart = tiles(k, v, 128)
    pool = torch.cat([apart.k_pool, apart.v_pool])
    both = KVTiles(pool, pool, apart.k_index, apart.v_index + len(apart.k_pool), apart.blocks)
    lists = block_lists(random_mask(case, 1.0))
    at = {"q_start": 128, "scaling": case.scaling}
    for x, y in zip(
        torch_backend.block_sparse_attention(q, both, lists, **at),
        torch_backend.block_sparse_attention(q, apart, lists, **at),
        strict=True,
    ):
        close(x, y, atol=0, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense(case, causal):
    q, k, v = make(case)
    u = torch.arange(case.length)
    visible = (u <= u[case.q_start :, None]) | (not causal)
    want = oracle.attention(
        q, k, v, scaling=case.scaling, visible=visible.expand(case.q_heads, -1, -1)
    )
    got = torch_backend.dense_attention(q, k, v, scaling=case.scaling, causal=causal)
    compare(case, got, want)
    compare(case, naive_backend.dense_attention(q, k, v, scaling=case.scaling, causal=causal), want)


def test_dense_kernel_is_named_and_checked():
    q = torch.randn(2, 8, 64)
    assert torch_backend.dense_kernel(q) == "cpu-flash"
    assert torch_backend.dense_kernel(q.to("meta")) == "math"
    assert not dense._works("cudnn", torch.device("cpu"), torch.float32, 64)
    assert not dense._works("flash2", torch.device("cpu"), torch.bfloat16, 64)


@pytest.mark.parametrize("case", [Case(300, 172, 6, 2), Case(65, 65), Case(129, 1)], ids=str)
def test_dense_without_any_kernel(case, monkeypatch):
    monkeypatch.setattr(dense, "_works", lambda *_: False)
    monkeypatch.setattr(dense, "MATH_NUMBERS", 3000)
    q, k, v = make(case)
    assert dense.dense_kernel(q) == "math"
    got = dense.dense_attention(q, k, v, scaling=case.scaling, causal=True)
    compare(
        case,
        got,
        naive_backend.dense_attention(
            q.double(), k.double(), v.double(), scaling=case.scaling, causal=True
        ),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_torch(dtype):
    case = Case(512, 256, 6, 2, head_dim=64, content="structured")
    q, k, v = make(case, dtype=dtype)
    u = torch.arange(case.length)
    causal = u <= u[case.q_start :, None]
    want, _ = oracle.attention(
        q, k, v, scaling=case.scaling, visible=causal.expand(case.q_heads, -1, -1)
    )
    peer = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=causal, enable_gqa=True
    )[0]
    peer_error = (peer.double() - want).norm()
    mask = random_mask(case, 1.0)
    for out, lse in (
        torch_backend.dense_attention(q, k, v, scaling=case.scaling, causal=True),
        sparse(torch_backend, case, q, k, v, mask),
    ):
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        assert not out.isnan().any()
        assert (out.double() - want).norm() <= 2 * peer_error
    out, _ = sparse(torch_backend, case, q, k, v, mask, out_dtype=torch.float32)
    assert out.dtype == torch.float32


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_merge_over_any_cut(parts):
    case = Case(250, 40, 4, 2)
    q, k, v = make(case)
    cuts = sorted({0, 250, *torch.randperm(249)[: parts - 1].add(1).tolist()})
    pieces = [
        torch_backend.dense_attention(q, k[:, a:b], v[:, a:b], scaling=case.scaling, causal=False)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    everything = torch.ones(4, 40, 250, dtype=torch.bool)
    want = oracle.attention(q, k, v, scaling=case.scaling, visible=everything)
    compare(case, torch_backend.merge_states(*zip(*pieces, strict=True)), want)


def test_merge_with_empty_parts():
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    empty = torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf)
    for order in ([(out, lse), empty], [empty, (out, lse)], [empty, (out, lse), empty]):
        merged, merged_lse = torch_backend.merge_states(*zip(*order, strict=True))
        close(merged, out, atol=1e-6, rtol=0)
        close(merged_lse, lse, atol=1e-6, rtol=0)
    merged, merged_lse = torch_backend.merge_states([empty[0]] * 2, [empty[1]] * 2)
    assert (merged == 0).all()
    assert (merged_lse == -torch.inf).all()


def test_merge_does_not_write_into_its_parts():
    outs, lses = [torch.ones(1, 2, 4), torch.ones(1, 2, 4)], [torch.zeros(1, 2)] * 2
    torch_backend.merge_states(outs, lses)
    assert (outs[0] == 1).all()


def test_gather_tiles():
    source = torch.randn(9, 4, 3)
    index = torch.tensor([7, 0, 7], dtype=torch.int32)
    out = torch.empty(3, 4, 3)
    torch_backend.gather_tiles(source, index, out)
    assert torch.equal(out, source[[7, 0, 7]])

"""What FlexAttention and FlashAttention-4 are given, on a CPU; tests/ops/gpu runs the kernels."""

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput

from tests.ops import oracle
from tests.ops.cases import Case, make, random_mask, tiles
from xsparse import ops
from xsparse.ops.attention.contiguous import split_diagonal, whole_kv
from xsparse.ops.tiles import KVTiles, block_lists


def resident(k: torch.Tensor, v: torch.Tensor, block: int, spare: int = 1) -> KVTiles:
    """K and V as the resident cache lays them out: one pool, room for more blocks per head."""
    heads, length, dim = k.shape
    blocks = -(-length // block)
    cache = torch.zeros(2, heads, (blocks + spare) * block, dim, dtype=k.dtype, device=k.device)
    cache[0, :, :length], cache[1, :, :length] = k, v
    pool = cache.view(-1, block, dim)
    numbers = torch.arange(blocks, dtype=torch.int32, device=k.device).expand(heads, -1)
    first = torch.arange(heads, dtype=torch.int32, device=k.device)[:, None] * (blocks + spare)
    v_index = numbers + first + heads * (blocks + spare)
    return KVTiles(pool, pool, numbers + first, v_index, numbers.contiguous())


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("length", [1, 16, 50])
def test_whole_kv_is_the_cache_itself(heads, length):
    k, v = torch.randn(heads, length, 8), torch.randn(heads, length, 8)
    kv = resident(k, v, 16)
    got_k, got_v = whole_kv(kv, length, "flex")
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)
    assert got_k.untyped_storage().data_ptr() == kv.k_pool.untyped_storage().data_ptr()


@pytest.mark.parametrize("wrong", ["scattered", "window", "short"])
def test_other_layouts_are_refused(wrong):
    k, v = torch.randn(2, 64, 8), torch.randn(2, 64, 8)
    kv = tiles(k, v, 16) if wrong == "scattered" else resident(k, v, 16)
    if wrong == "window":
        later = slice(1, None)
        kv = KVTiles(
            kv.k_pool, kv.v_pool, kv.k_index[:, later], kv.v_index[:, later], kv.blocks[:, later]
        )
    with pytest.raises(ValueError, match="ops_backend=fa4 takes K and V only where they are whole"):
        whole_kv(kv, 65 if wrong == "short" else 64, "fa4")


def test_the_diagonal_is_told_from_the_blocks_before_it():
    case = Case(640, 256, q_heads=3, block_size=64)
    mask = random_mask(case, 0.4)
    mask[0, 1] = False
    mask[1, 2, 8] = False  # this row's diagonal
    split = split_diagonal(block_lists(mask), case.q_start // 64)
    rows = zip(
        mask.flatten(0, 1),
        split.full.indices.flatten(0, 1),
        split.full.counts.flatten(),
        split.partial.indices.flatten(),
        split.partial.counts.flatten(),
        strict=True,
    )
    for i, (kept, full, count, diagonal, listed) in enumerate(rows):
        assert diagonal == 6 + i % 4
        assert bool(listed) == bool(kept[diagonal])
        want = [b for b in kept.nonzero().flatten().tolist() if b != diagonal]
        assert full[:count].tolist() == want


def flex_stand_in(q, k, v, *, block_mask, scale, enable_gqa, return_aux):
    """Attention as the compiled FlexAttention reads a BlockMask (its plain form skips the lists):
    listed full blocks uncut, listed partial ones cut by the mask function."""
    assert enable_gqa
    assert return_aux.lse
    queries, keys = block_mask.seq_lengths
    assert (queries, keys) == (q.shape[2], k.shape[2])
    size = block_mask.BLOCK_SIZE[0]
    t, u = torch.arange(queries)[:, None], torch.arange(keys)
    cut = block_mask.mask_mod(0, 0, t, u)

    def listed(counts, indices):
        blocks = torch.zeros(indices.shape[1], indices.shape[2], -(-keys // size), dtype=torch.bool)
        for h, row in torch.cartesian_prod(*map(torch.arange, blocks.shape[:2])).tolist():
            blocks[h, row, indices[0, h, row, : counts[0, h, row]].long()] = True
        return blocks[:, t[:, 0] // size][..., u // size]

    visible = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    visible |= listed(block_mask.kv_num_blocks, block_mask.kv_indices) & cut
    out, lse = oracle.attention(q[0], k[0], v[0], scaling=scale, visible=visible)
    return out[None], AuxOutput(lse=lse[None])


@pytest.mark.parametrize(
    "case",
    [Case(300, q_heads=4, kv_heads=2), Case(500, 200, q_heads=2), Case(640, 256), Case(130, 3)],
    ids=str,
)
def test_flex_gets_the_right_mask(case, monkeypatch):
    from xsparse.ops import flex_backend

    monkeypatch.setattr(flex_backend, "compiled", lambda dynamic: flex_stand_in)
    q, k, v = make(case)
    mask = random_mask(case, 0.5)
    want, want_lse = oracle.attention(
        q, k, v, scaling=case.scaling, visible=oracle.token_mask(case, mask)
    )
    out, lse = flex_backend.block_sparse_attention(
        q, resident(k, v, 128), block_lists(mask), q_start=case.q_start, scaling=case.scaling
    )
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", ["flex", "fa4"])
def test_a_cpu_is_refused_with_the_reason(backend, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=f"ops_backend={backend} cannot run on cpu: .*CUDA GPU"):
        ops.get(backend, "cpu")

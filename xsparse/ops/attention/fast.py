"""Block-sparse attention in torch, made for a CPU.

Rows of blocks that keep the same number of columns are one batch: their K and V tiles are gathered
side by side and two batched products with a softmax between them do the rest. The diagonal column
comes last, so only the last `block_size` logits of a row ever need a token mask. Where all query
heads of a KV head keep the same columns (decode, whole-group reductions) they share the gather.
"""

from collections import defaultdict

import torch
from torch import Tensor

from xsparse.ops.antidiagonal.fast import antidiagonal_scores
from xsparse.ops.tiles import BlockLists, KVTiles

# Logits and tiles of one batch; small enough to stay in a CPU's last-level cache.
BATCH_NUMBERS = 1 << 20


def block_sparse_attention(
    q: Tensor,
    kv: KVTiles,
    lists: BlockLists,
    *,
    q_start: int | Tensor,
    scaling: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """See naive.block_sparse_attention. Reads the counts, and q_start, on the host."""
    q_start = int(q_start)
    q_heads, queries, head_dim = q.shape
    block_size, kv_heads = kv.block_size, kv.kv_heads
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape, dtype=out_dtype or q.dtype)
    lse = q.new_full((q_heads, queries), -torch.inf, dtype=dtype)
    indices, counts = lists.indices.long(), lists.counts
    members = q_heads // kv_heads
    if members > 1:
        if _same(indices, counts, kv_heads):
            indices, counts = indices[::members], counts[::members]
        else:
            members = 1
    heads = q_heads // members
    group = torch.arange(heads, device=q.device) // (heads // kv_heads)
    q, by_head = (x.view(heads, members, *x.shape[1:]) for x in (q.to(dtype), out))
    lse_by_head = lse.view(heads, members, queries)
    first = q_start // block_size
    for begin, end, height in _segments(q_start, queries, block_size):
        a = (q_start + begin) // block_size - first
        count = (end - begin) // height
        rows = _rows(kv, indices[:, a : a + count], counts[:, a : a + count], group, first + a)
        q_rows = _split(q[:, :, begin:end], count).flatten(2, 3).flatten(0, 1)
        part, part_lse = _attend(q_rows, kv, rows, (q_start + begin) % block_size, height, scaling)
        part = part.view(heads, count, members, height, head_dim)
        _split(by_head[:, :, begin:end], count).copy_(part)
        _split(lse_by_head[:, :, begin:end], count).copy_(part_lse.view(part.shape[:-1]))
    return out, lse


def attention_mass(
    q: Tensor, k: Tensor, *, block_size: int, q_start: int, scaling: float
) -> Tensor:
    """See naive.attention_mass: antidiagonals of length one."""
    return antidiagonal_scores(
        q, k, stride=1, block_size=block_size, q_start=q_start, scaling=scaling
    )


def _same(indices: Tensor, counts: Tensor, kv_heads: int) -> bool:
    """Whether the query heads of every KV head keep the same columns."""
    counts = counts.unflatten(0, (kv_heads, -1))
    if not bool((counts == counts[:, :1]).all()):
        return False
    indices = indices.unflatten(0, (kv_heads, -1))
    beyond = torch.arange(indices.shape[-1], device=indices.device) >= counts[..., None]
    return bool(((indices == indices[:, :1]) | beyond).all())


def _segments(q_start: int, queries: int, block_size: int) -> list[tuple[int, int, int]]:
    """(begin, end, height) of the partial first block, the whole ones, the partial last one."""
    head = min(-q_start % block_size, queries)
    whole = (queries - head) // block_size * block_size
    cuts = [
        (0, head, head),
        (head, head + whole, block_size),
        (head + whole, queries, queries - head - whole),
    ]
    return [cut for cut in cuts if cut[1] > cut[0]]


def _split(x: Tensor, count: int) -> Tensor:
    """[heads, members, count * height, ...] -> a view [heads, count, members, height, ...]"""
    return x.unflatten(2, (count, -1)).transpose(1, 2)


def _rows(
    kv: KVTiles, indices: Tensor, counts: Tensor, group: Tensor, first_block: int
) -> tuple[Tensor, Tensor, dict[tuple[int, bool], list[int]]]:
    """What each row of blocks reads.

    indices: [heads, rows, columns]; returns K tiles and V tiles [heads * rows, columns], fully
    visible ones first and the diagonal after them, and the rows by (tiles, diagonal among them)
    """
    heads, count, columns = indices.shape
    group = group[:, None, None]
    block = kv.blocks.long()[group, indices]
    diagonal = first_block + torch.arange(count, device=block.device)[:, None]
    listed = torch.arange(columns, device=block.device) < counts[..., None]
    listed &= (block >= 0) & (block <= diagonal)
    on_diagonal = listed & (block == diagonal)
    order = torch.argsort(torch.where(listed, on_diagonal.int(), 2), dim=-1, stable=True)
    indices = indices.gather(-1, order)
    k_tiles, v_tiles = (x[group, indices].flatten(0, 1) for x in (kv.k_index, kv.v_index))
    kinds = torch.stack([listed.sum(-1), on_diagonal.any(-1)], -1).flatten(0, 1).tolist()
    batches: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for row, (tiles, has_diagonal) in enumerate(kinds):
        if tiles:
            batches[tiles, bool(has_diagonal)].append(row)
    return k_tiles, v_tiles, batches


def _attend(
    q: Tensor,
    kv: KVTiles,
    rows: tuple[Tensor, Tensor, dict[tuple[int, bool], list[int]]],
    offset: int,
    height: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """q: [rows, members * height, d], the first query of a row `offset` tokens into its block;
    returns out like q and lse [rows, members * height]"""
    k_tiles, v_tiles, batches = rows
    block_size, head_dim = kv.block_size, q.shape[-1]
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -torch.inf)
    t = offset + torch.arange(height, device=q.device)
    hidden = torch.arange(block_size, device=q.device) > t[:, None]
    hidden = hidden.repeat(q.shape[1] // height, 1)
    for (count, has_diagonal), members in batches.items():
        numbers = count * block_size * max(q.shape[1], head_dim)
        step = max(1, BATCH_NUMBERS // numbers)
        for i in range(0, len(members), step):
            batch = torch.tensor(members[i : i + step], device=q.device)
            k = _gather(kv.k_pool, k_tiles[batch, :count], q.dtype)
            v = _gather(kv.v_pool, v_tiles[batch, :count], q.dtype)
            logits = torch.bmm(q[batch], k.mT).mul_(scaling)
            if has_diagonal:
                logits[..., -block_size:].masked_fill_(hidden, -torch.inf)
            top = logits.amax(-1)
            weights = torch.softmax(logits, -1, out=logits)
            # The largest weight is 1 / sum exp(logit - top).
            lse[batch] = top - weights.amax(-1).log()
            out[batch] = torch.bmm(weights, v)
    return out, lse


def _gather(pool: Tensor, tiles: Tensor, dtype: torch.dtype) -> Tensor:
    """Tiles side by side. tiles: [rows, count] -> [rows, count * block_size, head_dim]"""
    picked = pool.flatten(1).index_select(0, tiles.flatten())
    return picked.view(len(tiles), -1, pool.shape[-1]).to(dtype)

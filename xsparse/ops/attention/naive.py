"""Attention token by token from the definition; fp64 stays fp64."""

import torch
from torch import Tensor

from xsparse.ops.tiles import BlockLists, KVTiles


def block_sparse_attention(
    q: Tensor,
    kv: KVTiles,
    lists: BlockLists,
    *,
    q_start: int | Tensor,
    scaling: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention over the kept columns of a window.

    q: [q_heads, C, d], the first at position q_start; row 0 of `lists` is block
    q_start // block_size. A query at position t sees token u of a kept column iff u <= t.
    Returns out [q_heads, C, d] in out_dtype (that of q by default) and lse [q_heads, C], natural
    log, fp32 (fp64 from fp64). Rows that see nothing have out 0 and lse -inf.
    """
    q_start = int(q_start)
    q_heads, queries, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, dtype=dtype)
    lse = out.new_full((q_heads, queries), -torch.inf)
    block_size = kv.block_size
    for head in range(q_heads):
        group = head // (q_heads // kv.kv_heads)
        for t in range(queries):
            position = q_start + t
            a = position // block_size - q_start // block_size
            columns = lists.indices[head, a, : int(lists.counts[head, a])].long()
            keys = kv.k_pool[kv.k_index[group, columns].long()].to(dtype).flatten(0, 1)
            values = kv.v_pool[kv.v_index[group, columns].long()].to(dtype).flatten(0, 1)
            offset = torch.arange(block_size, device=q.device)
            u = (kv.blocks[group, columns].long()[:, None] * block_size + offset).flatten()
            visible = u <= position
            if not visible.any():
                continue
            logits = keys[visible] @ q[head, t].to(dtype) * scaling
            lse[head, t] = torch.logsumexp(logits, 0)
            out[head, t] = torch.softmax(logits, 0) @ values[visible]
    return out.to(out_dtype or q.dtype), lse


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    causal: bool,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over all keys; causal aligns the last query with the last key.

    q: [q_heads, C, d]; k, v: [kv_heads, N, d]; returns as block_sparse_attention
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = len(q) // len(k)
    k, v = (x.to(dtype).repeat_interleave(group, 0) for x in (k, v))
    logits = q.to(dtype) @ k.mT * scaling
    if causal:
        position = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
        logits.masked_fill_(torch.arange(k.shape[1], device=q.device) > position, -torch.inf)
    out = torch.softmax(logits, -1) @ v
    return out.to(out_dtype or q.dtype), torch.logsumexp(logits, -1)


def dense_kernel(q: Tensor) -> str:
    """The kernel behind dense_attention."""
    return "math"


def attention_mass(
    q: Tensor, k: Tensor, *, block_size: int, q_start: int, scaling: float
) -> Tensor:
    """Softmax mass of each (query block, key block), summed over the block's queries.

    q: [q_heads, C, d]; k: [kv_heads, N, d], N = q_start + C; returns fp32 (fp64 from fp64)
    [q_heads, q_blocks, ceil(N / block_size)]
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    position = q_start + torch.arange(q.shape[1], device=q.device)
    u = torch.arange(k.shape[1], device=q.device)
    logits = q.to(dtype) @ k.to(dtype).repeat_interleave(len(q) // len(k), 0).mT * scaling
    mass = torch.softmax(logits.masked_fill(u > position[:, None], -torch.inf), -1)
    first, last = q_start // block_size, int(position[-1]) // block_size
    blocks = -(-k.shape[1] // block_size)
    sums = mass.new_zeros(len(q), last + 1 - first, blocks)
    for a in range(first, last + 1):
        for b in range(blocks):
            part = mass[:, position // block_size == a][..., u // block_size == b]
            sums[:, a - first, b] = part.sum((1, 2))
    return sums

"""What other people's block-sparse kernels need: K and V in one piece, lists split by the diagonal.

FlexAttention and FlashAttention-4 take K and V as `[kv_heads, N, d]` and, per row of blocks, the
blocks that are seen in full and those that a mask function must cut. Here that is the diagonal.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from xsparse.ops.tiles import BlockLists, KVTiles


@dataclass(frozen=True)
class Split:
    """full: blocks seen in full; partial: at most the diagonal block of each row.

    partial.indices: int32 [q_heads, q_blocks, 1]
    """

    full: BlockLists
    partial: BlockLists


def split_diagonal(lists: BlockLists, q_block_start: int) -> Split:
    """Lists whose columns are the blocks 0..n-1. Nothing past the diagonal may be listed, so the
    diagonal is the last entry of its row or not there."""
    diagonal = q_block_start + torch.arange(
        lists.indices.shape[1], dtype=torch.int32, device=lists.indices.device
    )
    end = (lists.counts - 1).clamp_min(0).long()
    last = lists.indices.gather(-1, end[..., None])[..., 0]
    listed = ((last == diagonal) & (lists.counts > 0)).int()
    partial = diagonal[:, None].expand(*lists.counts.shape, 1).contiguous()
    full = BlockLists(lists.indices.contiguous(), lists.counts - listed)
    return Split(full, BlockLists(partial, listed))


def whole_kv(kv: KVTiles, tokens: int, who: str) -> tuple[Tensor, Tensor]:
    """K and V [kv_heads, tokens, d] as views of pools whose columns are the blocks 0..n-1 in order,
    one KV head as far behind the other as the next.

    Reads a few numbers on the host, which waits for the GPU. Raises ValueError for other layouts.
    """
    index = torch.stack([kv.k_index, kv.v_index])
    step = torch.arange(index.shape[-1], device=index.device)
    first = index[..., :1].long()
    apart = first.diff(dim=1)
    ordered = (
        (kv.blocks == step).all() & (index == first + step).all() & (apart == apart[:, :1]).all()
    )
    where = torch.cat([ordered[None].long(), first[:, 0, 0], first[:, -1, 0]]).tolist()
    if not where[0] or tokens > index.shape[-1] * kv.block_size:
        raise ValueError(
            f"ops_backend={who} takes K and V only where they are whole and in order"
            " (engine=resident); pages of a ring and gathered tiles need triton or torch"
        )
    places = ((kv.k_pool, where[1], where[3]), (kv.v_pool, where[2], where[4]))
    k, v = (_view(pool, kv.kv_heads, tokens, low, high) for pool, low, high in places)
    return k, v


def _view(pool: Tensor, heads: int, tokens: int, low: int, high: int) -> Tensor:
    tile = pool.stride(0)
    head = tile * ((high - low) // max(heads - 1, 1))
    offset = pool.storage_offset() + tile * low
    return pool.as_strided((heads, tokens, pool.shape[-1]), (head, pool.shape[-1], 1), offset)

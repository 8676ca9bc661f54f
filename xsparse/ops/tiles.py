"""How operators see K and V: pools of tiles plus an index.

A tile is one (KV head, block) of K or of V: `block_size x head_dim` numbers, contiguous. The
resident cache, the ring of GPU slots and a gathered window differ only in where a tile lies, so
one attention kernel over (pool, index) serves all of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVTiles:
    """K and V of some blocks of one layer.

    k_pool:  [k_tiles, block_size, head_dim], contiguous
    v_pool:  [v_tiles, block_size, head_dim], contiguous (may be the same tensor as k_pool)
    k_index: int32 [kv_heads, columns], row of `k_pool` holding K of that column
    v_index: int32 [kv_heads, columns], row of `v_pool` holding V of that column
    blocks:  int32 [kv_heads, columns], the column's block number in the sequence (the position of
             its first token divided by block_size). Columns need not be contiguous blocks and may
             differ per KV head; -1 marks an unused column, which no list may name.

    Tokens past the end of the sequence in the last block hold finite numbers (zeros) and are
    masked by causality, since every query lies before them.
    """

    k_pool: Tensor
    v_pool: Tensor
    k_index: Tensor
    v_index: Tensor
    blocks: Tensor

    @property
    def block_size(self) -> int:
        return self.k_pool.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k_index.shape[0]


@dataclass(frozen=True)
class BlockLists:
    """The kept columns of each row of blocks, compact.

    indices: int32 [q_heads, q_blocks, columns]; the first `counts` entries of a row are the kept
             columns in ascending order, the rest is unspecified but in range
    counts:  int32 [q_heads, q_blocks]
    """

    indices: Tensor
    counts: Tensor


def block_lists(mask: Tensor) -> BlockLists:
    """Compact a mask.

    mask: bool [q_heads, q_blocks, columns]. No host synchronisation.
    """
    order = torch.argsort(~mask, dim=-1, stable=True)
    return BlockLists(order.to(torch.int32), mask.sum(-1, dtype=torch.int32))


def tiles_of_empty_row(q: Tensor, kv: KVTiles) -> int:
    """Tiles per row that block_sparse_attention computes where a list is empty; 0 unless a
    backend says otherwise."""
    return 0

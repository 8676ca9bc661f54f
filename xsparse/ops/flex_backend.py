"""Block-sparse attention by PyTorch's FlexAttention, to compare kernels on equal masks.

Only prefill attention is FlexAttention's, and only over K and V that are whole and in order
(engine=resident); estimation, selection, one-token attention and the rest are the Triton backend's.
"""
# ruff: noqa: F401 (a backend offers what it imports: xsparse.ops.OPERATORS)

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from xsparse.ops import triton_backend
from xsparse.ops.attention.contiguous import Split, split_diagonal, whole_kv
from xsparse.ops.tiles import BlockLists, KVTiles, tiles_of_empty_row
from xsparse.ops.triton_backend import (
    antidiagonal_block_sums,
    antidiagonal_scores,
    antidiagonal_stats,
    attention_mass,
    block_lists,
    choose_tiles,
    dense_attention,
    dense_kernel,
    fold_token,
    gather_tiles,
    merge_states,
    merge_stats,
    put_token,
    select_blocks,
    step_scores,
)

name = "flex"


def why_not(device: str | torch.device) -> str | None:
    """The reason why a device cannot run this backend, or None."""
    if torch.device(device).type != "cuda":
        return "FlexAttention is compiled for CUDA GPUs here; on a CPU use ops_backend=torch"
    return triton_backend.why_not(device)


def block_sparse_attention(
    q: Tensor,
    kv: KVTiles,
    lists: BlockLists,
    *,
    q_start: int | Tensor,
    scaling: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """See triton_backend; raises ValueError for K and V that are not whole and in order."""
    if isinstance(q_start, Tensor) or q.shape[1] == 1:
        return triton_backend.block_sparse_attention(
            q, kv, lists, q_start=q_start, scaling=scaling, out_dtype=out_dtype
        )
    size = kv.block_size
    if size % 128:
        raise ValueError(f"block_size={size}: FlexAttention takes multiples of 128")
    end = q_start + q.shape[1]
    k, v = whole_kv(kv, end, name)
    front = q_start % size  # its query blocks begin with the first row given
    rows = F.pad(q, (0, 0, front, 0))
    mask = block_mask(
        split_diagonal(lists, q_start // size), size, rows.shape[1], end, kv.k_index.shape[1]
    )
    out, aux = compiled(dynamic=True)(
        rows[None],
        k[None],
        v[None],
        block_mask=mask,
        scale=scaling,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    return out[0, :, front:].to(out_dtype or q.dtype), aux.lse[0, :, front:]


def block_mask(split: Split, size: int, queries: int, keys: int, columns: int) -> BlockMask:
    """The last query is aligned with the last key."""
    partial = F.pad(split.partial.indices, (0, columns - 1))
    # As data, so that no value needs a compilation of its own.
    behind = torch.full((), keys - queries, device=partial.device)

    def causal_behind(batch, head, t, u):
        return t + behind >= u

    return BlockMask.from_kv_blocks(
        split.partial.counts[None],
        partial[None],
        split.full.counts[None],
        split.full.indices[None],
        BLOCK_SIZE=size,
        mask_mod=_causal if queries == keys else causal_behind,
        seq_lengths=(queries, keys),
    )


def _causal(batch, head, t, u):
    return t >= u


@functools.cache
def compiled(*, dynamic: bool) -> Callable:
    return torch.compile(flex_attention, dynamic=dynamic)

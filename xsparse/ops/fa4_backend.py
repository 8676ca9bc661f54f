"""Block-sparse attention by FlashAttention-4, to compare kernels on equal masks.

Only prefill attention is FlashAttention's, and only over K and V that are whole and in order
(engine=resident); estimation, selection, one-token attention and the rest are the Triton backend's.
Needs the extra `fa4`.
"""
# pyright: reportMissingImports=false
# ruff: noqa: F401 (a backend offers what it imports: xsparse.ops.OPERATORS)

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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

name = "fa4"
BLOCK = 128


def why_not(device: str | torch.device) -> str | None:
    """The reason why a device cannot run this backend, or None."""
    if reason := triton_backend.why_not(device):
        return reason
    device = torch.device(device)
    if device.type != "cuda":
        return f"FlashAttention-4 needs a CUDA GPU; device is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"compute capability {major}.{minor}; block sparsity of FlashAttention-4 needs 9.0"
    try:
        import flash_attn.cute  # noqa: F401
    except Exception as error:  # its compiler raises errors of many kinds while importing
        return f"flash-attn-4 does not import ({type(error).__name__}: {error}); extra: fa4"
    return None


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
    if kv.block_size != BLOCK or q.shape[-1] > 128 or q.dtype == torch.float32:
        raise ValueError(
            f"block_size={kv.block_size}, head_dim={q.shape[-1]}, {q.dtype}: block sparsity of"
            f" FlashAttention-4 takes blocks of {BLOCK}, head_dim <= 128 and 16-bit types"
        )
    k, v = whole_kv(kv, q_start + q.shape[1], name)
    front = q_start % BLOCK  # its query blocks begin with the first row given
    rows = F.pad(q, (0, 0, front, 0))
    rows, k, v = (x.transpose(0, 1)[None] for x in (rows, k, v))
    out, lse = attend(rows, k, v, sparsity(split_diagonal(lists, q_start // BLOCK)), scaling)
    return out[0, front:].transpose(0, 1).to(out_dtype or q.dtype), lse[0, :, front:]


def attend(q: Tensor, k: Tensor, v: Tensor, sparse: Any, scaling: float) -> tuple[Tensor, Tensor]:
    """q, k, v: [1, tokens, heads, d]; the last query is aligned with the last key.
    returns out like q, lse fp32 [1, heads, tokens]"""
    from flash_attn.cute import flash_attn_func

    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale=scaling,
        mask_mod=_causal(),
        block_sparse_tensors=sparse,
        return_lse=True,
    )


def sparsity(split: Split) -> Any:
    """Lists as FlashAttention-4 takes them."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    return BlockSparseTensorsTorch(
        mask_block_cnt=split.partial.counts[None],
        mask_block_idx=split.partial.indices[None],
        full_block_cnt=split.full.counts[None],
        full_block_idx=split.full.indices[None],
        block_size=(BLOCK, BLOCK),
    )


@functools.cache
def _causal() -> Callable:
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def causal(batch, head, t, u, lengths, tensors):
        behind = scalar_to_ssa(lengths.seqlen_k - lengths.seqlen_q, cutlass.Int32)
        return u <= t + behind

    return causal

"""What a researcher would use today, over the same lists: SDPA, FlexAttention, FlashAttention-4.

Each peer is a function of (q, k, v, mask) that prepares once and returns a call to time, so that
no conversion of lists is inside the timed region. q: [q_heads, N, d]; k, v: [kv_heads, N, d];
mask: bool [q_heads, blocks, blocks] or None for dense causal attention.
"""
# pyright: reportMissingImports=false

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from xsparse.ops.tiles import BlockLists

Lists = Callable[[Tensor], BlockLists]
BLOCK = 128


def sdpa(backend: SDPBackend):
    """Dense causal attention by one of torch's kernels."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, mask: None, lists: Lists) -> Callable:
        def run():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q[None], k[None], v[None], is_causal=True, enable_gqa=True
                )[0]

        return run

    return prepare


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lists: Lists) -> Callable:
    """FlexAttention, compiled, with this mask as a BlockMask: full blocks and the diagonal."""
    from torch.nn.attention.flex_attention import BlockMask

    full = lists(_without_diagonal(mask))
    partial, count = _diagonal(mask)
    block_mask = BlockMask.from_kv_blocks(
        count[None],
        partial[None],
        full.counts[None],
        full.indices[None],
        BLOCK_SIZE=BLOCK,
        mask_mod=_causal,
        seq_lengths=(q.shape[1], k.shape[1]),
    )
    compiled = _compiled_flex()

    def run():
        return compiled(q[None], k[None], v[None], block_mask=block_mask, enable_gqa=True)[0]

    return run


@functools.cache
def _compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _causal(batch, head, t, u):
    return t >= u


def fa4_dense(q: Tensor, k: Tensor, v: Tensor, mask: None, lists: Lists) -> Callable:
    from flash_attn.cute import flash_attn_func

    q, k, v = _token_major(q, k, v)
    return lambda: flash_attn_func(q, k, v, causal=True)


def fa4_sparse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lists: Lists) -> Callable:
    import cutlass.cute as cute
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def causal(batch, head, t, u, seqlen_info, aux_tensors):
        return u <= t

    full = lists(_without_diagonal(mask))
    partial, count = _diagonal(mask)
    sparsity = BlockSparseTensorsTorch(
        mask_block_cnt=count[None],
        mask_block_idx=partial[None],
        full_block_cnt=full.counts[None],
        full_block_idx=full.indices[None],
        block_size=(BLOCK, BLOCK),
    )
    q, k, v = _token_major(q, k, v)
    return lambda: flash_attn_func(q, k, v, mask_mod=causal, block_sparse_tensors=sparsity)


DENSE: dict[str, Callable[..., Callable]] = {
    "sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash2": sdpa(SDPBackend.FLASH_ATTENTION),
    "fa4-dense": fa4_dense,
}
SPARSE: dict[str, Callable[..., Callable]] = {"flex": flex, "fa4": fa4_sparse}


def _token_major(*tensors: Tensor) -> list[Tensor]:
    """[heads, N, d] -> [1, N, heads, d], as FlashAttention takes it."""
    return [x.transpose(0, 1).contiguous()[None] for x in tensors]


def _without_diagonal(mask: Tensor) -> Tensor:
    return mask & ~torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)


def _diagonal(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Lists with the diagonal block alone: int32 [heads, blocks, blocks], [heads, blocks]."""
    heads, blocks, _ = mask.shape
    index = torch.zeros(heads, blocks, blocks, dtype=torch.int32, device=mask.device)
    index[..., 0] = torch.arange(blocks, device=mask.device)
    return index, torch.ones(heads, blocks, dtype=torch.int32, device=mask.device)

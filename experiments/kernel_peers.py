"""What a researcher would use today, over the same lists: SDPA, FlexAttention, FlashAttention-4.

Each peer is a function of (q, k, v, mask) that prepares once and returns a call to time, so that
no conversion of lists or layout is inside the timed region. q: [q_heads, N, d];
k, v: [kv_heads, N, d]; mask: bool [q_heads, blocks, blocks], or None for dense causal attention.
A call returns out [q_heads, N, d].
"""
# pyright: reportMissingImports=false

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from xsparse.ops import triton_backend
from xsparse.ops.attention.contiguous import Split, split_diagonal

BLOCK = 128
Peer = Callable[[Tensor, Tensor, Tensor, Tensor | None], Callable[[], Tensor]]


def sdpa(backend: SDPBackend) -> Peer:
    """Dense causal attention by one of torch's kernels."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Callable[[], Tensor]:
        def run():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q[None], k[None], v[None], is_causal=True, enable_gqa=True
                )[0]

        return run

    return prepare


def fa4_dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Callable[[], Tensor]:
    from flash_attn.cute import flash_attn_func

    q, k, v = _token_major(q, k, v)
    return lambda: flash_attn_func(q, k, v, causal=True)[0][0].transpose(0, 1)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Callable[[], Tensor]:
    """Compiled for this very shape, which is its fastest form."""
    from xsparse.ops import flex_backend

    block_mask = flex_backend.block_mask(
        _split(mask), BLOCK, q.shape[1], k.shape[1], k.shape[1] // BLOCK
    )
    run = flex_backend.compiled(dynamic=False)
    return lambda: run(q[None], k[None], v[None], block_mask=block_mask, enable_gqa=True)[0]


def fa4(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Callable[[], Tensor]:
    from xsparse.ops import fa4_backend

    sparse = fa4_backend.sparsity(_split(mask))
    scaling = q.shape[-1] ** -0.5
    q, k, v = _token_major(q, k, v)
    return lambda: fa4_backend.attend(q, k, v, sparse, scaling)[0][0].transpose(0, 1)


DENSE: dict[str, Peer] = {
    "sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash2": sdpa(SDPBackend.FLASH_ATTENTION),
    "fa4-dense": fa4_dense,
}
SPARSE: dict[str, Peer] = {"flex": flex, "fa4": fa4}


def _token_major(*tensors: Tensor) -> list[Tensor]:
    """[heads, N, d] -> [1, N, heads, d], as FlashAttention takes it."""
    return [x.transpose(0, 1).contiguous()[None] for x in tensors]


def _split(mask: Tensor | None) -> Split:
    assert mask is not None
    return split_diagonal(triton_backend.block_lists(mask), 0)

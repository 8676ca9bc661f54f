"""Causal attention within each document of a pack, behind transformers' attention interface.

Documents are few and long, so each is one call of the fused causal kernel, without any mask. The
pieces are made by one `split`, whose backward is one concatenation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "longcontext_packed"


def causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """[1, q_heads, n, d] and [1, kv_heads, n, d] -> [1, q_heads, n, d].

    On a GPU through the flash kernel or not at all: its substitutes need memory for every score.
    """
    flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if query.is_cuda else nullcontext()
    with flash:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )


class PackedAttention:
    """Set `lengths` before each forward pass; they add up to its tokens."""

    def __init__(self) -> None:
        self.lengths: Sequence[int] = ()

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """query: [1, q_heads, T, d]; key, value: [1, kv_heads, T, d] -> [1, T, q_heads, d]."""
        pieces = [tensor.split(list(self.lengths), dim=2) for tensor in (query, key, value)]
        outs = [causal(q, k, v, scaling) for q, k, v in zip(*pieces, strict=True)]
        return torch.cat([out.transpose(1, 2) for out in outs], dim=1), None


@contextmanager
def packed(model: Any) -> Iterator[PackedAttention]:
    """The model attends within documents inside the body."""
    attention = PackedAttention()
    AttentionInterface.register(NAME, torch.compiler.disable(attention.attend))
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield attention
    finally:
        model.config._attn_implementation = before


def positions(lengths: Sequence[int], device: Any) -> Tensor:
    """[1, T]: 0, 1, 2, ... within each document."""
    return torch.cat([torch.arange(n) for n in lengths])[None].to(device, non_blocking=True)

"""Merging parts of attention, in fp32 at least."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_states(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets.

    outs: each [q_heads, C, d]; lses: each [q_heads, C], natural log. An empty part has LSE -inf,
    finite outputs, and contributes nothing. Returns out in `out_dtype` (by default that of the
    first part), lse in fp32 (fp64 from fp64).
    """
    parts = torch.stack(list(lses))
    parts = parts.to(torch.promote_types(parts.dtype, torch.float32))
    lse = torch.logsumexp(parts, 0)
    weights = (parts - lse.masked_fill(lse == -torch.inf, 0)).exp()
    out = outs[0].to(parts.dtype) * weights[0, ..., None]
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        out += part.to(parts.dtype) * weight[..., None]
    return out.to(out_dtype or outs[0].dtype), lse

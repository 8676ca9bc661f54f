"""XAttention (arXiv 2503.16428): blocks scored by their antidiagonals.

Every `stride` queries and keys are summed along antidiagonals into one logit, a softmax over the
causal ones turns each row into mass, and a row of blocks keeps the best ones until they hold
`threshold` of it (section 3.1 and algorithm 1). Every key takes part in some antidiagonal, which
is what subsampled keys (strided_k) lack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xsparse.selectors.base import KeyView, MassSelector, Site, check_stride, streamed_scores
from xsparse.selectors.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass
class XAttention(MassSelector):
    """stride: tokens per antidiagonal, a divisor of block_size"""

    stride: int = 8

    name = "xattention"
    digests = ("resident_k", "streamed", "quantised_k")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stride(self.stride)

    def scores(self, q: Tensor, keys: KeyView, site: Site) -> Tensor:
        check_stride(self.stride, site.block_size)
        if not keys.resident:
            return streamed_scores(q, keys, site, stride=self.stride, ops=site.ops)
        return site.ops.antidiagonal_scores(
            q,
            keys.keys(),
            stride=self.stride,
            block_size=site.block_size,
            q_start=site.q_start,
            scaling=site.scaling,
        )

"""Attention mass between every stride-th query and every stride-th key.

The cheapest digest of K that keeps real keys, and a lesson: a needle on one of the skipped keys is
invisible, which antidiagonals avoid. Rows without a sampled query (a chunk shorter than the
stride) keep everything, for lack of evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xsparse.selectors.base import KeyView, MassSelector, Selection, Site, check_stride
from xsparse.selectors.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass
class StridedK(MassSelector):
    """stride: tokens per sampled token, a divisor of block_size"""

    stride: int = 8

    name = "strided_k"
    digests = ("strided_k", "resident_k")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stride(self.stride)

    def scores(self, q: Tensor, keys: KeyView, site: Site) -> Tensor:
        check_stride(self.stride, site.block_size)
        first = -(-site.q_start // self.stride)  # first sampled position, in strides
        rows = q[:, first * self.stride - site.q_start :: self.stride]
        blocks = -(-keys.length // site.block_size)
        scores = q.new_zeros(len(q), blocks - site.first_block, blocks, dtype=_float(q))
        if rows.shape[1]:
            mass = site.ops.attention_mass(
                rows,
                keys.strided(self.stride),
                block_size=site.block_size // self.stride,
                q_start=first,
                scaling=site.scaling,
            )
            begin = first * self.stride // site.block_size - site.first_block
            scores[:, begin : begin + mass.shape[1], : mass.shape[2]] = mass
        return scores

    def select(self, q: Tensor, keys: KeyView, site: Site) -> Selection:
        selection = super().select(q, keys, site)
        assert selection.scores is not None
        import torch

        block = torch.arange(selection.mask.shape[-1], device=q.device)
        unseen = selection.scores.sum(-1, keepdim=True) == 0
        mask = selection.mask | (unseen & (block <= block[site.first_block :, None]))
        return Selection(mask, selection.scores)


def _float(q: Tensor):
    import torch

    return torch.promote_types(q.dtype, torch.float32)

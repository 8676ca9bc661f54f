"""Blocks drawn by lot at a given density: the control every method must beat.

A draw is a hash of (seed, layer, head, query block, key block), so the mask depends neither on the
chunking nor on the order of calls. Block 0 and the diagonal are kept in any case and count towards
the density: a row of n causal blocks draws each of the other n - 2 with probability
(density n - 2) / (n - 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xsparse.selectors.base import KeyView, Selection, Selector, Site
from xsparse.selectors.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass
class Random(Selector):
    """density: share of the causal blocks a row keeps, in (0, 1]; per_kv_head_chunk: one draw per
    (KV head, chunk) and key block, shared by the query heads and query blocks, so that what moves
    is what is kept; it then depends on the chunking"""

    density: float = 0.3
    seed: int = 0
    per_kv_head_chunk: bool = False

    name = "random"
    digests = ("none", "resident_k", "minmax")
    has_scores = False
    keep_all = {"density": 1.0}

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density={self.density}: allowed is a number in (0, 1]")

    def select(self, q: Tensor, keys: KeyView, site: Site) -> Selection:
        import torch

        block = torch.arange(-(-keys.length // site.block_size), device=q.device)
        diagonal = block[site.first_block :, None]
        head, row = torch.arange(len(q), device=q.device), diagonal
        if self.per_kv_head_chunk:
            head = head.div(len(q) // keys.kv_heads, rounding_mode="floor")
            row = diagonal[:1]
        draw = _uniform(self.seed, site.layer, head[:, None, None], row, block)
        causal = (diagonal + 1).double()
        chance = (self.density * causal - 2) / (causal - 2).clamp_min(1)
        mask = (draw < chance) | (block == 0) | (block == diagonal)
        return Selection(mask & (block <= diagonal))


def _uniform(*keys: int | Tensor) -> Tensor:
    """Numbers in [0, 1) from the integers that name them, the last a tensor; they broadcast."""
    state: Any = 0
    for key in keys:
        state = _mix((state + key + 0x9E3779B9) & 0xFFFFFFFF)
    return state.double() / 2**32


def _mix(x: Any) -> Any:
    """Scramble 32 bits of an int or an int64 tensor; the factor is too small to overflow."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)

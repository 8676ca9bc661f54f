"""Everything: dense attention under the name of a selector, the baseline of every sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xsparse.selectors.base import KeyView, Selection, Selector, Site
from xsparse.selectors.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass
class Full(Selector):
    name = "full"
    digests = ("none", "resident_k", "minmax")
    has_scores = False
    dense = True

    def select(self, q: Tensor, keys: KeyView, site: Site) -> Selection:
        import torch

        blocks = -(-keys.length // site.block_size)
        block = torch.arange(blocks, device=q.device)
        causal = block <= block[site.first_block :, None]
        return Selection(causal.expand(len(q), -1, -1).clone())

"""Quest (arXiv 2406.10774): blocks judged by the extremes of their keys.

No logit of a block exceeds the bound sum_c max(q_c min_c, q_c max_c). In prefill a softmax over
the bounds of the causal blocks gives each query mass per block, the mean over a query block's rows
its scores, and the best blocks are kept up to `threshold`. In decode each KV head keeps a budget
of tokens, blocks ranked by the largest bound among its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xsparse.selectors.base import KeyView, MassSelector, Site
from xsparse.selectors.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass
class MinMax(MassSelector):
    name = "minmax"
    digests = ("minmax", "resident_k")

    def scores(self, q: Tensor, keys: KeyView, site: Site) -> Tensor:
        from xsparse.ops.bounds import block_bounds, block_mass

        low, high = keys.minmax(site.block_size)
        return block_mass(
            q,
            lambda rows: block_bounds(rows, low, high, scaling=site.scaling),
            k_blocks=low.shape[1],
            block_size=site.block_size,
            q_start=site.q_start,
        )

"""The bound: true attention mass per block, the best ones up to `threshold` of it.

No estimator of the same rule can keep fewer blocks for the same mass, so this is what every method
is compared with. It costs as much as dense attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xsparse.selectors.base import KeyView, MassSelector, Site, streamed_scores
from xsparse.selectors.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass
class OracleTopP(MassSelector):
    name = "oracle_topp"
    digests = ("resident_k", "streamed")

    def scores(self, q: Tensor, keys: KeyView, site: Site) -> Tensor:
        if not keys.resident:
            # Antidiagonals of length one are exact mass; only the torch form takes stride 1.
            from xsparse.ops import torch_backend

            return streamed_scores(q, keys, site, stride=1, ops=torch_backend)
        return site.ops.attention_mass(
            q,
            keys.keys(),
            block_size=site.block_size,
            q_start=site.q_start,
            scaling=site.scaling,
        )

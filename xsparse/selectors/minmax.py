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

STRIP_NUMBERS = 4 << 20  # bounds held at once, at least one query block


@register
@dataclass
class MinMax(MassSelector):
    name = "minmax"
    digests = ("minmax", "resident_k")

    def scores(self, q: Tensor, keys: KeyView, site: Site) -> Tensor:
        import torch

        from xsparse.ops.bounds import block_bounds

        low, high = keys.minmax(site.block_size)
        size, blocks = site.block_size, low.shape[1]
        block = torch.arange(blocks, device=q.device)
        step = max(1, STRIP_NUMBERS // (len(q) * size * blocks)) * size
        rows = []
        begin, tokens = 0, q.shape[1]
        while begin < tokens:
            end = min(begin + step - (site.q_start + begin) % size, tokens)
            bound = block_bounds(q[:, begin:end], low, high, scaling=site.scaling)
            first, last = (site.q_start + begin) // size, (site.q_start + end - 1) // size
            row = torch.arange(site.q_start + begin, site.q_start + end, device=q.device) // size
            mass = torch.softmax(bound.masked_fill_(block > row[:, None], -torch.inf), -1)
            member = (row == block[first : last + 1, None]).to(mass.dtype)
            rows.append((member / member.sum(1, keepdim=True)) @ mass)
            begin = end
        return torch.cat(rows, 1)


@dataclass(frozen=True)
class MinMaxDecode:
    """Which blocks a decode step reads.

    budget_tokens: per KV head. Block 0, the last complete block and the block being filled are
    always kept, inside the budget, so it is at least three blocks.
    """

    budget_tokens: int = 2048
    name = "minmax"
    digests = ("minmax", "resident_k")

    def keep(self, q: Tensor, keys: KeyView, site: Site) -> Tensor:
        """q: [q_heads, C, d]; returns bool [kv_heads, blocks] without reading the device."""
        import torch

        from xsparse.ops.bounds import block_bounds

        budget = self.budget_tokens // site.block_size
        if budget < 3:
            raise ValueError(
                f"decode_budget_tokens={self.budget_tokens}: allowed is >= {3 * site.block_size} "
                "(three blocks are always kept)"
            )
        low, high = keys.minmax(site.block_size)
        bound = block_bounds(q, low, high, scaling=site.scaling)
        bound = bound.unflatten(0, (len(low), -1)).amax((1, 2))
        bound[:, 0] = torch.inf
        bound[:, -2:] = torch.inf
        best = bound.topk(min(budget, bound.shape[1]), dim=-1).indices
        return torch.zeros_like(bound, dtype=torch.bool).scatter_(-1, best, True)

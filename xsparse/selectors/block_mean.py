"""FlashPrefill: blocks judged by the mean of their keys.

A softmax over the mean logits of the causal blocks gives each query mass per block, the mean over
a query block's rows its scores. Kept are the blocks with at least `alpha` of the row's largest
score, the first ones (where attention sinks) and the nearest ones. FlashPrefill also attends
densely in the last two query blocks of the prompt; that rule is left out, because a chunk does not
know whether the prompt ends with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xsparse.selectors.base import KeyView, Selection, Selector, Site
from xsparse.selectors.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass
class BlockMean(Selector):
    """alpha: share of a row's largest score that a block needs, in [0, 1] (the paper has 0.18 for
    Llama and 0.08 for Qwen2); sink_blocks, window_blocks: first and nearest blocks that are always
    kept, the diagonal one among the nearest"""

    alpha: float = 0.18
    sink_blocks: int = 2
    window_blocks: int = 4

    name = "block_mean"
    digests = ("block_mean", "resident_k")
    keep_all = {"alpha": 0.0}

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}: allowed is a number in [0, 1]")
        for key in ("sink_blocks", "window_blocks"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{key}={value}: allowed is an integer >= 1")

    def select(self, q: Tensor, keys: KeyView, site: Site) -> Selection:
        import torch

        from xsparse.ops.bounds import block_logits, block_mass

        mean = keys.mean(site.block_size)
        scores = block_mass(
            q,
            lambda rows: block_logits(rows, mean, scaling=site.scaling),
            k_blocks=mean.shape[1],
            block_size=site.block_size,
            q_start=site.q_start,
        )
        block = torch.arange(scores.shape[-1], device=q.device)
        diagonal = block[site.first_block :, None]
        near = (block < self.sink_blocks) | (block > diagonal - self.window_blocks)
        mask = near | (scores >= self.alpha * scores.amax(-1, keepdim=True))
        return Selection(mask & (block <= diagonal), scores)

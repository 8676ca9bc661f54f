"""Selection as one stable sort and one running sum, without a host read."""

import torch
import torch.nn.functional as F
from torch import Tensor


def select_blocks(scores: Tensor, threshold: float | Tensor, *, q_block_start: int) -> Tensor:
    """See naive.select_blocks."""
    _, q_blocks, k_blocks = scores.shape
    block = torch.arange(k_blocks, device=scores.device)
    diagonal = q_block_start + torch.arange(q_blocks, device=scores.device)[:, None]
    forced = (block == 0) | (block == diagonal)
    return keep_mass(scores, threshold, forced=forced, allowed=block <= diagonal)


def keep_mass(
    scores: Tensor, threshold: float | Tensor, *, forced: Tensor, allowed: Tensor
) -> Tensor:
    """The rule behind `select_blocks` with any set of forced blocks.

    scores: [heads, rows, blocks]; threshold: a float or [heads]; forced, allowed: bool that
    broadcasts to scores, forced within allowed; returns bool like scores
    """
    if isinstance(threshold, Tensor):
        threshold = threshold.to(scores.device, torch.float64)[:, None, None]
    elif threshold >= 1:
        return allowed.expand_as(scores).clone()
    mass = scores.double().masked_fill(~allowed, 0)
    # Forced blocks first: the running sum begins with their mass.
    rank = mass.masked_fill(forced, torch.inf).masked_fill(~allowed, -torch.inf)
    order = torch.sort(rank, dim=-1, descending=True, stable=True).indices
    taken = mass.gather(-1, order).cumsum(-1)
    before = F.pad(taken[..., :-1], (1, 0))
    keep = torch.zeros_like(mass, dtype=torch.bool)
    keep.scatter_(-1, order, before < threshold * taken[..., -1:])
    if isinstance(threshold, Tensor):
        keep |= threshold >= 1
    return (keep | forced) & allowed

"""The least threshold with which a row of scores keeps the blocks that its true mass asks for.

The rule of the threshold (`ops.select_blocks`) takes block 0 and the diagonal, then the others
from the best score down, as long as the mass taken is below `threshold` x the row's mass. So a
block is kept exactly where the share taken *before* it is below the threshold, and that share,
which does not depend on the threshold, says all about the row.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from xsparse.ops.selection.fast import select_blocks

ALWAYS, NEVER = -1.0, 2.0  # shares of forced blocks and of blocks above the diagonal
BELOW_ONE = math.nextafter(1.0, 0.0)  # a threshold of 1 keeps all, whatever the sums say
MARGIN = 1e-9  # of a row's mass: fp64 sums in another order differ by less


def block_shares(scores: Tensor, first_block: int) -> Tensor:
    """The share of its row that is taken before each block: kept where share < threshold.

    scores: [q_heads, q_blocks, k_blocks], not negative; first_block: the block of row 0;
    returns fp64 like scores, ALWAYS for block 0 and the diagonal, NEVER above it
    """
    block = torch.arange(scores.shape[-1], device=scores.device)
    diagonal = first_block + torch.arange(scores.shape[1], device=scores.device)[:, None]
    forced, later = (block == 0) | (block == diagonal), block > diagonal
    mass = scores.double().masked_fill(later, 0)
    rank = mass.masked_fill(forced, torch.inf).masked_fill(later, -torch.inf)
    order = torch.sort(rank, dim=-1, descending=True, stable=True).indices
    taken = mass.gather(-1, order).cumsum(-1)
    # 0 / 0 is a row without mass, of which only a threshold of 1 keeps more than is forced.
    before = (F.pad(taken[..., :-1], (1, 0)) / taken[..., -1:]).nan_to_num(1.0)
    shares = torch.empty_like(mass).scatter_(-1, order, before.clamp_(max=BELOW_ONE))
    return shares.masked_fill(forced, ALWAYS).masked_fill(later, NEVER)


def row_thresholds(true_mass: Tensor, scores: Tensor, coverage: float, first_block: int) -> Tensor:
    """The least threshold, up to MARGIN, that keeps what holds `coverage` of each row's true mass.

    What must be kept is the smallest such set that the rule could keep: block 0 and the diagonal
    count, then the blocks of most true mass (the mask of `oracle_topp`). 0 where those two do.

    true_mass, scores: [q_heads, q_blocks, k_blocks]; returns fp64 [q_heads, q_blocks]
    """
    needed = select_blocks(true_mass, coverage, q_block_start=first_block)
    last = block_shares(scores, first_block).masked_fill(~needed, ALWAYS).amax(-1)
    return torch.where(last < 0, 0.0, (last + MARGIN).clamp(max=1.0))


def covering_shares(true_mass: Tensor, shares: Tensor, coverage: float) -> Tensor:
    """A row keeps `coverage` of its true mass, in whichever blocks, where this share < threshold.

    true_mass, shares: [q_heads, q_blocks, k_blocks]; returns fp64 [q_heads, q_blocks]
    """
    shares, order = shares.sort(dim=-1, stable=True)
    kept = true_mass.double().gather(-1, order).cumsum(-1)
    first = (kept >= coverage * kept[..., -1:]).int().argmax(-1, keepdim=True)
    return shares.gather(-1, first)[..., 0]

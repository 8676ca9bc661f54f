"""Reductions: from a mask over query heads and query blocks to the tiles or pages that move.

Three steps in this order, each over members that see the block causally: the query heads of a KV
group (all heads for `ring`), the query blocks of the chunk, and, for `ring`, the history blocks of
a page. A step is

    any         kept by any member
    vote        kept by more than half of them; a tie drops
    mean_score  rule of the threshold again, on the mean of the members' row-normalised scores

Only history is reduced: block 0 and the chunk's own blocks always stay. Under `mean_score` they
count as mass already taken. Nothing here reads the device from the host.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xsparse.ops.selection.fast import keep_mass
from xsparse.selectors.base import Selection

RULES = ("any", "vote", "mean_score")


@dataclass(frozen=True)
class Reduced:
    """The set that moves.

    tiles:       bool [kv_heads, k_blocks], for `ring` [1, k_blocks]; block 0 and the chunk's own
                 blocks are True
    pages:       bool [pages], of the pages that hold history: those of the set, united over heads
    first_block: the chunk's first own block
    loses:       whether a block of the mask can be missing from the set
    """

    tiles: Tensor
    pages: Tensor
    first_block: int
    loses: bool


@dataclass(frozen=True)
class _Votes:
    """kept: bool [groups, rows, units]; scores: like it, or None; threshold: float or [groups]"""

    kept: Tensor
    scores: Tensor | None
    threshold: float | Tensor


def reduce_mask(
    selection: Selection,
    *,
    q_start: int,
    block_size: int,
    ratio: int,
    kv_heads: int,
    transfer: str,
    threshold: float | Tensor,
    reduce_heads: str = "any",
    reduce_queries: str = "any",
    reduce_sub_blocks: str = "any",
) -> Reduced:
    """Reduce the mask of one chunk.

    selection.mask: bool [q_heads, q_blocks, k_blocks]; q_start, block_size in tokens; ratio:
    blocks per page; transfer: "ring" or "gather"; threshold: a float or [q_heads], read by
    `mean_score` only. Raises ValueError for an unknown rule or transfer, and for `mean_score` on a
    selection without scores.
    """
    rules = {"reduce_heads": reduce_heads, "reduce_queries": reduce_queries}
    if transfer == "ring":
        rules["reduce_sub_blocks"] = reduce_sub_blocks
    elif transfer != "gather":
        raise ValueError(f"transfer={transfer}: allowed is ring | gather")
    for key, rule in rules.items():
        if rule not in RULES:
            raise ValueError(f"{key}={rule}: allowed is {' | '.join(RULES)}")
        if rule == "mean_score" and selection.scores is None:
            raise ValueError(f"{key}=mean_score: needs a selector with scores; any | vote work")

    mask = selection.mask
    first = q_start // block_size
    block = torch.arange(mask.shape[-1], device=mask.device)
    forced = (block == 0) | (block >= first)
    causal = block <= block[first:, None]
    groups = 1 if transfer == "ring" else kv_heads
    votes = _Votes(mask, None, threshold)
    if "mean_score" in rules.values():
        assert selection.scores is not None
        mass = selection.scores.sum(-1, keepdim=True)
        tiny = torch.finfo(mass.dtype).tiny
        votes = _Votes(mask, selection.scores / mass.clamp_min(tiny), threshold)

    votes = _step(_by_head(votes, groups), reduce_heads, forced & causal, causal)
    votes = _step(_by_query(votes), reduce_queries, forced, torch.ones_like(forced))
    if transfer == "ring":
        pages = _pages(votes, reduce_sub_blocks, first, ratio)
        tiles = pages.repeat_interleave(ratio)[:first]
        tiles = F.pad(tiles, (0, len(block) - first), value=True)[None] | forced
    else:
        tiles = votes.kept[:, 0] | forced
        wanted = tiles[:, :first].any(0)
        pages = _by_page(wanted, ratio).any(-1)
    return Reduced(tiles, pages, first, any(rule != "any" for rule in rules.values()))


def executed_mask(mask: Tensor, reduced: Reduced, attend: str) -> Tensor:
    """What attention executes: the mask inside the set, or everything causal of the set.

    mask: bool [q_heads, q_blocks, k_blocks]; attend: "mask" or "set"
    """
    if attend not in ("mask", "set"):
        raise ValueError(f"attend={attend}: allowed is mask | set")
    if attend == "mask" and not reduced.loses:
        return mask
    tiles = reduced.tiles.repeat_interleave(len(mask) // len(reduced.tiles), 0)[:, None]
    if attend == "mask":
        return mask & tiles
    block = torch.arange(mask.shape[-1], device=mask.device)
    return tiles & (block <= block[reduced.first_block :, None])


def _step(members: _Votes, rule: str, forced: Tensor, allowed: Tensor) -> _Votes:
    """Reduce dimension 1 of members whose tensors are [groups, members, rows, units].

    forced, allowed: bool that broadcasts to [rows, units]
    """
    scores = None if members.scores is None else members.scores.mean(1)
    if rule == "any":
        kept = members.kept.any(1)
    elif rule == "vote":
        kept = 2 * members.kept.sum(1) > members.kept.shape[1]
    else:
        assert scores is not None
        kept = keep_mass(scores, members.threshold, forced=forced, allowed=allowed)
    return _Votes(kept, scores, members.threshold)


def _by_head(votes: _Votes, groups: int) -> _Votes:
    """[q_heads, ...] -> [groups, heads of a group, ...], with the mean threshold of each group."""
    threshold = votes.threshold
    if isinstance(threshold, Tensor):
        threshold = threshold.unflatten(0, (groups, -1)).mean(1)
    scores = votes.scores
    if scores is not None:
        scores = scores.unflatten(0, (groups, -1))
    return _Votes(votes.kept.unflatten(0, (groups, -1)), scores, threshold)


def _by_query(votes: _Votes) -> _Votes:
    """[groups, q_blocks, k_blocks] -> [groups, q_blocks, 1, k_blocks]"""
    scores = votes.scores
    return _Votes(
        votes.kept[:, :, None], None if scores is None else scores[:, :, None], votes.threshold
    )


def _pages(votes: _Votes, rule: str, first: int, ratio: int) -> Tensor:
    """Pages to move, bool [pages that hold history].

    A page's members are its history blocks. For `mean_score` the chunk's own blocks are a unit of
    their own that is always kept: their mass is taken already, as is that of page 0.
    """
    history = votes.kept[0, 0, :first]
    members = _by_page(torch.ones_like(history), ratio).sum(-1)
    kept = _by_page(history, ratio).sum(-1)
    page_0 = torch.arange(len(members), device=history.device) == 0
    if rule == "any":
        pages = kept > 0
    elif rule == "vote":
        pages = 2 * kept > members
    else:
        assert votes.scores is not None
        scores = votes.scores[0, 0]
        mean = _by_page(scores[:first], ratio).sum(-1) / members
        units = torch.cat([mean, scores[first:].sum(0, keepdim=True) / ratio])[None, None]
        forced = F.pad(page_0, (0, 1), value=True)
        allowed = torch.ones_like(forced)
        pages = keep_mass(units, votes.threshold, forced=forced, allowed=allowed)[0, 0, :-1]
    return pages | page_0


def _by_page(blocks: Tensor, ratio: int) -> Tensor:
    """[n] -> [pages, ratio], zeros behind the last block"""
    pages = -(-len(blocks) // ratio)
    return F.pad(blocks, (0, pages * ratio - len(blocks))).view(pages, ratio)

"""The operators of a decode step in torch, on any device, without reading it from the host.

Only a store in host memory beside a GPU makes the host wait here; the Triton form does not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from xsparse.ops.bounds import block_bounds, block_logits
from xsparse.ops.decode import (
    Chosen,
    RowPlace,
    TileGeometry,
    check_budget,
    check_kind,
    check_places,
)

NEVER = torch.iinfo(torch.int32).max


def put_token(
    k: Tensor,
    v: Tensor,
    position: Tensor,
    k_places: Sequence[RowPlace],
    v_places: Sequence[RowPlace],
) -> None:
    """Write one token into every place. k, v: [kv_heads, 1, d]; at most two places each."""
    check_places(k_places, v_places)
    for x, places in ((k, k_places), (v, v_places)):
        for place in places:
            head = torch.arange(len(x), device=position.device) * place.head
            row = position // place.span * place.piece + head + position % place.span + place.first
            place.rows.index_copy_(0, row.to(place.rows.device), x[:, 0].to(place.rows.device))


def fold_token(k: Tensor, position: Tensor, stats: Tensor, *, kind: str, block_size: int) -> None:
    """Add one token to the statistics of its block, which begin anew with the block's first.

    k: [kv_heads, 1, d]; stats, in place: "minmax" [2, kv_heads, blocks, d] in k's dtype, low and
    high; "block_mean" fp32 [1, kv_heads, blocks, d]
    """
    check_kind(kind)
    block, filled = position // block_size, position % block_size
    k = k.to(stats.dtype)
    old = stats.index_select(2, block)
    if kind == "minmax":
        new = torch.stack([torch.minimum(old[0], k), torch.maximum(old[1], k)])
    else:
        new = old + (k - old) / (filled + 1)
    stats.index_copy_(2, block, torch.where(filled == 0, k, new))


def step_scores(
    q: Tensor, stats: Tensor, position: Tensor, *, kind: str, block_size: int, scaling: float
) -> Tensor:
    """The largest score of each complete block among the query heads of a KV head.

    q: [q_heads, 1, d]; stats: see fold_token. A score is the bound of the block's logits
    ("minmax") or the logit of its mean key; block 0 and the last complete block are +inf, the open
    block and all behind it -inf. returns fp32 [kv_heads, blocks]
    """
    check_kind(kind)
    if kind == "minmax":
        scores = block_bounds(q, stats[0], stats[1], scaling=scaling)
    else:
        scores = block_logits(q, stats[0], scaling=scaling)
    scores = scores.reshape(stats.shape[1], -1, stats.shape[2]).amax(1).float()
    block, complete = torch.arange(stats.shape[2], device=q.device), position // block_size
    scores = scores.masked_fill((block == 0) | (block == complete - 1), torch.inf)
    return scores.masked_fill(block >= complete, -torch.inf)


def choose_tiles(
    scores: Tensor,
    position: Tensor,
    state: Tensor,
    out: Chosen,
    *,
    geometry: TileGeometry,
    keep: bool = True,
) -> None:
    """Pick the best complete blocks of each KV head and a place in the cache for each.

    Ties go to the lower block. A chosen block that a slot holds stays there. The others go, in
    ascending order, to the slots not chosen in this step, oldest first, ties to the lower slot.

    scores: fp32 [kv_heads, blocks]; state: see `empty_state`, updated in place; out: overwritten,
    `moved` added to; keep=False: every chosen block moves, to the slot of its rank, and `state` is
    neither read nor written
    """
    check_budget(out, geometry)
    g, budget, device = geometry, out.budget, scores.device
    heads, columns = scores.shape
    head = torch.arange(heads, device=device)[:, None]
    open_block = position // g.block_size
    n = open_block.clamp(max=min(budget, columns))

    best = scores.sort(dim=-1, descending=True, stable=True).indices
    complete_first = (best >= open_block).sort(dim=-1, stable=True).indices
    best = best.gather(-1, complete_first)[:, :budget]
    best = torch.nn.functional.pad(best, (0, budget - best.shape[1]))
    rank = torch.arange(budget, device=device)
    chosen = best.masked_fill(rank >= n, NEVER).sort(-1).values
    real = (rank < n).expand(heads, -1)

    if keep:
        held, used = state[:, :, : g.slots].long()
        same = chosen[:, :, None] == held[:, None, :]
        miss = real & ~same.any(2)
        oldest = used.masked_fill(same.any(1), NEVER).sort(dim=-1, stable=True).indices
        turn = (miss.cumsum(-1) - 1).clamp(min=0)
        slot = torch.where(miss, oldest.gather(-1, turn), same.int().argmax(2))
        # Ranks without a block write behind the last slot.
        beside = torch.where(real, slot, g.slots)
        for row, value in zip(state, (chosen, position.expand_as(chosen)), strict=True):
            wider = torch.nn.functional.pad(row, (0, 1))
            row.copy_(wider.scatter_(-1, beside, value.to(row.dtype))[:, :-1])
    else:
        miss, slot = real, rank.expand(heads, -1)

    column = torch.arange(budget + 1, device=device)
    is_open, unused = column == n, column > n

    def columns_of(values: Tensor, of_open: Tensor, of_unused: int) -> Tensor:
        wider = torch.nn.functional.pad(values, (0, 1))
        return torch.where(is_open, of_open, wider).masked_fill(unused, of_unused)

    def cached(half: int, slot: Tensor | int) -> Tensor:
        return (half * heads + head) * (g.slots + 1) + slot

    v_half = g.halves - 1
    out.blocks.copy_(columns_of(chosen, open_block, -1))
    out.v_index.copy_(columns_of(cached(v_half, slot), cached(v_half, g.slots), 0))
    if g.halves == 2:
        out.k_index.copy_(columns_of(cached(0, slot), cached(0, g.slots), 0))
    else:
        first = head * g.resident_blocks
        out.k_index.copy_(columns_of(first + chosen, first + open_block, 0))
    out.counts.copy_((n + 1).expand_as(out.counts))
    half_shape = (g.halves, heads, budget)
    for half, source, target in zip(
        range(g.halves), out.source.view(half_shape), out.target.view(half_shape), strict=True
    ):
        page = chosen // g.ratio * g.halves * heads + half * heads + head
        source.copy_((page * g.ratio + chosen % g.ratio).masked_fill(~miss, -1))
        target.copy_(cached(half, slot).masked_fill(~miss, 0))
    out.moved.add_(miss.sum() * g.halves)

"""The operators of a decode step on a GPU: four launches that a CUDA graph can hold.

`put_token` writes straight into pinned host memory through its ordinary address, as the gather
reads it. `choose_tiles` is one program per KV head: the score of the last block kept is found by
bisection over fp32 as ordered integers, since a sort of thousands of scores for some dozens of
blocks is the slower way.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from xsparse.ops.decode import (
    Chosen,
    RowPlace,
    TileGeometry,
    check_budget,
    check_kind,
    check_places,
)
from xsparse.ops.sizes import cdiv, next_power_of_2

BLOCKS_PER_PROGRAM = 32
LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)
LAST = tl.constexpr(2**63 - 1)


def put_token(
    k: Tensor,
    v: Tensor,
    position: Tensor,
    k_places: Sequence[RowPlace],
    v_places: Sequence[RowPlace],
) -> None:
    """Write one token into every place. k, v: [kv_heads, 1, d], last stride 1, on the device;
    at most two places each, on the device or in pinned host memory."""
    check_places(k_places, v_places)
    heads, _, head_dim = k.shape
    places = []
    for x, given in ((k, k_places), (v, v_places)):
        for place in given:
            rows = place.rows
            if x.device.type == "cuda" and rows.device.type == "cpu" and not rows.is_pinned():
                raise ValueError("put_token writes to host memory only where it is pinned")
            if rows.shape[1] != head_dim or rows.dtype != x.dtype:
                raise ValueError(
                    f"rows of {rows.shape[1]} {rows.dtype} and a token of {head_dim} {x.dtype}"
                    " differ"
                )
            places += [rows, place.span, place.piece, place.head, place.first]
        places += [None, 1, 0, 0, 0] * (2 - len(given))
    _put_kernel[(heads,)](
        k,
        v,
        position,
        k.stride(0),
        v.stride(0),
        *places,
        HEAD_DIM=head_dim,
        WIDTH=next_power_of_2(head_dim),
        num_warps=1,
    )


def fold_token(k: Tensor, position: Tensor, stats: Tensor, *, kind: str, block_size: int) -> None:
    """Add one token to the statistics of its block, which begin anew with the block's first.

    k: [kv_heads, 1, d], last stride 1; stats, contiguous, in place: "minmax" [2, kv_heads, blocks,
    d] in k's dtype, low and high; "block_mean" fp32 [1, kv_heads, blocks, d]
    """
    _check_stats(stats, kind)
    _fold_kernel[(stats.shape[1],)](
        k,
        position,
        stats,
        stats.shape[2],
        block_size,
        k.stride(0),
        MINMAX=kind == "minmax",
        HEAD_DIM=k.shape[-1],
        WIDTH=next_power_of_2(k.shape[-1]),
        num_warps=1,
    )


def step_scores(
    q: Tensor, stats: Tensor, position: Tensor, *, kind: str, block_size: int, scaling: float
) -> Tensor:
    """The largest score of each complete block among the query heads of a KV head.

    q: [q_heads, 1, d], last stride 1; stats: see fold_token. A score is the bound of the block's
    logits ("minmax") or the logit of its mean key; block 0 and the last complete block are +inf,
    the open block and all behind it -inf. returns fp32 [kv_heads, blocks]
    """
    _check_stats(stats, kind)
    _, heads, blocks, head_dim = stats.shape
    scores = torch.empty(heads, blocks, dtype=torch.float32, device=q.device)
    _score_kernel[(heads, cdiv(blocks, BLOCKS_PER_PROGRAM))](
        q,
        stats,
        position,
        scores,
        scaling,
        blocks,
        block_size,
        len(q) // heads,
        q.stride(0),
        MINMAX=kind == "minmax",
        HEAD_DIM=head_dim,
        WIDTH=next_power_of_2(head_dim),
        BLOCKS=BLOCKS_PER_PROGRAM,
        num_warps=4,
    )
    return scores


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
    heads, blocks = scores.shape
    columns = next_power_of_2(blocks)
    _choose_kernel[(heads,)](
        scores.contiguous(),
        position,
        state,
        out.blocks,
        out.k_index,
        out.v_index,
        out.counts,
        out.source,
        out.target,
        out.moved,
        blocks,
        out.budget,
        len(out.counts) // heads,
        geometry.block_size,
        geometry.ratio,
        geometry.slots,
        geometry.resident_blocks,
        KEEP=keep,
        HALVES=geometry.halves,
        BLOCKS=columns,
        BUDGET=max(2, next_power_of_2(out.budget)),
        SLOTS=max(2, next_power_of_2(geometry.slots)),
        GROUP=next_power_of_2(len(out.counts) // heads),
        num_warps=8 if columns > 1024 or out.budget > 32 else 4,
    )


def _check_stats(stats: Tensor, kind: str) -> None:
    check_kind(kind)
    if not stats.is_contiguous():
        raise ValueError("statistics of blocks must be contiguous")


@triton.jit
def _put_row(row, feature, inside, position, head, rows, span, piece, stride, first, HEAD_DIM):
    """Write one row into one place; head and position are int64."""
    at = first + position // span * piece + head * stride + position % span
    tl.store(rows + at * HEAD_DIM + feature, row, mask=inside)


_PUT_NUMBERS = [
    f"{part}_{x}{i}" for x in "kv" for i in "01" for part in ("span", "piece", "head", "first")
]


@triton.jit(do_not_specialize=["k_stride", "v_stride", *_PUT_NUMBERS])
def _put_kernel(
    k,
    v,
    position,
    k_stride,
    v_stride,
    rows_k0,
    span_k0,
    piece_k0,
    head_k0,
    first_k0,
    rows_k1,
    span_k1,
    piece_k1,
    head_k1,
    first_k1,
    rows_v0,
    span_v0,
    piece_v0,
    head_v0,
    first_v0,
    rows_v1,
    span_v1,
    piece_v1,
    head_v1,
    first_v1,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    p = tl.load(position)
    f = tl.arange(0, WIDTH)
    inside = f < HEAD_DIM
    x = tl.load(k + head * k_stride + f, mask=inside)
    y = tl.load(v + head * v_stride + f, mask=inside)
    if rows_k0 is not None:
        _put_row(x, f, inside, p, head, rows_k0, span_k0, piece_k0, head_k0, first_k0, HEAD_DIM)
    if rows_k1 is not None:
        _put_row(x, f, inside, p, head, rows_k1, span_k1, piece_k1, head_k1, first_k1, HEAD_DIM)
    if rows_v0 is not None:
        _put_row(y, f, inside, p, head, rows_v0, span_v0, piece_v0, head_v0, first_v0, HEAD_DIM)
    if rows_v1 is not None:
        _put_row(y, f, inside, p, head, rows_v1, span_v1, piece_v1, head_v1, first_v1, HEAD_DIM)


@triton.jit(do_not_specialize=["blocks", "block_size", "k_stride"])
def _fold_kernel(
    k,
    position,
    stats,
    blocks,
    block_size,
    k_stride,
    MINMAX: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    p = tl.load(position)
    filled = p % block_size
    feature = tl.arange(0, WIDTH)
    inside = feature < HEAD_DIM
    x = tl.load(k + head * k_stride + feature, mask=inside)
    at = stats + (head * blocks + p // block_size) * HEAD_DIM + feature
    old = tl.load(at, mask=inside)
    if MINMAX:
        tl.store(at, tl.where(filled == 0, x, tl.minimum(old, x)), mask=inside)
        high = at + tl.num_programs(0).to(tl.int64) * blocks * HEAD_DIM
        old = tl.load(high, mask=inside)
        tl.store(high, tl.where(filled == 0, x, tl.maximum(old, x)), mask=inside)
    else:
        x = x.to(tl.float32)
        # Rounded as torch divides, so that both forms hold the same means.
        count = tl.zeros((WIDTH,), tl.float32) + (filled + 1).to(tl.float32)
        mean = old + tl.div_rn(x - old, count)
        tl.store(at, tl.where(filled == 0, x, mean), mask=inside)


@triton.jit(do_not_specialize=["blocks", "block_size", "group", "q_stride"])
def _score_kernel(
    q,
    stats,
    position,
    scores,
    scaling,
    blocks,
    block_size,
    group,
    q_stride,
    MINMAX: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    complete = (tl.load(position) // block_size).to(tl.int32)
    feature = tl.arange(0, WIDTH)
    real = feature < HEAD_DIM
    cell = (block < complete)[:, None] & (block < blocks)[:, None] & real[None, :]
    at = stats + (head * blocks + block.to(tl.int64))[:, None] * HEAD_DIM + feature[None, :]
    low = tl.load(at, mask=cell, other=0.0).to(tl.float32)
    if MINMAX:
        at += tl.num_programs(0).to(tl.int64) * blocks * HEAD_DIM
        high = tl.load(at, mask=cell, other=0.0).to(tl.float32)
    best = tl.full((BLOCKS,), float("-inf"), tl.float32)
    for member in range(group):
        row = q + (head * group + member) * q_stride
        x = tl.load(row + feature, mask=real, other=0.0).to(tl.float32)[None, :]
        products = tl.maximum(x * low, x * high) if MINMAX else x * low
        best = tl.maximum(best, tl.sum(products, 1) * scaling)
    best = tl.where((block == 0) | (block == complete - 1), float("inf"), best)
    best = tl.where(block < complete, best, float("-inf"))
    tl.store(scores + head * blocks + block, best, mask=block < blocks)


@triton.jit
def _ordered(x):
    """Integers that compare as the fp32 numbers do; the two zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & HIGHEST)


@triton.jit
def _level(key, n):
    """The largest level that at least n keys reach, or one that exactly n reach."""
    low = tl.full((), LOWEST, tl.int32)
    high = tl.full((), HIGHEST, tl.int32)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        count = tl.sum((key >= middle).to(tl.int32), 0)
        if count >= n:
            low = middle
        if count <= n:
            high = tl.where(count == n, middle, middle - 1)
    return low


@triton.jit(
    do_not_specialize=[
        *("blocks", "budget", "group", "block_size", "ratio", "slots", "resident_blocks"),
    ],
)
def _choose_kernel(
    scores,
    position,
    state,
    block_out,
    k_index,
    v_index,
    counts,
    source,
    target,
    moved,
    blocks,
    budget,
    group,
    block_size,
    ratio,
    slots,
    resident_blocks,
    KEEP: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BUDGET: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    now = tl.load(position)
    open_block = (now // block_size).to(tl.int32)
    complete = tl.minimum(open_block, blocks)
    n = tl.minimum(complete, budget)
    block_out += head * (budget + 1)
    k_index += head * (budget + 1)
    v_index += head * (budget + 1)

    # Which blocks: those above a level, and of those on it the lowest.
    block = tl.arange(0, BLOCKS)
    real = block < complete
    x = tl.load(scores + head * blocks + block, mask=real, other=float("-inf"))
    key = tl.where(real, _ordered(x), LOWEST)
    level = _level(key, n)
    above = real & (key > level)
    tie = real & (key == level)
    need = n - tl.sum(above.to(tl.int32), 0)
    kept = above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= need))
    tl.store(block_out + tl.cumsum(kept.to(tl.int32), 0) - 1, block, mask=kept)
    tl.debug_barrier()  # all threads of the program see all of the list
    rank = tl.arange(0, BUDGET)
    used = rank < n
    chosen = tl.load(block_out + rank, mask=used, other=-2)  # -2: held by no slot

    # Which slots.
    slot = rank
    miss = used
    if KEEP:
        number = tl.arange(0, SLOTS)
        there = number < slots
        held_at = state + head * slots
        time_at = held_at + heads * slots
        held = tl.load(held_at + number, mask=there, other=-1)
        time = tl.load(time_at + number, mask=there, other=-1)
        same = chosen[:, None] == held[None, :]
        slot = tl.max(tl.where(same, number[None, :], -1), 1)
        hit = tl.max(same.to(tl.int32), 0) > 0
        age = (time.to(tl.int64) + 1) * SLOTS + number
        oldest = (tl.sort(tl.where(there & (hit == 0), age, LAST)) % SLOTS).to(tl.int32)
        miss = used & (slot < 0)
        turn = tl.cumsum(miss.to(tl.int32), 0) - 1
        slot = tl.where(miss, tl.gather(oldest, tl.maximum(turn, 0), 0), slot)
        tl.debug_barrier()  # all threads have read the state
        tl.store(held_at + slot, chosen, mask=used)
        tl.store(time_at + slot, tl.zeros_like(slot) + now.to(tl.int32), mask=used)

    # Columns: the chosen blocks, the open one, unused ones.
    unused = (rank >= n) & (rank < budget)
    v_first = ((HALVES - 1) * heads + head) * (slots + 1)
    tl.store(block_out + n, open_block)
    tl.store(block_out + rank + 1, -1, mask=unused)
    tl.store(v_index + rank, v_first + slot, mask=used)
    tl.store(v_index + n, v_first + slots)
    tl.store(v_index + rank + 1, 0, mask=unused)
    if HALVES == 2:
        tl.store(k_index + rank, head * (slots + 1) + slot, mask=used)
        tl.store(k_index + n, head * (slots + 1) + slots)
    else:
        tl.store(k_index + rank, head * resident_blocks + chosen, mask=used)
        tl.store(k_index + n, head * resident_blocks + open_block)
    tl.store(k_index + rank + 1, 0, mask=unused)
    member = tl.arange(0, GROUP)
    tl.store(counts + head * group + member, tl.zeros_like(member) + n + 1, mask=member < group)

    # What moves.
    for half in tl.static_range(HALVES):
        at = (half * heads + head) * budget + rank
        tile = (chosen // ratio * HALVES * heads + half * heads + head) * ratio + chosen % ratio
        cached = (half * heads + head) * (slots + 1) + slot
        tl.store(source + at, tl.where(miss, tile, -1), mask=rank < budget)
        tl.store(target + at, tl.where(miss, cached, 0), mask=rank < budget)
    tl.atomic_add(moved, (tl.sum(miss.to(tl.int32), 0) * HALVES).to(tl.int64))

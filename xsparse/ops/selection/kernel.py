"""Selection on a GPU: the threshold rule row by row, without a sort and without a host read.

The naive rule adds blocks in descending order until their mass reaches the need. The score at
which it stops is the largest t whose blocks with score >= t already hold the need, so one program
per row bisects over t. Scores are not negative, so their fp32 bit patterns order like the numbers.
t is a score that occurs, so both ends of the search snap to scores and about log2(blocks) steps
do. Blocks above t are kept; blocks equal to t are taken from the lowest index while mass is
missing. Sums are fp64, as in the naive form, so both give the same set.

The same pass writes the mask and the compact lists that block-sparse attention reads.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from xsparse.ops.tiles import BlockLists


def select_blocks(scores: Tensor, threshold: float | Tensor, *, q_block_start: int) -> Tensor:
    """scores: [q_heads, q_blocks, k_blocks], not negative; threshold: a float or [q_heads];
    returns bool like scores."""
    mask = torch.empty_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format)
    _select(scores, threshold, q_block_start, mask, None)
    return mask


def select_block_lists(
    scores: Tensor, threshold: float | Tensor, *, q_block_start: int
) -> tuple[Tensor, BlockLists]:
    """`select_blocks` and the lists of its mask in one pass."""
    mask = torch.empty_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format)
    lists = _empty_lists(mask)
    _select(scores, threshold, q_block_start, mask, lists)
    return mask, lists


def block_lists(mask: Tensor) -> BlockLists:
    """Compact a mask. mask: bool [q_heads, q_blocks, columns]."""
    lists = _empty_lists(mask)
    rows = mask.shape[0] * mask.shape[1]
    _lists_kernel[(rows,)](
        mask.contiguous(), lists.indices, lists.counts, mask.shape[2], CHUNK=256, num_warps=1
    )
    return lists


def _empty_lists(mask: Tensor) -> BlockLists:
    return BlockLists(
        torch.empty(mask.shape, dtype=torch.int32, device=mask.device),
        torch.empty(mask.shape[:2], dtype=torch.int32, device=mask.device),
    )


def _select(
    scores: Tensor,
    threshold: float | Tensor,
    q_block_start: int,
    mask: Tensor,
    lists: BlockLists | None,
) -> None:
    q_heads, q_blocks, k_blocks = scores.shape
    table, bits = None, 0
    if isinstance(threshold, Tensor):
        if threshold.shape != (q_heads,):
            raise ValueError(f"threshold of shape {tuple(threshold.shape)}, not ({q_heads},)")
        table = threshold.to(scores.device, torch.float64).contiguous()
    else:
        # As bits, because Triton passes Python floats in fp32, and 0.9 is another number there.
        (bits,) = struct.unpack("<q", struct.pack("<d", threshold))
    _select_kernel[(q_heads * q_blocks,)](
        scores.float().contiguous(),
        table,
        bits,
        mask,
        lists.indices if lists else None,
        lists.counts if lists else None,
        q_block_start,
        q_blocks,
        k_blocks,
        CHUNK=256,
        num_warps=1,
    )


@triton.jit
def _write_list(row_list, column, keep, kept, columns):
    """Kept columns fill a row's list from the front, dropped ones from the back."""
    inside = column < columns
    keep = keep & inside
    rank = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
    dropped = column - rank - 1
    place = tl.where(keep, rank, columns - 1 - dropped)
    tl.store(row_list + place, column, mask=inside)
    return kept + tl.sum(keep.to(tl.int32), 0)


@triton.jit(do_not_specialize=["columns"])
def _lists_kernel(mask, indices, counts, columns, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mask += row * columns
    indices += row * columns
    kept = 0
    for start in range(0, columns, CHUNK):
        column = start + tl.arange(0, CHUNK)
        keep = tl.load(mask + column, mask=column < columns, other=0) != 0
        kept = _write_list(indices, column, keep, kept, columns)
    tl.store(counts + row, kept)


@triton.jit
def _around(scores, level, diagonal, CHUNK: tl.constexpr):
    """Of the blocks strictly between block 0 and the diagonal: the fp64 mass of those with
    bits >= level, the lowest bits among them, and the highest bits below the level or 0."""
    mass = tl.zeros((CHUNK,), tl.float64)
    lowest = tl.full((CHUNK,), 0x7FFFFFFF, tl.int32)
    highest = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, diagonal, CHUNK):
        block = start + tl.arange(0, CHUNK)
        inside = (block > 0) & (block < diagonal)
        x = tl.load(scores + block, mask=inside, other=0.0)
        bits = x.to(tl.int32, bitcast=True)
        above = inside & (bits >= level)
        mass += tl.where(above, x, 0.0).to(tl.float64)
        lowest = tl.minimum(lowest, tl.where(above, bits, 0x7FFFFFFF))
        highest = tl.maximum(highest, tl.where(above, 0, bits))
    return tl.sum(mass, 0), tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit(do_not_specialize=["threshold_bits", "q_block_start", "q_blocks", "k_blocks"])
def _select_kernel(
    scores,
    thresholds,
    threshold_bits,
    mask,
    indices,
    counts,
    q_block_start,
    q_blocks,
    k_blocks,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    diagonal = q_block_start + tl.program_id(0) % q_blocks
    if thresholds is not None:
        threshold = tl.load(thresholds + tl.program_id(0) // q_blocks)
    else:
        threshold = threshold_bits.to(tl.int64).to(tl.float64, bitcast=True)
    scores += row * k_blocks
    forced = tl.load(scores + diagonal).to(tl.float64)
    if diagonal > 0:
        forced += tl.load(scores).to(tl.float64)
    rest, _, _ = _around(scores, 0, diagonal, CHUNK)
    need = threshold * (forced + rest)

    NONE: tl.constexpr = 0x7FFFFFFF
    low = 0
    if threshold >= 1:
        low = -1  # everything causal, whatever the sums round to
    elif forced >= need:
        low = NONE
    else:
        # The largest level whose blocks hold the need.
        _, _, high = _around(scores, NONE, diagonal, CHUNK)
        while low < high:
            middle = low + (high - low + 1) // 2
            mass, lowest, highest = _around(scores, middle, diagonal, CHUNK)
            if forced + mass >= need:
                low = lowest
            else:
                high = tl.maximum(low, highest)

    above = forced
    if (low >= 0) & (low < NONE):
        mass, _, _ = _around(scores, low + 1, diagonal, CHUNK)
        above += mass
    ties = 0
    kept = 0
    mask += row * k_blocks
    for start in range(0, k_blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        between = (block > 0) & (block < diagonal)
        x = tl.load(scores + block, mask=between, other=0.0)
        bits = x.to(tl.int32, bitcast=True)
        tie = between & (bits == low)
        before = ties + tl.cumsum(tie.to(tl.int32), 0) - 1
        taken = above + before.to(tl.float64) * x.to(tl.float64)
        keep = (between & (bits > low)) | (tie & (taken < need))
        keep |= (block == 0) | (block == diagonal)
        ties += tl.sum(tie.to(tl.int32), 0)
        tl.store(mask + block, keep, mask=block < k_blocks)
        if indices is not None:
            kept = _write_list(indices + row * k_blocks, block, keep, kept, k_blocks)
    if counts is not None:
        tl.store(counts + row, kept)

"""Antidiagonal scores as one matrix product per strip of query blocks.

`stride` rows lie side by side as one long row, K's with phases 0..S-1 (a view of K) and Q's with
phases S-1..0, so a logit is one dot product of length S x d. The query heads of a KV head are rows
of one product; K is never expanded. Strips bound the memory of the logits.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from xsparse.ops.antidiagonal.naive import LOWEST, merge_stats

__all__ = [
    "antidiagonal_block_sums",
    "antidiagonal_scores",
    "antidiagonal_stats",
    "merge_stats",
]

STRIP_NUMBERS = 4 << 20  # logits held at once (16 MiB in fp32), at least one query block


def antidiagonal_scores(
    q: Tensor, k: Tensor, *, stride: int, block_size: int, q_start: int, scaling: float
) -> Tensor:
    """See naive.antidiagonal_scores."""
    scores = _Scores(q, k, stride, block_size, q_start, 0)
    for rows, logits in _strips(q, k, stride, block_size, q_start, 0, scaling):
        scores.add(rows, torch.softmax(logits, -1))
    return scores.sums


def antidiagonal_stats(
    q: Tensor, k: Tensor, *, stride: int, q_start: int, k_start: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """See naive.antidiagonal_stats."""
    rows = -(-(q_start + q.shape[1]) // stride) - q_start // stride
    m = q.new_full((len(q), rows), LOWEST, dtype=_dtype(q))
    total = torch.zeros_like(m)
    # Any multiple of the stride does as height of a strip.
    for strip, logits in _strips(q, k, stride, 16 * stride, q_start, k_start, scaling):
        m[:, strip] = logits.amax(-1).clamp_min_(LOWEST)
        total[:, strip] = logits.sub_(m[:, strip, None]).exp_().sum(-1)
    return m, total


def antidiagonal_block_sums(
    q: Tensor,
    k: Tensor,
    m: Tensor,
    l: Tensor,  # noqa: E741
    *,
    stride: int,
    block_size: int,
    q_start: int,
    k_start: int,
    scaling: float,
) -> Tensor:
    """See naive.antidiagonal_block_sums."""
    scores = _Scores(q, k, stride, block_size, q_start, k_start)
    log_total = m + l.clamp_min(torch.finfo(l.dtype).tiny).log()
    for rows, logits in _strips(q, k, stride, block_size, q_start, k_start, scaling):
        scores.add(rows, logits.sub_(log_total[:, rows, None]).exp_())
    return scores.sums


def _dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


class _Scores:
    """Sums mass over blocks, strip by strip; sums: [q_heads, q_blocks, k_blocks]."""

    def __init__(
        self, q: Tensor, k: Tensor, stride: int, block_size: int, q_start: int, k_start: int
    ):
        first, end = q_start // block_size, -(-(q_start + q.shape[1]) // block_size)
        k_blocks = -(-k.shape[1] // block_size)
        self.sums = q.new_zeros(len(q), end - first, k_blocks, dtype=_dtype(q))
        self.per_block = block_size // stride
        self.row = q_start // stride - first * self.per_block

    def add(self, rows: slice, mass: Tensor) -> None:
        """mass: [q_heads, rows, the first columns]"""
        a = torch.arange(rows.start, rows.stop, device=mass.device)
        a = (a + self.row).div_(self.per_block, rounding_mode="floor")
        first = (rows.start + self.row) // self.per_block
        count = (rows.stop - 1 + self.row) // self.per_block + 1 - first
        # The sum over rows is a product with a 0/1 matrix, whatever the alignment.
        member = (a - first == torch.arange(count, device=mass.device)[:, None]).to(mass.dtype)
        mass = torch.matmul(member, mass)
        mass = F.pad(mass, (0, -mass.shape[-1] % self.per_block))
        mass = mass.unflatten(-1, (-1, self.per_block)).sum(-1)
        self.sums[:, first : first + count, : mass.shape[-1]] = mass


def _strips(
    q: Tensor,
    k: Tensor,
    stride: int,
    block_size: int,
    q_start: int,
    k_start: int,
    scaling: float,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (strided rows, logits [q_heads, rows, columns]) in strips of whole query blocks.

    -inf above the diagonal; columns that no row of the strip sees are left out, and so are strips
    that see nothing.
    """
    q_heads, kv_heads = len(q), len(k)
    q_rows = _rows(q, q_start % stride, stride).flip(2)
    count = q_rows.shape[1]
    q_rows = q_rows.flatten(2).view(kv_heads, q_heads // kv_heads, count, -1)
    k_rows = _rows(k, 0, stride).flatten(2).transpose(1, 2)
    columns = k_rows.shape[2]
    per_block = block_size // stride
    # Row i sees columns 0..i + offset.
    offset = q_start // stride - k_start // stride
    head = q_start // stride % per_block
    height = max(1, STRIP_NUMBERS // (q_heads * columns * per_block)) * per_block
    begin = 0
    while begin < count:
        end = min(begin + height - (head if begin == 0 else 0), count)
        width = min(end + offset, columns)
        if width > 0:
            part = q_rows[:, :, begin:end].reshape(kv_heads, -1, q_rows.shape[-1])
            logits = torch.matmul(part, k_rows[..., :width])
            logits = logits.mul_(scaling / stride).view(q_heads, end - begin, width)
            seen_by_all = min(max(begin + offset + 1, 0), width)
            if seen_by_all < width:
                row = torch.arange(begin, end, device=q.device)[:, None] + offset
                hidden = torch.arange(seen_by_all, width, device=q.device) > row
                logits[..., seen_by_all:].masked_fill_(hidden, -torch.inf)
            yield slice(begin, end), logits
        begin = end


def _rows(x: Tensor, left: int, stride: int) -> Tensor:
    """[heads, n, d] -> [heads, rows, stride, d] after `left` rows of zeros; a view if possible."""
    right = -(left + x.shape[1]) % stride
    x = x.to(_dtype(x))
    if left or right:
        x = F.pad(x, (0, 0, left, right))
    return x.unflatten(1, (-1, stride))

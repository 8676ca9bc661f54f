"""Antidiagonal block scores on a GPU (XAttention, arXiv 2503.16428, section 2.1), one GEMM pass.

The tensors stay where they are: Q and K are read as [heads, S, N / S, d] by tensor descriptors,
phase S-1-r of Q against phase r of K, so a "strided row" is S tokens and the GEMM is 1/(2S) of
dense attention. Logits never reach memory. The epilogue keeps one cell per (strided row, key
block), the log-sum-exp of the row's logits in that block, from which everything else follows:
a row's softmax statistics are the log-sum-exp of its cells, and a block score is the sum of
exp(cell - row) over the rows of a query block.

Units: logits and cells are in base 2 inside (exp2 is what the hardware has), natural outside.
"""
# ruff: noqa: E741, SIM113 (m and l are the names of the literature; enumerate is no Triton)

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from xsparse.ops.sizes import cdiv, next_power_of_2

LN2 = tl.constexpr(math.log(2))
FLOOR = tl.constexpr(-1e30)
"""Finite stand-in for the maximum of a row that sees nothing, so that merges make no NaN."""


@dataclass(frozen=True)
class Tiling:
    """rows x cols strided tokens per program, head dimension in steps of `depth`."""

    rows: int = 128
    cols: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3


TILING_16_BIT = Tiling()
TILING_32_BIT = Tiling(rows=64, cols=64, depth=32, warps=4, stages=2)


def antidiagonal_scores(
    q: Tensor,
    k: Tensor,
    *,
    stride: int,
    block_size: int,
    q_start: int,
    scaling: float,
    tiling: Tiling | None = None,
) -> Tensor:
    """Block scores A of one chunk against all keys.

    q: [q_heads, C, d]; k: [kv_heads, q_start + C, d]
    returns fp32 [q_heads, q_blocks, k_blocks]
    """
    piece = _Piece(q, k, stride, block_size, q_start, 0)
    cells = piece.cells(q, k, scaling, tiling)
    return piece.block_sums(cells, None, None)


def antidiagonal_stats(
    q: Tensor,
    k: Tensor,
    *,
    stride: int,
    q_start: int,
    k_start: int,
    scaling: float,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax statistics of the strided rows over one piece of K that starts at `k_start`.

    q: [q_heads, C, d]; k: [kv_heads, n, d]
    returns m, l: fp32 [q_heads, strided rows], where sum exp(logit) = l * exp(m); m is a number
    near the maximum, not the maximum itself.
    """
    # Any block that k_start is a multiple of serves here; a long one makes fewer cells.
    block_size = math.gcd(k_start, max(128, stride))
    piece = _Piece(q, k, stride, block_size, q_start, k_start)
    return piece.stats(piece.cells(q, k, scaling, tiling))


def antidiagonal_block_sums(
    q: Tensor,
    k: Tensor,
    m: Tensor,
    l: Tensor,
    *,
    stride: int,
    block_size: int,
    q_start: int,
    k_start: int,
    scaling: float,
    tiling: Tiling | None = None,
) -> Tensor:
    """Block scores over one piece of K, given the statistics of the whole rows.

    q: [q_heads, C, d]; k: [kv_heads, n, d]; m, l: fp32 [q_heads, strided rows]
    returns fp32 [q_heads, q_blocks, ceil(n / block_size)]
    """
    piece = _Piece(q, k, stride, block_size, q_start, k_start)
    cells = piece.cells(q, k, scaling, tiling)
    return piece.block_sums(cells, m.contiguous(), l.contiguous())


def merge_stats(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Statistics over the union of two disjoint pieces of K. m, l: fp32 [q_heads, rows]."""
    (m_a, l_a), (m_b, l_b) = a, b
    m = torch.maximum(m_a, m_b)
    return m, l_a * torch.exp(m_a - m) + l_b * torch.exp(m_b - m)


class _Piece:
    """Geometry of a chunk of queries against a piece of keys, in strided rows and columns."""

    def __init__(self, q, k, stride, block_size, q_start, k_start):
        if block_size & (block_size - 1) or block_size % stride:
            raise ValueError(
                f"block_size={block_size}, stride={stride}: the Triton estimator takes a block"
                " size that is a power of two and a stride that divides it"
            )
        if k_start % block_size:
            raise ValueError(f"k_start={k_start} is not a multiple of block_size={block_size}")
        self.q_heads, self.tokens, self.head_dim = q.shape
        self.group = self.q_heads // k.shape[0]
        self.stride = stride
        self.block_rows = block_size // stride
        self.pad_front = q_start % stride
        self.first_row = q_start // stride
        self.rows = cdiv(q_start + self.tokens, stride) - self.first_row
        self.first_col = k_start // stride
        self.full_cols, self.rest = divmod(k.shape[1], stride)
        self.k_blocks = cdiv(k.shape[1], block_size)
        self.first_k_block = k_start // block_size
        self.first_q_block = q_start // block_size
        self.q_blocks = cdiv(q_start + self.tokens, block_size) - self.first_q_block

    def cells(self, q: Tensor, k: Tensor, scaling: float, tiling: Tiling | None) -> Tensor:
        """fp32 [q_heads, rows, k_blocks], base 2; entries past a row's diagonal are garbage."""
        tiling = tiling or (TILING_32_BIT if q.dtype == torch.float32 else TILING_16_BIT)
        scale = scaling / self.stride / math.log(2)
        cells = q.new_empty(self.q_heads, self.rows, self.k_blocks, dtype=torch.float32)
        q = self._whole_groups(q)
        if self.full_cols:
            self._gemm(q, k, cells, scale, tiling)
        if self.rest:
            self._last_group(q, k, cells, scale)
        return cells

    def _whole_groups(self, q: Tensor) -> Tensor:
        """[q_heads, stride, rows, d]: a view, or a copy with zero rows where groups are cut."""
        pad_back = self.rows * self.stride - self.pad_front - self.tokens
        if self.pad_front or pad_back:
            q = torch.nn.functional.pad(q, (0, 0, self.pad_front, pad_back))
        return _phases(q, self.rows, self.stride)

    def _gemm(self, q: Tensor, k: Tensor, cells: Tensor, scale: float, t: Tiling) -> None:
        # A program's columns are whole key blocks, at least one.
        cols = max(t.cols, self.block_rows)
        groups = _phases(k[:, : self.full_cols * self.stride], self.full_cols, self.stride)
        depth = min(t.depth, next_power_of_2(self.head_dim))
        row_tiles = cdiv(self.rows, t.rows)

        def col_tiles(i: int) -> int:
            last = self.first_row + min((i + 1) * t.rows, self.rows)
            return cdiv(min(max(last - self.first_col, 0), self.full_cols), cols)

        # Row tiles are paired first with last: pairs of a causal triangle cost the same.
        pairs = cdiv(row_tiles, 2)
        pair_tiles = max(
            col_tiles(i) + (col_tiles(row_tiles - 1 - i) if 2 * i + 1 < row_tiles else 0)
            for i in range(pairs)
        )
        if not pair_tiles:
            return
        _cells_kernel[(self.q_heads * pairs * pair_tiles,)](
            _descriptor(q, [1, 1, t.rows, depth]),
            _descriptor(groups, [1, 1, cols, depth]),
            cells,
            scale,
            self.rows,
            self.full_cols,
            self.first_row,
            self.first_col,
            self.k_blocks,
            row_tiles,
            pair_tiles,
            self.group,
            STRIDE=self.stride,
            BLOCK_ROWS=self.block_rows,
            HEAD_DIM=self.head_dim,
            ROWS=t.rows,
            COLS=cols,
            DEPTH=depth,
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
            num_warps=t.warps,
            num_stages=t.stages,
        )

    def _last_group(self, q: Tensor, k: Tensor, cells: Tensor, scale: float) -> None:
        """Add the incomplete last group of keys, which only the last strided row can see."""
        if self.first_row + self.rows - 1 < self.first_col + self.full_cols:
            return
        last_k = k[:, self.full_cols * self.stride :].float()
        last_q = q[:, :, -1].flip(1)[:, : self.rest].float()
        last_q = last_q.unflatten(0, (-1, self.group))
        logit = torch.einsum("kgrd,krd->kg", last_q, last_k).flatten() * scale
        cell = cells[:, -1, -1]
        if self.full_cols % self.block_rows:  # the block has complete groups too
            logit = torch.logaddexp2(cell, logit)
        cell.copy_(logit)

    def stats(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        m = cells.new_empty(self.q_heads, self.rows)
        l = torch.empty_like(m)
        rows = 16
        _stats_kernel[(self.q_heads * cdiv(self.rows, rows),)](
            cells,
            m,
            l,
            self.rows,
            self.first_row,
            self.first_k_block,
            self.k_blocks,
            BLOCK_ROWS=self.block_rows,
            ROWS=rows,
            COLS=64,
        )
        return m, l

    def block_sums(self, cells: Tensor, m: Tensor | None, l: Tensor | None) -> Tensor:
        scores = cells.new_empty(self.q_heads, self.q_blocks, self.k_blocks)
        _block_sums_kernel[(self.q_heads * self.q_blocks,)](
            cells,
            m,
            l,
            scores,
            self.rows,
            self.first_row,
            self.first_q_block,
            self.q_blocks,
            self.first_k_block,
            self.k_blocks,
            BLOCK_ROWS=self.block_rows,
            COLS=max(16, 1024 // self.block_rows),
        )
        return scores


def _phases(x: Tensor, groups: int, stride: int) -> Tensor:
    """[heads, groups * stride, d] seen as [heads, stride, groups, d]; leading dimensions of one
    in a descriptor's block cost nothing, others would send the tile through registers."""
    return x.unflatten(1, (groups, stride)).transpose(1, 2)


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptors need 16-byte strides; what has others (rare) is copied."""
    aligned = all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
    if not aligned or x.stride(-1) != 1 or x.data_ptr() % 16:
        x = x.contiguous()
    return TensorDescriptor.from_tensor(x, block)


@triton.jit
def _col_tiles(tile, rows, full_cols, first_row, first_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Column tiles that the rows of a row tile can see."""
    last = first_row + tl.minimum((tile + 1) * ROWS, rows)
    return tl.cdiv(tl.minimum(tl.maximum(last - first_col, 0), full_cols), COLS)


@triton.jit(
    do_not_specialize=[
        "rows",
        "full_cols",
        "first_row",
        "first_col",
        "k_blocks",
        "row_tiles",
        "pair_tiles",
        "group",
    ]
)
def _cells_kernel(
    q,
    k,
    cells,
    scale,
    rows,
    full_cols,
    first_row,
    first_col,
    k_blocks,
    row_tiles,
    pair_tiles,
    group,
    STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of strided rows x strided columns of one query head, reduced to cells."""
    # KV head by KV head; the heads of a group adjacent, since they read the same K from L2.
    program = tl.program_id(0)
    member = program % group
    program = program // group
    slot = program % pair_tiles
    program = program // pair_tiles
    pairs = (row_tiles + 1) // 2
    row_tile = program % pairs
    kv_head = program // pairs

    first_tiles = _col_tiles(row_tile, rows, full_cols, first_row, first_col, ROWS, COLS)
    mirrored = slot >= first_tiles
    col_tile = tl.where(mirrored, slot - first_tiles, slot)
    mirror = row_tiles - 1 - row_tile
    if mirrored & (mirror == row_tile):
        return
    row_tile = tl.where(mirrored, mirror, row_tile)
    if col_tile >= _col_tiles(row_tile, rows, full_cols, first_row, first_col, ROWS, COLS):
        return

    head = kv_head * group + member
    row_0 = row_tile * ROWS
    col_0 = col_tile * COLS
    steps: tl.constexpr = (HEAD_DIM + DEPTH - 1) // DEPTH
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for i in range(STRIDE * steps):
        phase = i // steps
        at = (i % steps) * DEPTH
        a = q.load([head, STRIDE - 1 - phase, row_0, at]).reshape(ROWS, DEPTH)
        b = k.load([kv_head, phase, col_0, at]).reshape(COLS, DEPTH)
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)

    row = first_row + row_0 + tl.arange(0, ROWS)
    if (col_0 + COLS > full_cols) | (first_col + col_0 + COLS > first_row + row_0 + 1):
        col = col_0 + tl.arange(0, COLS)
        seen = (first_col + col[None, :] <= row[:, None]) & (col[None, :] < full_cols)
        acc = tl.where(seen, acc, float("-inf"))
    # One shift per row of the tile, not per cell: a cell so far below it that it underflows adds
    # nothing to its row's sum either.
    BLOCKS: tl.constexpr = COLS // BLOCK_ROWS
    top = tl.max(acc, 1) * scale
    shift = tl.where(top == float("-inf"), 0.0, top)[:, None]
    mass = tl.sum(tl.reshape(tl.exp2(acc * scale - shift), (ROWS, BLOCKS, BLOCK_ROWS)), 2)
    block = col_tile * BLOCKS + tl.arange(0, BLOCKS)
    local = row_0 + tl.arange(0, ROWS)
    place = (head * rows + local).to(tl.int64)[:, None] * k_blocks + block[None, :]
    tl.store(
        cells + place,
        tl.where(mass > 0, shift + tl.log2(tl.where(mass > 0, mass, 1.0)), float("-inf")),
        mask=(local[:, None] < rows) & (block[None, :] < k_blocks),
    )


@triton.jit
def _load_cells(cells, base, local, row, rows, block, first_k_block, k_blocks, BLOCK_ROWS):
    """[rows, blocks] of a head, -inf where a row sees nothing."""
    seen = (first_k_block + block[None, :]) <= (row // BLOCK_ROWS)[:, None]
    inside = (local >= 0) & (local < rows)
    seen = seen & inside[:, None] & (block[None, :] < k_blocks)
    place = (base + local)[:, None].to(tl.int64) * k_blocks + block[None, :]
    return tl.load(cells + place, mask=seen, other=float("-inf"))


@triton.jit
def _row_stats(cells, base, local, row, rows, first_k_block, k_blocks, BLOCK_ROWS, ROWS, COLS):
    """m, l in base 2 over all cells of some rows."""
    m = tl.full((ROWS,), FLOOR, tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    stop = tl.minimum(k_blocks, tl.max(row, 0) // BLOCK_ROWS + 1 - first_k_block)
    for start in range(0, stop, COLS):
        block = start + tl.arange(0, COLS)
        x = _load_cells(cells, base, local, row, rows, block, first_k_block, k_blocks, BLOCK_ROWS)
        top = tl.maximum(m, tl.max(x, 1))
        l = l * tl.exp2(m - top) + tl.sum(tl.exp2(x - top[:, None]), 1)
        m = top
    return m, l


@triton.jit(do_not_specialize=["rows", "first_row", "first_k_block", "k_blocks"])
def _stats_kernel(
    cells,
    m_out,
    l_out,
    rows,
    first_row,
    first_k_block,
    k_blocks,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    tiles = tl.cdiv(rows, ROWS)
    head = tl.program_id(0) // tiles
    local = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    m, l = _row_stats(
        cells,
        head * rows,
        local,
        first_row + local,
        rows,
        first_k_block,
        k_blocks,
        BLOCK_ROWS,
        ROWS,
        COLS,
    )
    # To natural units: l * 2^m = l * exp(m ln 2).
    tl.store(m_out + head * rows + local, m * LN2, mask=local < rows)
    tl.store(l_out + head * rows + local, l, mask=local < rows)


@triton.jit(
    do_not_specialize=[
        "rows",
        "first_row",
        "first_q_block",
        "q_blocks",
        "first_k_block",
        "k_blocks",
    ]
)
def _block_sums_kernel(
    cells,
    m_in,
    l_in,
    scores,
    rows,
    first_row,
    first_q_block,
    q_blocks,
    first_k_block,
    k_blocks,
    BLOCK_ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """One row of blocks: sum over its strided rows of exp(cell - row); statistics given or not."""
    head = tl.program_id(0) // q_blocks
    q_block = tl.program_id(0) % q_blocks
    row = (first_q_block + q_block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    local = row - first_row
    inside = (local >= 0) & (local < rows)
    if m_in is None:
        m, l = _row_stats(
            cells,
            head * rows,
            local,
            row,
            rows,
            first_k_block,
            k_blocks,
            BLOCK_ROWS,
            BLOCK_ROWS,
            COLS,
        )
    else:
        m = tl.load(m_in + head * rows + local, mask=inside, other=0.0) / LN2
        l = tl.load(l_in + head * rows + local, mask=inside, other=1.0)
    # Rows outside the chunk sum to nothing; their cells are -inf below.
    row_lse = tl.where(l > 0, m + tl.log2(tl.where(l > 0, l, 1.0)), 0.0)
    out = scores + tl.program_id(0).to(tl.int64) * k_blocks
    for start in range(0, k_blocks, COLS):
        block = start + tl.arange(0, COLS)
        x = _load_cells(
            cells, head * rows, local, row, rows, block, first_k_block, k_blocks, BLOCK_ROWS
        )
        tl.store(out + block, tl.sum(tl.exp2(x - row_lse[:, None]), 0), mask=block < k_blocks)

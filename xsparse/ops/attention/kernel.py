"""Block-sparse attention on a GPU: every query block visits only the tiles of its list.

K and V stay where they lie: a list names columns, an index maps a column to a tile of a pool, and
tensor descriptors fetch the tile. Lists, and so the tiles read, may differ per query head. Two
kernels here, and a faster form of the first for Hopper GPUs in hopper.py:

- `_prefill_kernel`: one program per (query head, rows of a query block). Programs run KV head by
  KV head, query blocks from last to first, the heads of a group adjacent: one query block does few
  operations per byte of K and V, so what decides is how often a tile is found in the L2 cache.
- `_decode_kernel`: one query token, all heads of a group in one program, the list split over
  programs and merged by log-sum-exp. Its launch depends on shapes only and `q_start` may live on
  the device, so a CUDA graph can hold it.

Softmax is online in base 2 with the scale folded in; fp32 statistics and accumulators.
"""
# ruff: noqa: E741, SIM113 (m and l are the names of the literature; enumerate is no Triton)

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from xsparse.ops.attention import hopper
from xsparse.ops.attention.hopper import HopperTiling
from xsparse.ops.merge.kernel import merge_splits
from xsparse.ops.sizes import cdiv, next_power_of_2
from xsparse.ops.tiles import BlockLists, KVTiles

HEAD_DIM_MAX = 256
LN2 = tl.constexpr(math.log(2))


@dataclass(frozen=True)
class Tiling:
    """rows x keys per step of a program."""

    rows: int = 128
    keys: int = 128
    warps: int = 8
    stages: int = 2


def default_tiling(q: Tensor, kv: KVTiles) -> Tiling | HopperTiling:
    """The Hopper kernel where it can run."""
    return plain_tiling(q, kv) if hopper.why_not(q, kv) else HopperTiling()


def plain_tiling(q: Tensor, kv: KVTiles) -> Tiling:
    """What was fastest on an H200 (docs/kernels.md) and fits in the shared memory at hand."""
    head_dim, block_size = q.shape[-1], kv.block_size
    if q.dtype == torch.float32:
        return Tiling(min(64, block_size), min(16 if head_dim > 128 else 32, block_size), warps=4)
    if block_size < 128:
        return Tiling(block_size, block_size, warps=4)
    if head_dim > 128:
        return Tiling(keys=64)
    if head_dim <= 64:
        return Tiling(keys=64, stages=3)
    three_stages = (2 * 3 + 1) * 128 * next_power_of_2(head_dim) * 2 + 2048
    return Tiling(stages=3 if _shared_memory_bytes(q.device) >= three_stages else 2)


def block_sparse_attention(
    q: Tensor,
    kv: KVTiles,
    lists: BlockLists,
    *,
    q_start: int | Tensor,
    scaling: float,
    out_dtype: torch.dtype | None = None,
    tiling: Tiling | HopperTiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of each query block over the columns of its list.

    q: [q_heads, C, d]; q_start: position of the first query, as an int or, for C = 1, an integer
    tensor of one element on the device; tiling: another kernel or shape than the default.
    returns out [q_heads, C, d], lse fp32 [q_heads, C] (natural log; empty rows: zeros and -inf)
    """
    q_heads, tokens, head_dim = q.shape
    block_size = kv.block_size
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(
            f"block_size={block_size}: the Triton attention takes a power of two >= 16"
        )
    if head_dim > HEAD_DIM_MAX:
        raise ValueError(f"head_dim={head_dim}: the Triton attention takes at most {HEAD_DIM_MAX}")
    q = q if q.stride(-1) == 1 else q.contiguous()
    if tokens == 1:
        return _decode(q, kv, lists, q_start, scaling, out_dtype or q.dtype)
    if isinstance(q_start, Tensor):
        raise ValueError("q_start on the device is for one query token; pass an int")
    t = tiling or default_tiling(q, kv)
    # Token-major, as the next layer of a model reads it.
    out = q.new_empty(tokens, q_heads, head_dim, dtype=out_dtype or q.dtype).transpose(0, 1)
    lse = q.new_empty(q_heads, tokens, dtype=torch.float32)
    if isinstance(t, HopperTiling):
        if reason := hopper.why_not(q, kv):
            raise ValueError(f"the Hopper attention kernel {reason}")
        hopper.prefill(q, kv, lists, out, lse, q_start=q_start, scaling=scaling, tiling=t)
        return out, lse
    q_blocks, columns = lists.indices.shape[1:]
    width = next_power_of_2(head_dim)
    _prefill_kernel[(q_heads * q_blocks * (block_size // t.rows),)](
        q,
        _rows(kv.k_pool, [t.keys, width]),
        _rows(kv.v_pool, [t.keys, width]),
        kv.k_index.contiguous(),
        kv.v_index.contiguous(),
        kv.blocks.contiguous(),
        lists.indices.contiguous(),
        lists.counts.contiguous(),
        out,
        lse,
        scaling / math.log(2),
        q_start,
        tokens,
        q_blocks,
        columns,
        kv.k_index.shape[1],
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        q_heads // kv.kv_heads,
        BLOCK=block_size,
        HEAD_DIM=head_dim,
        WIDTH=width,
        ROWS=t.rows,
        KEYS=t.keys,
        PRECISION=_precision(q.dtype),
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return out, lse


def _decode(
    q: Tensor,
    kv: KVTiles,
    lists: BlockLists,
    q_start: int | Tensor,
    scaling: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    q_heads, _, head_dim = q.shape
    kv_heads, columns = kv.kv_heads, lists.indices.shape[2]
    group = q_heads // kv_heads
    # From shapes alone, never from counts: a graph replays it with other lists.
    splits = min(columns, cdiv(4 * _processors(q.device), kv_heads))
    outs = q.new_empty(splits, q_heads, 1, head_dim, dtype=torch.float32)
    lses = q.new_empty(splits, q_heads, 1, dtype=torch.float32)
    keys = min(kv.block_size, 32 if q.dtype == torch.float32 else 64)
    width = next_power_of_2(head_dim)
    _decode_kernel[(kv_heads * splits,)](
        q,
        _rows(kv.k_pool, [keys, width]),
        _rows(kv.v_pool, [keys, width]),
        kv.k_index.contiguous(),
        kv.v_index.contiguous(),
        kv.blocks.contiguous(),
        lists.indices.contiguous(),
        lists.counts.contiguous(),
        outs,
        lses,
        scaling / math.log(2),
        q_start,
        splits,
        columns,
        kv.k_index.shape[1],
        q.stride(0),
        group,
        ON_DEVICE=isinstance(q_start, Tensor),
        MEMBERS=max(16, next_power_of_2(group)),
        BLOCK=kv.block_size,
        HEAD_DIM=head_dim,
        WIDTH=width,
        KEYS=keys,
        PRECISION=_precision(q.dtype),
        num_warps=4,
        num_stages=2,
    )
    return merge_splits(outs, lses, out_dtype)


def _precision(dtype: torch.dtype) -> str:
    """Three tf32 products keep fp32's accuracy on tensor cores; other types ignore it."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter: few splits, but more than one
    return torch.cuda.get_device_properties(device).multi_processor_count


def _shared_memory_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _rows(pool: Tensor, block: list[int]) -> TensorDescriptor:
    """A pool [tiles, block_size, d] seen as rows of tokens."""
    return TensorDescriptor.from_tensor(pool.view(-1, pool.shape[-1]), block)


@triton.jit
def _accumulate(s, v, acc, m, l, scale, PRECISION: tl.constexpr):
    """One step of online softmax. s: raw logits [rows, keys]; m, l: base-2 statistics."""
    top = tl.maximum(m, tl.max(s, 1) * scale)
    # Rows that have seen nothing keep m = -inf; any finite shift gives them exp2(-inf) = 0.
    shift = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s * scale - shift[:, None])
    fade = tl.exp2(m - shift)
    l = l * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, top, l


@triton.jit(
    do_not_specialize=["q_start", "tokens", "q_blocks", "columns", "kv_columns", "group"],
)
def _prefill_kernel(
    q,
    k_rows,
    v_rows,
    k_index,
    v_index,
    blocks,
    lists,
    counts,
    out,
    lse,
    scale,
    q_start,
    tokens,
    q_blocks,
    columns,
    kv_columns,
    q_head_stride,
    q_token_stride,
    out_head_stride,
    out_token_stride,
    group,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    PARTS: tl.constexpr = BLOCK // ROWS
    STEPS: tl.constexpr = BLOCK // KEYS
    program = tl.program_id(0)
    member = program % group
    part = (program // group) % PARTS
    q_block = q_blocks - 1 - (program // (group * PARTS)) % q_blocks
    kv_head = program // (group * PARTS * q_blocks)
    head = (kv_head * group + member).to(tl.int64)

    diagonal = q_start // BLOCK + q_block
    position = diagonal * BLOCK + part * ROWS + tl.arange(0, ROWS)
    row = position - q_start
    inside = (row >= 0) & (row < tokens)
    feature = tl.arange(0, WIDTH)
    q_at = q + head * q_head_stride + row.to(tl.int64)[:, None] * q_token_stride + feature[None, :]
    x = tl.load(q_at, mask=inside[:, None] & (feature < HEAD_DIM)[None, :], other=0.0)

    steps = tl.load(counts + head * q_blocks + q_block) * STEPS
    lists += (head * q_blocks + q_block) * columns
    k_index += kv_head * kv_columns
    v_index += kv_head * kv_columns
    blocks += kv_head * kv_columns

    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    # list -> column -> tile is a chain of loads; each link is read one step ahead of its use.
    last = columns - 1
    column = tl.load(lists)
    k_row, v_row = tl.load(k_index + column) * BLOCK, tl.load(v_index + column) * BLOCK
    key = tl.load(blocks + column) * BLOCK
    column = tl.load(lists + tl.minimum(1 // STEPS, last))
    for i in range(steps):
        offset = (i % STEPS) * KEYS
        k = k_rows.load([k_row + offset, 0])
        v = v_rows.load([v_row + offset, 0])
        k_row, v_row = tl.load(k_index + column) * BLOCK, tl.load(v_index + column) * BLOCK
        next_key = tl.load(blocks + column) * BLOCK
        column = tl.load(lists + tl.minimum((i + 2) // STEPS, last))
        s = tl.dot(x, k.T, input_precision=PRECISION)
        if key >= diagonal * BLOCK:
            u = key + offset + tl.arange(0, KEYS)
            s = tl.where(position[:, None] >= u[None, :], s, float("-inf"))
        acc, m, l = _accumulate(s, v, acc, m, l, scale, PRECISION)
        key = next_key

    seen = l > 0
    acc = acc / tl.where(seen, l, 1.0)[:, None]
    natural = tl.where(seen, (m + tl.log2(tl.where(seen, l, 1.0))) * LN2, float("-inf"))
    tl.store(lse + head * tokens + row, natural, mask=inside)
    out_at = out + head * out_head_stride + row.to(tl.int64)[:, None] * out_token_stride
    tl.store(
        out_at + feature[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside[:, None] & (feature < HEAD_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["q_start", "splits", "columns", "kv_columns", "group"])
def _decode_kernel(
    q,
    k_rows,
    v_rows,
    k_index,
    v_index,
    blocks,
    lists,
    counts,
    outs,
    lses,
    scale,
    q_start,
    splits,
    columns,
    kv_columns,
    q_head_stride,
    group,
    ON_DEVICE: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    STEPS: tl.constexpr = BLOCK // KEYS
    split = tl.program_id(0) % splits
    kv_head = tl.program_id(0) // splits
    position = tl.load(q_start).to(tl.int32) if ON_DEVICE else q_start
    member = tl.arange(0, MEMBERS)
    real = member < group
    head = kv_head * group + member
    feature = tl.arange(0, WIDTH)
    cell = real[:, None] & (feature < HEAD_DIM)[None, :]
    q_at = q + head.to(tl.int64)[:, None] * q_head_stride + feature[None, :]
    x = tl.load(q_at, mask=cell, other=0.0)

    # This split's range of list positions, and whether all heads list the same columns in it.
    count = tl.load(counts + head, mask=real, other=0)
    share = tl.cdiv(tl.max(count, 0), splits)
    begin = split * share
    end = tl.minimum(count, begin + share)
    longest = tl.max(end, 0)
    differ = tl.max(tl.where(real & (end != longest), 1, 0), 0)
    for start in range(begin, longest, 16):
        at = start + tl.arange(0, 16)
        first = tl.load(lists + kv_head * group * columns + at, mask=at < longest, other=0)
        mine = tl.load(
            lists + head[:, None] * columns + at[None, :],
            mask=real[:, None] & (at < longest)[None, :],
            other=0,
        )
        other = real[:, None] & (at < longest)[None, :] & (mine != first[None, :])
        differ = tl.maximum(differ, tl.max(tl.max(other.to(tl.int32), 1), 0))

    k_index += kv_head * kv_columns
    v_index += kv_head * kv_columns
    blocks += kv_head * kv_columns
    m = tl.full((MEMBERS,), float("-inf"), tl.float32)
    l = tl.zeros((MEMBERS,), tl.float32)
    acc = tl.zeros((MEMBERS, WIDTH), tl.float32)
    # Equal lists are walked once for all heads, others head by head.
    for walker in range(tl.where(differ > 0, group, 1)):
        active = (member == walker) | (differ == 0)
        walk = lists + (kv_head * group + walker) * columns
        stop = tl.minimum(tl.load(counts + kv_head * group + walker), begin + share)
        for i in range(begin * STEPS, stop * STEPS):
            column = tl.load(walk + i // STEPS)
            offset = (i % STEPS) * KEYS
            k = k_rows.load([tl.load(k_index + column) * BLOCK + offset, 0])
            v = v_rows.load([tl.load(v_index + column) * BLOCK + offset, 0])
            u = tl.load(blocks + column) * BLOCK + offset + tl.arange(0, KEYS)
            s = tl.dot(x, k.T, input_precision=PRECISION)
            s = tl.where(active[:, None] & (u <= position)[None, :], s, float("-inf"))
            acc, m, l = _accumulate(s, v, acc, m, l, scale, PRECISION)

    seen = l > 0
    acc = acc / tl.where(seen, l, 1.0)[:, None]
    natural = tl.where(seen, (m + tl.log2(tl.where(seen, l, 1.0))) * LN2, float("-inf"))
    at = split * (tl.num_programs(0) // splits) * group + head
    tl.store(lses + at, natural, mask=real)
    tl.store(outs + at[:, None] * HEAD_DIM + feature[None, :], acc, mask=cell)

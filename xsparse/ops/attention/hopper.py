"""Block-sparse prefill attention for Hopper GPUs, with copies, products and softmax overlapped.

The plain kernel (kernel.py) leaves the tensor cores idle while the softmax of a tile runs. Here a
program is three groups of warps that meet only at barriers in shared memory:

- a producer warp walks the list and asks the copy engine for tiles, `STAGES` of them ahead;
- two consumers of one warpgroup each own half the rows of the query block. Each issues the product
  Q K of the next tile and P V of the current one before it waits, so that its softmax runs under
  its own P V, and one consumer's softmax under the other's products (FlashAttention-3,
  arXiv 2407.08608, sections 3.1 and 3.2).

Written in Gluon, Triton's explicit layer. Limited to what it is fast for: 16-bit types, blocks of
128, head dimensions 64 and 128.
"""
# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
# ruff: noqa: E741, SIM113 (m and l are the names of the literature; enumerate is no Triton)

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from xsparse.ops.tiles import BlockLists, KVTiles

BLOCK = 128
# Old and new names of two operations; inside a group of warps the barrier joins that group alone.
group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
LN2 = gl.constexpr(math.log(2))


@dataclass(frozen=True)
class HopperTiling:
    """stages: tiles of K, and of V, in flight; persistent: one program per multiprocessor walks
    all query blocks, so that the first copies of the next run under the last products of the
    current one. More stages or persistence gained nothing on an H200 (docs/kernels.md)."""

    stages: int = 2
    persistent: bool = False


def why_not(q: Tensor, kv: KVTiles) -> str | None:
    """The reason why this kernel cannot take these tensors, or None."""
    if q.device.type == "cpu" or torch.cuda.get_device_capability(q.device)[0] != 9:
        return "needs a GPU of compute capability 9"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes 16-bit types, not {q.dtype}"
    if kv.block_size != BLOCK or q.shape[-1] not in (64, 128):
        return f"takes blocks of {BLOCK} and head dimensions 64 and 128"
    return None


def prefill(
    q: Tensor,
    kv: KVTiles,
    lists: BlockLists,
    out: Tensor,
    lse: Tensor,
    *,
    q_start: int,
    scaling: float,
    tiling: HopperTiling,
) -> None:
    """Write `out` and `lse`; arguments as in kernel.block_sparse_attention."""
    q_heads, tokens, head_dim = q.shape
    q_blocks, columns = lists.indices.shape[1:]
    layout = gl.NVMMASharedLayout(128, 16, 2)
    # Rows of Q in one matrix: [tokens, heads * d] as a model makes it (perhaps of some of its
    # heads), or [heads * tokens, d].
    token_major = q.stride(0) == head_dim and q.stride(2) == 1
    rows = q.transpose(0, 1).flatten(1) if token_major else q.contiguous().flatten(0, 1)
    total = q_heads * q_blocks
    grid = total
    if tiling.persistent:
        grid = min(total, torch.cuda.get_device_properties(q.device).multi_processor_count)
    pool = [BLOCK, head_dim]
    _prefill_kernel[(grid,)](
        TensorDescriptor.from_tensor(rows, [BLOCK // 2, head_dim], layout),
        TensorDescriptor.from_tensor(kv.k_pool.view(-1, head_dim), pool, layout),
        TensorDescriptor.from_tensor(kv.v_pool.view(-1, head_dim), pool, layout),
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
        total,
        0 if token_major else tokens,
        head_dim if token_major else 0,
        q_heads // kv.kv_heads,
        out.stride(0),
        out.stride(1),
        HEAD_DIM=head_dim,
        STAGES=tiling.stages,
        num_warps=4,
    )


@gluon.jit
def _place(tile, q_blocks, group):
    """KV head by KV head, query blocks from last to first, the heads of a group adjacent."""
    member = tile % group
    q_block = q_blocks - 1 - (tile // group) % q_blocks
    kv_head = tile // (group * q_blocks)
    return kv_head, kv_head * group + member, q_block


@gluon.jit
def _produce(
    rings,
    bars,
    descriptors,
    tables,
    sizes,
    STAGES: gl.constexpr,
):
    q_ring, k_ring, v_ring = rings
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = bars
    q_rows, k_rows, v_rows = descriptors
    k_index, v_index, blocks, lists, counts = tables
    q_start, tokens, q_blocks, columns, kv_columns, total, head_rows, head_cols, group = sizes
    BLOCK: gl.constexpr = k_ring.shape[1]
    n = 0
    turn = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head, head, q_block = _place(tile, q_blocks, group)
        row = (q_start // BLOCK + q_block) * BLOCK - q_start + head * head_rows
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_ready, 2 * q_rows.block_type.nbytes)
        load_tile(q_rows, [row, head * head_cols], q_ready, q_ring.index(0))
        load_tile(q_rows, [row + BLOCK // 2, head * head_cols], q_ready, q_ring.index(1))
        turn += 1
        at = (head * q_blocks + q_block).to(gl.int64)
        # An empty row still walks one tile, fully masked: the consumers need no special case.
        items = gl.maximum(gl.load(counts + at), 1)
        row_list = lists + at * columns
        k_tiles = k_index + kv_head * kv_columns
        v_tiles = v_index + kv_head * kv_columns
        for i in range(items):
            column = gl.load(row_list + i)
            k_row = gl.load(k_tiles + column) * BLOCK
            v_row = gl.load(v_tiles + column) * BLOCK
            stage = n % STAGES
            lap = (n // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), lap ^ 1)
            mbarrier.expect(k_ready.index(stage), k_rows.block_type.nbytes)
            load_tile(k_rows, [k_row, 0], k_ready.index(stage), k_ring.index(stage))
            mbarrier.wait(v_empty.index(stage), lap ^ 1)
            mbarrier.expect(v_ready.index(stage), v_rows.block_type.nbytes)
            load_tile(v_rows, [v_row, 0], v_ready.index(stage), v_ring.index(stage))
            n += 1


@gluon.jit
def _release(bar):
    """All warps of the partition are done with a buffer."""
    group_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _softmax(s, m, l, scale):
    """One step of online softmax. s: raw logits [rows, keys]; m, l: base-2 statistics."""
    top = gl.maximum(m, gl.max(s, 1) * scale)
    shift = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(s * scale - shift[:, None])
    fade = gl.exp2(m - shift)
    return p, fade, top, l * fade + gl.sum(p, 1)


@gluon.jit
def _mask(s, key, position, limit, BLOCK: gl.constexpr, MMA: gl.constexpr):
    """Only blocks that reach past a row's position need a mask: the diagonal."""
    if key >= limit:
        u = key + gl.arange(0, BLOCK, gl.SliceLayout(0, MMA))
        s = gl.where(position[:, None] >= u[None, :], s, float("-inf"))
    return s


@gluon.jit
def _consume(
    rings,
    bars,
    tables,
    outputs,
    scale,
    sizes,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
):
    q_ring, k_ring, v_ring = rings
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = bars
    k_index, v_index, blocks, lists, counts = tables
    out, lse, out_head_stride, out_token_stride = outputs
    q_start, tokens, q_blocks, columns, kv_columns, total, head_rows, head_cols, group = sizes
    BLOCK: gl.constexpr = k_ring.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    ROWS: gl.constexpr = q_ring.shape[1]
    dtype: gl.constexpr = k_ring.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    S_ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    O_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    no_s = gl.zeros([ROWS, BLOCK], gl.float32, MMA)
    q = q_ring.index(HALF)
    n = 0
    turn = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head, head, q_block = _place(tile, q_blocks, group)
        first = (q_start // BLOCK + q_block) * BLOCK
        position = first + HALF * ROWS + gl.arange(0, ROWS, S_ROW)
        at = (head * q_blocks + q_block).to(gl.int64)
        count = gl.load(counts + at)
        items = gl.maximum(count, 1)
        row_list = lists + at * columns
        numbers = blocks + kv_head * kv_columns
        # The chain list -> column -> block number is read one step ahead of its use.
        key = gl.load(numbers + gl.load(row_list)) * BLOCK
        # Nothing listed: a key past every position masks the tile that is walked all the same.
        key = gl.where(count > 0, key, first + BLOCK)
        column = gl.load(row_list + gl.minimum(1, columns - 1))

        m = gl.full([ROWS], float("-inf"), gl.float32, S_ROW)
        l = gl.zeros([ROWS], gl.float32, S_ROW)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)
        mbarrier.wait(q_ready, turn & 1)
        turn += 1
        stage = n % STAGES
        mbarrier.wait(k_ready.index(stage), (n // STAGES) & 1)
        k = k_ring.index(stage).permute((1, 0))
        s = warpgroup_mma(q, k, no_s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        _release(k_empty.index(stage))
        s = _mask(s, key, position, first, BLOCK, MMA)
        p, fade, m, l = _softmax(s, m, l, scale)
        p16 = gl.convert_layout(p.to(dtype), P)
        key = gl.load(numbers + column) * BLOCK
        column = gl.load(row_list + gl.minimum(2, columns - 1))
        for i in range(1, items):
            v_stage = stage
            v_lap = (n // STAGES) & 1
            n += 1
            stage = n % STAGES
            next_key = gl.load(numbers + column) * BLOCK
            column = gl.load(row_list + gl.minimum(i + 2, columns - 1))
            mbarrier.wait(k_ready.index(stage), (n // STAGES) & 1)
            k = k_ring.index(stage).permute((1, 0))
            s = warpgroup_mma(q, k, no_s, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(v_stage), v_lap)
            acc = warpgroup_mma(p16, v_ring.index(v_stage), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            _release(k_empty.index(stage))
            s = _mask(s, key, position, first, BLOCK, MMA)
            p, fade, m, l = _softmax(s, m, l, scale)
            # This wait is over already. It ends a basic block, across which the assembler does not
            # move the wait for P V up, in front of the softmax that is to run meanwhile.
            mbarrier.wait(q_ready, (turn & 1) ^ 1)
            acc, p, l, fade = warpgroup_mma_wait(0, deps=[acc, p, l, fade])
            p16 = gl.convert_layout(p.to(dtype), P)
            _release(v_empty.index(v_stage))
            acc = acc * gl.convert_layout(fade, O_ROW)[:, None]
            key = next_key
        _release(q_empty)
        mbarrier.wait(v_ready.index(stage), (n // STAGES) & 1)
        acc = warpgroup_mma(p16, v_ring.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _release(v_empty.index(stage))
        n += 1

        seen = l > 0
        safe = gl.where(seen, l, 1.0)
        row = position - q_start
        natural = gl.where(seen, (m + gl.log2(safe)) * LN2, float("-inf"))
        inside = (row >= 0) & (row < tokens)
        gl.store(lse + head.to(gl.int64) * tokens + row, natural, mask=inside)
        acc = acc / gl.convert_layout(safe, O_ROW)[:, None]
        row = first + HALF * ROWS + gl.arange(0, ROWS, O_ROW) - q_start
        feature = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUT))
        out_at = out + head.to(gl.int64) * out_head_stride
        out_at += row.to(gl.int64)[:, None] * out_token_stride + feature[None, :]
        gl.store(
            out_at,
            acc.to(out.dtype.element_ty),
            mask=((row >= 0) & (row < tokens))[:, None] & (feature < HEAD_DIM)[None, :],
        )


@gluon.jit(
    do_not_specialize=[
        "q_start",
        "tokens",
        "q_blocks",
        "columns",
        "kv_columns",
        "total",
        "head_rows",
        "head_cols",
        "group",
    ]
)
def _prefill_kernel(
    q_rows,
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
    total,
    head_rows,
    head_cols,
    group,
    out_head_stride,
    out_token_stride,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = k_rows.dtype
    BLOCK: gl.constexpr = k_rows.block_type.shape[0]
    q_ring = gl.allocate_shared_memory(dtype, [2, BLOCK // 2, HEAD_DIM], q_rows.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, HEAD_DIM], k_rows.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, HEAD_DIM], v_rows.layout)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [1], one)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], one)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()

    rings = (q_ring, k_ring, v_ring)
    bars = (q_ready, q_empty, k_ready, k_empty, v_ready, v_empty)
    tables = (k_index, v_index, blocks, lists, counts)
    outputs = (out, lse, out_head_stride, out_token_stride)
    sizes = (q_start, tokens, q_blocks, columns, kv_columns, total, head_rows, head_cols, group)
    gl.warp_specialize(
        [
            (_consume, (rings, bars, tables, outputs, scale, sizes, 0, STAGES)),
            (_consume, (rings, bars, tables, outputs, scale, sizes, 1, STAGES)),
            (_produce, (rings, bars, (q_rows, k_rows, v_rows), tables, sizes, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )

"""Merge attention over disjoint key sets by log-sum-exp, fp32 inside.

With lse = log sum exp(lse_p), the merged output is the sum of out_p * exp(lse_p - lse). A part
that saw nothing has lse -inf and adds nothing.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from xsparse.ops.sizes import cdiv, next_power_of_2

ROWS = 32
"""Of one head, merged by one program."""


def merge_states(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets, all parts in one pass.

    outs: each [q_heads, C, d]; lses: each [q_heads, C], natural log. Returns out in `out_dtype`
    (by default that of the first part), lse in fp32.
    """
    parts = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in outs)
    q_heads, tokens, head_dim = parts[0].shape
    # Token-major like the outputs of attention, as the next layer of a model reads it.
    out = parts[0].new_empty(tokens, q_heads, head_dim, dtype=out_dtype or parts[0].dtype)
    out = out.transpose(0, 1)
    lse = lses[0].new_empty(q_heads, tokens, dtype=torch.float32)
    _merge_kernel[(q_heads * cdiv(tokens, ROWS),)](
        parts,
        tuple(x.float().contiguous() for x in lses),
        tuple(x.stride(0) for x in parts),
        tuple(x.stride(1) for x in parts),
        out,
        lse,
        tokens,
        out.stride(0),
        out.stride(1),
        PARTS=len(parts),
        HEAD_DIM=head_dim,
        WIDTH=next_power_of_2(head_dim),
        ROWS=ROWS,
    )
    return out, lse


def merge_splits(outs: Tensor, lses: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge along the first dimension.

    outs: [n, q_heads, C, d]; lses: fp32 [n, q_heads, C], both contiguous
    """
    splits, q_heads, tokens, head_dim = outs.shape
    out = outs.new_empty(q_heads, tokens, head_dim, dtype=out_dtype)
    lse = lses.new_empty(q_heads, tokens)
    _merge_splits_kernel[(q_heads * tokens,)](
        outs,
        lses,
        out,
        lse,
        splits,
        q_heads * tokens,
        HEAD_DIM=head_dim,
        WIDTH=next_power_of_2(head_dim),
        num_warps=1,
    )
    return out, lse


@triton.jit
def _log_sum(shift, total):
    return tl.where(total > 0, shift + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=["tokens"])
def _merge_kernel(
    outs,
    lses,
    head_strides,
    token_strides,
    out,
    lse,
    tokens,
    out_head,
    out_token,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    tiles = tl.cdiv(tokens, ROWS)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    row = ((tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    feature = tl.arange(0, WIDTH)
    inside = row < tokens
    cell = inside[:, None] & (feature < HEAD_DIM)[None, :]
    at = head * tokens + row
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for i in tl.static_range(PARTS):
        top = tl.maximum(top, tl.load(lses[i] + at, mask=inside, other=float("-inf")))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in tl.static_range(PARTS):
        weight = tl.exp(tl.load(lses[i] + at, mask=inside, other=float("-inf")) - shift)
        part = outs[i] + head * head_strides[i] + row[:, None] * token_strides[i]
        x = tl.load(part + feature[None, :], mask=cell, other=0.0).to(tl.float32)
        mixed += x * weight[:, None]
        total += weight
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out + head * out_head + row[:, None] * out_token + feature[None, :]
    tl.store(out_at, mixed.to(out.dtype.element_ty), mask=cell)
    tl.store(lse + at, _log_sum(shift, total), mask=inside)


@triton.jit(do_not_specialize=["splits", "rows"])
def _merge_splits_kernel(
    outs, lses, out, lse, splits, rows, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """One row: an online merge over the splits."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, WIDTH)
    top = tl.load(lses + row)
    for i in range(1, splits):
        top = tl.maximum(top, tl.load(lses + i * rows + row))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    mixed = tl.zeros((WIDTH,), tl.float32)
    for i in range(splits):
        at = i * rows + row
        weight = tl.exp(tl.load(lses + at) - shift)
        part = tl.load(outs + at * HEAD_DIM + feature, mask=feature < HEAD_DIM, other=0.0)
        mixed += part * weight
        total += weight
    mixed = mixed / tl.where(total > 0, total, 1.0)
    tl.store(
        out + row * HEAD_DIM + feature, mixed.to(out.dtype.element_ty), mask=feature < HEAD_DIM
    )
    tl.store(lse + row, _log_sum(shift, total))

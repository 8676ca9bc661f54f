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


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets.

    outs: each [q_heads, C, d]; lses: each [q_heads, C], natural log. Returns out in the dtype of
    the first, lse in fp32.
    """
    out, lse = outs[0], lses[0].float()
    for i in range(1, len(outs)):
        # Between parts the output stays in fp32; only the last merge rounds.
        dtype = outs[0].dtype if i == len(outs) - 1 else torch.float32
        out, lse = _merge_two(out, lse, outs[i], lses[i].float(), dtype)
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


def _merge_two(
    a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    q_heads, tokens, head_dim = a.shape
    a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (a, b))
    # Token-major like the outputs of attention, as the next layer of a model reads it.
    out = a.new_empty(tokens, q_heads, head_dim, dtype=dtype).transpose(0, 1)
    lse = lse_a.new_empty(q_heads, tokens)
    rows = 32
    _merge_two_kernel[(q_heads * cdiv(tokens, rows),)](
        a,
        lse_a.contiguous(),
        b,
        lse_b.contiguous(),
        out,
        lse,
        tokens,
        a.stride(0),
        a.stride(1),
        b.stride(0),
        b.stride(1),
        out.stride(0),
        out.stride(1),
        HEAD_DIM=head_dim,
        WIDTH=next_power_of_2(head_dim),
        ROWS=rows,
    )
    return out, lse


@triton.jit
def _log_sum(shift, total):
    return tl.where(total > 0, shift + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=["tokens"])
def _merge_two_kernel(
    a,
    lse_a,
    b,
    lse_b,
    out,
    lse,
    tokens,
    a_head,
    a_token,
    b_head,
    b_token,
    out_head,
    out_token,
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
    x = tl.load(lse_a + head * tokens + row, mask=inside, other=float("-inf"))
    y = tl.load(lse_b + head * tokens + row, mask=inside, other=float("-inf"))
    top = tl.maximum(x, y)
    shift = tl.where(top == float("-inf"), 0.0, top)
    x, y = tl.exp(x - shift), tl.exp(y - shift)
    total = x + y
    share = tl.where(total > 0, total, 1.0)
    a_at = a + head * a_head + row[:, None] * a_token + feature[None, :]
    b_at = b + head * b_head + row[:, None] * b_token + feature[None, :]
    mixed = tl.load(a_at, mask=cell, other=0.0).to(tl.float32) * (x / share)[:, None]
    mixed += tl.load(b_at, mask=cell, other=0.0).to(tl.float32) * (y / share)[:, None]
    out_at = out + head * out_head + row[:, None] * out_token + feature[None, :]
    tl.store(out_at, mixed.to(out.dtype.element_ty), mask=cell)
    tl.store(lse + head * tokens + row, _log_sum(shift, total), mask=inside)


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

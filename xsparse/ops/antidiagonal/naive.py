"""Antidiagonal scores from the formula, one phase at a time; fp64 stays fp64."""

import torch
from torch import Tensor

# The maximum of a row without any visible column: finite, so that differences are never NaN.
LOWEST = -1e30


def antidiagonal_logits(
    q: Tensor, k: Tensor, *, stride: int, q_start: int, k_start: int, scaling: float
) -> Tensor:
    """Logits of every strided row and column, -inf above the diagonal.

    q: [q_heads, C, d], the first at position q_start; k: [kv_heads, n, d], the first at k_start, a
    multiple of the stride; returns [q_heads, strided rows, strided columns]
    """
    q_heads, queries, _ = q.shape
    kv_heads, keys, _ = k.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    first_row, end_row = q_start // stride, -(-(q_start + queries) // stride)
    first_column, columns = k_start // stride, -(-keys // stride)
    logits = q.new_zeros(q_heads, end_row - first_row, columns)
    for head in range(q_heads):
        group = head // (q_heads // kv_heads)
        for phase in range(stride):
            keys_of_phase = k[group, phase::stride]
            for row in range(first_row, end_row):
                token = row * stride + stride - 1 - phase - q_start
                if 0 <= token < queries:
                    logits[head, row - first_row, : len(keys_of_phase)] += (
                        keys_of_phase @ q[head, token]
                    )
    rows = torch.arange(first_row, end_row, device=q.device)[:, None]
    visible = first_column + torch.arange(columns, device=q.device) <= rows
    return (logits * (scaling / stride)).masked_fill(~visible, -torch.inf)


def antidiagonal_stats(
    q: Tensor, k: Tensor, *, stride: int, q_start: int, k_start: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exponentials of each strided row over one piece of K.

    A row that sees nothing of the piece has a large negative maximum and sum 0.
    """
    logits = antidiagonal_logits(
        q, k, stride=stride, q_start=q_start, k_start=k_start, scaling=scaling
    )
    m = logits.amax(-1).clamp_min(LOWEST)
    return m, (logits - m[..., None]).exp().sum(-1)


def merge_stats(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple:
    """Statistics over two disjoint pieces of K, each (m, l) [q_heads, strided rows]."""
    (m1, l1), (m2, l2) = first, second
    m = torch.maximum(m1, m2)
    return m, l1 * (m1 - m).exp() + l2 * (m2 - m).exp()


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
    """Block scores over one piece of K under the statistics of all of K.

    m, l: [q_heads, strided rows]; returns [q_heads, q_blocks, ceil(n / block_size)]
    """
    logits = antidiagonal_logits(
        q, k, stride=stride, q_start=q_start, k_start=k_start, scaling=scaling
    )
    mass = (logits - m[..., None]).exp() / l[..., None].clamp_min(torch.finfo(l.dtype).tiny)
    first_block, end_block = q_start // block_size, -(-(q_start + q.shape[1]) // block_size)
    scores = mass.new_zeros(len(q), end_block - first_block, -(-k.shape[1] // block_size))
    per_block = block_size // stride
    for row in range(mass.shape[1]):
        a = (q_start // stride + row) // per_block - first_block
        for column in range(mass.shape[2]):
            scores[:, a, column // per_block] += mass[:, row, column]
    return scores


def antidiagonal_scores(
    q: Tensor, k: Tensor, *, stride: int, block_size: int, q_start: int, scaling: float
) -> Tensor:
    """Block scores: the mass of each (query block, key block).

    q: [q_heads, C, d]; k: [kv_heads, N, d], N = q_start + C; returns fp32 (fp64 from fp64)
    [q_heads, q_blocks, ceil(N / block_size)]
    """
    place = {"stride": stride, "q_start": q_start, "k_start": 0, "scaling": scaling}
    m, total = antidiagonal_stats(q, k, **place)
    return antidiagonal_block_sums(q, k, m, total, block_size=block_size, **place)

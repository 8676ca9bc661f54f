"""A block's keys in a few numbers per feature, and attention mass judged from those alone.

Extremes bound the logits of a block (Quest, arXiv 2406.10774), the mean gives its mean logit
(FlashPrefill).
"""

from collections.abc import Callable

import torch
from torch import Tensor

STRIP_NUMBERS = 4 << 20  # logits held at once, at least one query block


def block_minmax(k: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest key of each block, per feature; a partial last block counts its own.

    k: [kv_heads, n, d]; returns two [kv_heads, ceil(n / block_size), d]
    """
    count = k.shape[1] // block_size
    whole = count * block_size
    blocks = k[:, :whole].unflatten(1, (count, block_size))
    low, high = blocks.amin(2), blocks.amax(2)
    if whole < k.shape[1]:
        rest = k[:, whole:]
        low = torch.cat([low, rest.amin(1, keepdim=True)], 1)
        high = torch.cat([high, rest.amax(1, keepdim=True)], 1)
    return low, high


def block_mean(k: Tensor, block_size: int) -> Tensor:
    """Mean key of each block; a partial last block counts its own.

    k: [kv_heads, n, d]; returns fp32 [kv_heads, ceil(n / block_size), d] (fp64 for fp64 keys)
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    count = k.shape[1] // block_size
    whole = count * block_size
    mean = k[:, :whole].unflatten(1, (count, block_size)).mean(2, dtype=dtype)
    if whole < k.shape[1]:
        mean = torch.cat([mean, k[:, whole:].mean(1, keepdim=True, dtype=dtype)], 1)
    return mean


def block_bounds(q: Tensor, low: Tensor, high: Tensor, *, scaling: float) -> Tensor:
    """No logit of the block exceeds scaling x sum_c max(q_c low_c, q_c high_c).

    q: [q_heads, C, d]; low, high: [kv_heads, blocks, d]; returns fp32 [q_heads, C, blocks]
    """
    rows = _grouped(q, len(low))
    bound = rows.clamp_min(0) @ high.to(rows.dtype).mT + rows.clamp_max(0) @ low.to(rows.dtype).mT
    return (bound * scaling).view(len(q), q.shape[1], -1)


def block_logits(q: Tensor, mean: Tensor, *, scaling: float) -> Tensor:
    """Mean logit of each block. q: [q_heads, C, d]; mean: [kv_heads, blocks, d];
    returns fp32 [q_heads, C, blocks]"""
    rows = _grouped(q, len(mean))
    return (rows @ mean.to(rows.dtype).mT * scaling).view(len(q), q.shape[1], -1)


def block_mass(
    q: Tensor, logits: Callable[[Tensor], Tensor], *, k_blocks: int, block_size: int, q_start: int
) -> Tensor:
    """Each row's softmax over its causal blocks, meaned over the rows of a query block.

    q: [q_heads, C, d], from position `q_start` on; logits: of some rows of q, fp32 [q_heads,
    rows, k_blocks]; returns fp32 [q_heads, q_blocks, k_blocks]
    """
    block = torch.arange(k_blocks, device=q.device)
    step = max(1, STRIP_NUMBERS // (len(q) * block_size * k_blocks)) * block_size
    strips = []
    begin, tokens = 0, q.shape[1]
    while begin < tokens:
        end = min(begin + step - (q_start + begin) % block_size, tokens)
        row = torch.arange(q_start + begin, q_start + end, device=q.device) // block_size
        strip = logits(q[:, begin:end]).masked_fill_(block > row[:, None], -torch.inf)
        first, last = (q_start + begin) // block_size, (q_start + end - 1) // block_size
        member = (row == block[first : last + 1, None]).to(strip.dtype)
        strips.append((member / member.sum(1, keepdim=True)) @ torch.softmax(strip, -1))
        begin = end
    return torch.cat(strips, 1)


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """[q_heads, C, d] -> [kv_heads, rows of the group, d], in fp32 or better."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.to(dtype).unflatten(0, (kv_heads, -1)).flatten(1, 2)

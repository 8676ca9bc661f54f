"""Bounds of a block's logits from the extremes of its keys (Quest, arXiv 2406.10774)."""

import torch
from torch import Tensor


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


def block_bounds(q: Tensor, low: Tensor, high: Tensor, *, scaling: float) -> Tensor:
    """No logit of the block exceeds scaling x sum_c max(q_c low_c, q_c high_c).

    q: [q_heads, C, d]; low, high: [kv_heads, blocks, d]; returns fp32 [q_heads, C, blocks]
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = q.to(dtype).unflatten(0, (len(low), -1)).flatten(1, 2)
    bound = rows.clamp_min(0) @ high.to(dtype).mT + rows.clamp_max(0) @ low.to(dtype).mT
    return (bound * scaling).view(len(q), q.shape[1], -1)

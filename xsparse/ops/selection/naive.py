"""Selection row by row, in Python and fp64."""

import torch
from torch import Tensor


def select_blocks(scores: Tensor, threshold: float | Tensor, *, q_block_start: int) -> Tensor:
    """Keep block 0, the diagonal, and the best others while the mass taken is below the need.

    The need is threshold x the row's mass; ties go to the lowest index; a threshold of 1 keeps all
    causal blocks by definition.

    scores: [q_heads, q_blocks, k_blocks]; threshold: a float or [q_heads];
    returns bool like scores
    """
    q_heads, q_blocks, _ = scores.shape
    thresholds = threshold.tolist() if isinstance(threshold, Tensor) else [threshold] * q_heads
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for head in range(q_heads):
        for a in range(q_blocks):
            diagonal = q_block_start + a
            row = scores[head, a, : diagonal + 1].double().tolist()
            kept = {0, diagonal}
            if thresholds[head] >= 1:
                kept = set(range(diagonal + 1))
            need = thresholds[head] * sum(row)
            mass = sum(row[b] for b in kept)
            for b in sorted(range(1, diagonal), key=lambda b: (-row[b], b)):
                if mass >= need:
                    break
                kept.add(b)
                mass += row[b]
            mask[head, a, sorted(kept)] = True
    return mask.to(scores.device)

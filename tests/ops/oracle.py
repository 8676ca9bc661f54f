"""The formulas in fp64, token by token, sharing no code with the operators."""

import math

import torch
from torch import Tensor


def logits(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """[q_heads, C, N] with K repeated for its query heads."""
    q, k = q.double(), k.double()
    return torch.einsum("hcd,hnd->hcn", q, k.repeat_interleave(len(q) // len(k), 0)) * scaling


def antidiagonal_logits(case, q: Tensor, k: Tensor) -> Tensor:
    """L[h, i, j] with rows and columns of the whole sequence; rows before the chunk are NaN.

    Sums token logits over the pairs (i S + S-1-r, j S + r): zeros stand where a token is missing.
    """
    s, n = case.stride, case.length
    groups = math.ceil(n / s)
    full = torch.zeros(len(q), groups * s, groups * s, dtype=torch.float64)
    full[:, case.q_start : n, :n] = logits(q, k, case.scaling)
    full = full.view(len(q), groups, s, groups, s)
    total = sum(full[:, :, s - 1 - r, :, r] for r in range(s)) / s
    visible = torch.arange(groups) <= torch.arange(groups)[:, None]
    total = total.masked_fill(~visible, -torch.inf)
    return total[:, case.q_start // s :]


def antidiagonal_scores(case, q: Tensor, k: Tensor) -> Tensor:
    p = torch.softmax(antidiagonal_logits(case, q, k), -1)
    r = case.block_size // case.stride
    first_row, first = case.q_start // case.stride, case.q_start // case.block_size
    scores = torch.zeros(len(q), case.q_blocks, case.k_blocks, dtype=torch.float64)
    for i in range(p.shape[1]):
        for b in range(case.k_blocks):
            scores[:, (first_row + i) // r - first, b] += p[:, i, b * r : (b + 1) * r].sum(-1)
    return scores


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scaling: float, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """visible: bool [q_heads, C, N]; rows that see nothing give zeros and -inf."""
    masked = logits(q, k, scaling).masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(masked, -1)
    p = torch.softmax(masked, -1).nan_to_num(0.0)
    return torch.einsum("hcn,hnd->hcd", p, v.double().repeat_interleave(len(q) // len(v), 0)), lse


def token_mask(case, mask: Tensor) -> Tensor:
    """A mask of blocks over tokens, causal: bool [q_heads, C, N]."""
    t = torch.arange(case.q_start, case.length)
    u = torch.arange(case.length)
    rows = t // case.block_size - case.q_start // case.block_size
    return mask[:, rows][:, :, u // case.block_size] & (u <= t[:, None])


def attention_mass(case, q: Tensor, k: Tensor) -> Tensor:
    everything = torch.ones(len(q), case.q_blocks, case.k_blocks, dtype=torch.bool)
    hidden = ~token_mask(case, everything)
    p = torch.softmax(logits(q, k, case.scaling).masked_fill(hidden, -torch.inf), -1)
    block = torch.arange(case.length) // case.block_size
    rows = block[case.q_start :] - case.q_start // case.block_size
    one_hot = torch.nn.functional.one_hot
    return torch.einsum(
        "tcn,ca,nb->tab", p, one_hot(rows).double(), one_hot(block, case.k_blocks).double()
    )


def select_row(scores: list[float], threshold: float, diagonal: int) -> set[int]:
    """Rule of the threshold for one row of blocks 0..diagonal."""
    if threshold >= 1:
        return set(range(diagonal + 1))
    kept = {0, diagonal}
    need = threshold * math.fsum(scores[: diagonal + 1])
    rest = sorted(set(range(diagonal + 1)) - kept, key=lambda b: (-scores[b], b))
    while rest and math.fsum(scores[b] for b in kept) < need:
        kept.add(rest.pop(0))
    return kept

"""Antidiagonal block scores (XAttention, arXiv 2503.16428, section 3.1).

Every `stride` query rows and keys are summed along antidiagonals into one logit,

    L[i, j] = scaling / stride * sum_r <Q[i S + S-1-r], K[j S + r]>,   r = 0..S-1,

a softmax over the causal j <= i turns a row into mass, and the mass is summed per block. Groups of
`stride` tokens are groups of the sequence: where a chunk or K ends inside one, the missing rows
count as zeros. With stride 1 this is exact attention mass.
"""

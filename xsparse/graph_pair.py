"""Two CUDA graphs of dense attention, causal and not, reused over layers, chunks and steps.

The design this project grew from: one graph for a chunk against itself and one against a window of
earlier keys, with static inputs that are fed by copies. Parts of any other size (the partial last
window, the tokens of decode) run eagerly. Decode has a non-causal graph of its own, since a graph
is for one number of queries. What it gains over eager launches is measured in docs/offload.md.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Attention = Callable[..., tuple[Tensor, Tensor]]


class GraphPair:
    """dense_attention of a backend, replayed where the part has one of the two sizes.

    queries: tokens of a whole chunk; keys: tokens of a whole window of history
    """

    def __init__(self, dense_attention: Attention, queries: int, keys: int):
        self.eager = dense_attention
        self.queries, self.keys = queries, keys
        self.graphs: dict[tuple, _Captured] = {}

    def dense_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        causal: bool,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As the operator of the same name."""
        whole = q.shape[1] in (1, self.queries)
        expected = self.queries if causal else self.keys
        if not whole or k.shape[1] != expected or (causal and q.shape[1] != self.queries):
            return self.eager(q, k, v, scaling=scaling, causal=causal, out_dtype=out_dtype)
        key = (q.shape, k.shape, causal, scaling, out_dtype)
        if key not in self.graphs:
            self.graphs[key] = _Captured(
                self.eager, q, k, v, scaling=scaling, causal=causal, out_dtype=out_dtype
            )
        return self.graphs[key].replay(q, k, v)


class _Captured:
    """One graph with its static inputs and outputs."""

    def __init__(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, **how):
        attention(q, k, v, **how)  # probes kernels and allocates outside of the capture
        self.inputs = tuple(torch.empty_like(x) for x in (q, k, v))
        for static, x in zip(self.inputs, (q, k, v), strict=True):
            static.copy_(x)
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(q.device)
        with torch.cuda.graph(self.graph):
            self.outputs = attention(*self.inputs, **how)

    def replay(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        for static, x in zip(self.inputs, tensors, strict=True):
            static.copy_(x)
        self.graph.replay()
        # Parts wait for each other to be merged, and the next replay writes here again.
        out, lse = self.outputs
        return out.clone(), lse.clone()

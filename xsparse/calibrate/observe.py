"""Prompts through a model with dense attention, watched from inside.

What a later layer sees is then what the model itself makes, and the true mass of a block and the
estimator's score of it come from the same queries and keys.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from xsparse import ops, selectors
from xsparse.attention import Session
from xsparse.hf import bound, cache_argument, cache_shape
from xsparse.kv.engine import Engine
from xsparse.kv.resident import ResidentEngine
from xsparse.models import Loaded

# (layer, first block of the chunk, true mass, scores), the last two [q_heads, q_blocks, k_blocks]
Watch = Callable[[int, int, Tensor, Tensor], None]


class Observed(Session):
    """A session with dense attention that shows `watch` each layer of each chunk."""

    def __init__(self, engine: Engine, backend: Any, stride: int):
        super().__init__(engine, selectors.build("full"), backend)
        self.phase = "prefill"
        estimator = selectors.build("xattention", stride=stride)
        assert isinstance(estimator, selectors.MassSelector)
        self.estimator = estimator
        self.watch: Watch | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        out = super().attend(layer, q, k, v, scaling)
        if self.watch is not None:
            site = self._site(layer, self.engine.lengths[layer] - q.shape[1], scaling)
            keys = self.engine.keys(layer)
            mass = self.ops.attention_mass(
                q, keys.keys(), block_size=site.block_size, q_start=site.q_start, scaling=scaling
            )
            self.watch(layer, site.first_block, mass, self.estimator.scores(q, keys, site))
        return out


@contextmanager
def observed(
    loaded: Loaded, *, stride: int, block_size: int, chunk_size: int, ops_backend: str = "auto"
) -> Iterator[Callable[[Sequence[int], Watch], None]]:
    """A function that prefills token ids and hands every layer of every chunk to a watch."""
    model = loaded.model
    shape = cache_shape(model, block_size=block_size, block_size_ratio=1, chunk_size=chunk_size)
    session = Observed(ResidentEngine(shape), ops.get(ops_backend, shape.device), stride)

    def prefill(ids: Sequence[int], watch: Watch) -> None:
        session.reset()
        session.engine.reserve(len(ids))
        session.watch = watch
        prompt = torch.tensor([list(ids)], device=shape.device)
        with torch.inference_mode():
            for piece in prompt.split(chunk_size, dim=1):
                model(input_ids=piece, logits_to_keep=1, **kept)

    try:
        with bound(model, session) as cache:
            kept = {cache_argument(model): cache}
            yield prefill
    finally:
        session.engine.close()

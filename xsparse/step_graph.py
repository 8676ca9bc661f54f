"""A whole decode step as one CUDA graph: model, KV write, selection, gather, attention, next token.

The graph is captured once for the engine's buffers and replayed with no host read between tokens:
token and position live on the device and are advanced inside it. The host reads tokens in bursts,
to stop at an end token.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xsparse.attention import Session

BURST = 16  # tokens between two looks for an end token


class StepGraph:
    """Greedy decode of a model bound to `session`; cache: the forward's cache argument."""

    def __init__(self, model: PreTrainedModel, session: Session, cache: dict[str, Any]):
        assert session.steps is not None
        self.model, self.session, self.cache = model, session, cache
        self.steps = session.steps
        self.graph: torch.cuda.CUDAGraph | None = None
        self.generation = 0  # of the engine's buffers that it was captured with

    def generate(self, token: Tensor, tokens: int, stop: tuple[int, ...] | list[int]) -> list[int]:
        """Up to `tokens` ids after `token` (0-d), a stop token included; steps run in bursts, so
        the sequence held afterwards may be longer than what is returned."""
        found: list[int] = []
        while len(found) < tokens:
            new = self.run(token, min(BURST, tokens - len(found))).tolist()
            for i, number in enumerate(new):
                if number in stop:
                    return [*found, *new[: i + 1]]
            found += new
            token = self.ids[0, 0].clone()
        return found

    def run(self, token: Tensor, steps: int) -> Tensor:
        """`steps` new ids, int64 [steps], without waiting for the device."""
        engine = self.session.engine
        begin = engine.length
        engine.make_room(begin + steps)
        ran = 0
        if self.graph is None or self.generation != engine.generation:
            # The first step runs eagerly: it compiles and allocates what capture must not.
            self._allocate()
            ran = 1
        self.ids.copy_(token)
        self.steps.position.fill_(begin)
        if ran:
            self._step()
            if steps > 1:
                self._capture()
        if steps > ran:
            assert self.graph is not None
            engine.begin_steps()
            for _ in range(steps - ran):
                self.graph.replay()
            self._count(begin + ran, steps - ran)
        return self.found[begin + 1 : begin + 1 + steps]

    @torch.inference_mode(False)
    def _allocate(self) -> None:
        self.graph = None
        self.steps.prepare()
        engine = self.session.engine
        self.generation, device = engine.generation, engine.shape.device
        self.ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.found = torch.zeros(engine.capacity + 1, dtype=torch.int64, device=device)

    def _step(self) -> None:
        position = self.steps.position
        logits = self.model(
            input_ids=self.ids, position_ids=position[None], logits_to_keep=1, **self.cache
        ).logits
        self.ids.copy_(logits[0, -1].argmax())
        position.add_(1)
        self.found.index_copy_(0, position, self.ids[0])

    def _count(self, begin: int, steps: int) -> None:
        """What replayed steps leave to the host."""
        engine = self.session.engine
        self.steps.count(begin, steps)
        moved = engine.shape.layers * steps * engine.token_bytes_to_host
        self.session.counters.add("decode_bytes_d2h", moved)
        for layer in range(engine.shape.layers):
            engine.advance(layer, steps)

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self.steps.captured = True
        try:
            with torch.cuda.graph(graph):
                self._step()
        finally:
            self.steps.captured = False
        self.graph = graph

"""Running prompts on a model and recording what each cost."""

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch

from xsparse import models, tasks
from xsparse.attention import Session
from xsparse.config import ModelConfig
from xsparse.hf import SessionCache, bound, cache_argument
from xsparse.models import Loaded
from xsparse.tasks import Sample


class Measured:
    """A model bound to a session: prompts in, records of docs/results.md out."""

    def __init__(
        self, loaded: Loaded, session: Session, cache: SessionCache, *, whole_steps: bool = False
    ):
        self.loaded = loaded
        self.session = session
        self.cache = {cache_argument(loaded.model): cache}
        self.graph = None
        if whole_steps:
            from xsparse.step_graph import StepGraph

            self.graph = StepGraph(loaded.model, session, self.cache)
        self.device = session.engine.shape.device

    def warm_up(self, tokens: int) -> int:
        """Run a throw-away prompt of `tokens` tokens; compiles and allocates outside the clock."""
        with torch.inference_mode():
            self._generate([1 + i % 97 for i in range(tokens)], 3, stop=())
        return tokens

    def run(self, sample: Sample) -> dict[str, Any]:
        """Prefill in chunks, decode greedily, score."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with torch.inference_mode():
            self.session.engine.reserve(sample.length)
            new, clock = self._generate(
                sample.input_ids, sample.max_new_tokens, stop=self.loaded.eos_ids
            )
        shown = [i for i in new if i not in self.loaded.eos_ids]
        prediction = self.loaded.tokenizer.decode(shown, skip_special_tokens=True)
        memory = self.session.engine.memory()
        return {
            "task": sample.task,
            "length": sample.length,
            "index": sample.index,
            "prompt_hash": sample.prompt_hash,
            "prompt_tokens": len(sample.input_ids),
            "new_tokens": len(new),
            "prediction": prediction,
            "references": list(sample.references),
            "score": tasks.score(sample.metric, prediction, sample.references),
            **clock,
            "digest_bytes": memory.digest,
            "engine_gpu_gb": (sum(memory.device.values()) + memory.digest) / 1e9,
            "engine_host_gb": sum(memory.host.values()) / 1e9,
            "peak_gpu_gb": torch.cuda.max_memory_allocated(self.device) / 1e9
            if self.device.type == "cuda"
            else None,
            "peak_host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
            "meta": sample.meta,
        }

    def _generate(
        self, ids: list[int], max_new_tokens: int, stop: tuple[int, ...] | list[int]
    ) -> tuple[list[int], dict[str, Any]]:
        """New token ids (the stop token included) and what they cost."""
        session = self.session
        session.reset()
        session.engine.reserve(len(ids) + max_new_tokens)
        prompt = torch.tensor([ids], device=self.device)
        self._synchronize()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        session.phase = "prefill"
        logits = None
        for piece in prompt.split(session.engine.shape.chunk_size, dim=1):
            logits = self._forward(piece)
        assert logits is not None
        self._synchronize()
        prefill_s = time.perf_counter() - begin_s
        cpu_s = time.process_time() - begin_cpu_s
        token = logits[0, -1].argmax()
        new = [int(token)]
        ttft_s = time.perf_counter() - begin_s

        stages = session.counters.stages_s()
        session.phase = "auto"
        decode_begin_s = time.perf_counter()
        if self.graph is not None and new[-1] not in stop:
            new += self.graph.generate(token, max_new_tokens - 1, stop)
        while self.graph is None and new[-1] not in stop and len(new) < max_new_tokens:
            token = self._forward(token.view(1, 1))[0, -1].argmax()
            new.append(int(token))
        decode_s = time.perf_counter() - decode_begin_s
        # A graph runs in bursts, so there may have been more steps than tokens are returned.
        steps = session.engine.length - len(ids)
        return new, {
            "ttft_s": ttft_s,
            "prefill_s": prefill_s,
            "cpu_share": cpu_s / (prefill_s * torch.get_num_threads())
            if self.device.type == "cpu"
            else None,
            "decode_s": decode_s,
            "decode_steps": steps,
            "tpot_s": decode_s / steps if steps else None,
            "stages_s": stages,
            "counters": session.counters.read(),
        }

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loaded.model(input_ids=ids, logits_to_keep=1, **self.cache).logits

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def load_once(node: ModelConfig, dtype: str, device: str) -> Loaded:
    """The model, kept for the next point of the same process."""
    return _load(json.dumps(asdict(node), sort_keys=True), dtype, device)


@lru_cache(maxsize=1)
def _load(node: str, dtype: str, device: str) -> Loaded:
    return models.load(ModelConfig(**json.loads(node)), dtype=dtype, device=device)


@contextmanager
def measured(loaded: Loaded, session: Session, *, whole_steps: bool = False) -> Iterator[Measured]:
    """The model bound to `session`; engine buffers are given back on exit. whole_steps: decode by
    one CUDA graph per step."""
    try:
        with bound(loaded.model, session) as cache:
            yield Measured(loaded, session, cache, whole_steps=whole_steps)
    finally:
        session.engine.close()

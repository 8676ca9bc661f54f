"""Prompts of a run in order, made ahead of the model by other processes where that is asked for:
one of 32k tokens takes longer to fit and tokenise than a GPU takes to answer."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

from xsparse import tasks
from xsparse.config import ModelConfig, TaskConfig

AHEAD = 4  # prompts of each process that are made or wait


@dataclass(frozen=True)
class Source:
    """What prompts are made from; a prompt is a function of this, its task, length and index."""

    model: ModelConfig
    task: TaskConfig
    seed: int

    def samples(
        self, wanted: Sequence[tuple[str, int, int]], tokenizer: Any, workers: int = 0
    ) -> Iterator[tasks.Sample]:
        """The sample of each (task, length, index); workers: processes, 0 for none, which then
        has `tokenizer` make them when they are asked for."""
        if not workers:
            made = _Made(self, tokenizer)
            for place in wanted:
                yield made.sample(*place)
            return
        pool = _pool(workers)
        waiting: deque[Future[tasks.Sample]] = deque()
        try:
            for place in wanted:
                waiting.append(pool.submit(_sample, self, place))
                if len(waiting) > AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class _Made:
    """The tasks of a source, each built once."""

    def __init__(self, source: Source, tokenizer: Any):
        self.source, self.tokenizer = source, tokenizer
        self.built: dict[tuple[str, int], tasks.Task] = {}

    def sample(self, task: str, length: int, index: int) -> tasks.Sample:
        if (task, length) not in self.built:
            self.built[task, length] = tasks.build(
                task,
                self.tokenizer,
                length=length,
                seed=self.source.seed,
                node=self.source.task,
                chat_template_kwargs=self.source.model.chat_template_kwargs,
            )
        return self.built[task, length].sample(index)


@lru_cache(maxsize=1)  # kept for the next point: a process takes seconds to start
def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to answer


_of: dict[str, _Made] = {}  # of a worker process, which serves one source at a time


def _sample(source: Source, place: tuple[str, int, int]) -> tasks.Sample:
    from xsparse.models import load_tokenizer

    key = repr(source)
    if key not in _of:
        _of.clear()
        _of[key] = _Made(source, load_tokenizer(source.model))
    return _of[key].sample(*place)

"""What a task family produces: a draft, which is a prompt whose amount of filler is still open.

A family draws everything that is random first (keys, values, depths, the order of the filler) and
then offers `body(size)`, a pure function of the amount of filler. A search for the right size can
therefore try any sizes in any order without changing the sample.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xsparse.tasks.options import Options


@dataclass(frozen=True)
class Streams:
    """Independent random generators of one sample, keyed by what the sample is and nothing else."""

    seed: int
    task: str
    length: int
    index: int

    def __call__(self, purpose: str) -> random.Random:
        return _generator(self.seed, self.task, self.length, self.index, purpose)

    def shared(self, purpose: str) -> random.Random:
        """A generator that all lengths and indices of a task share."""
        return _generator(self.seed, self.task, purpose)


def _generator(*parts: object) -> random.Random:
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


@dataclass(frozen=True)
class Body:
    """The user's message, with the character offsets of what a method may or may not keep.

    `needles` are the places of the text that hold the answer, `depths` their intended places as
    fractions of the context (0 first, 1 last). Both are empty where the answer is everywhere.
    """

    text: str
    question: int
    needles: tuple[int, ...] = ()
    depths: tuple[float, ...] = ()


@dataclass(frozen=True)
class Draft:
    """A sample without its size: `body(size)` has more tokens for a larger size."""

    body: Callable[[int], Body]
    smallest: int
    answer_prefix: str
    references: list[str]
    largest: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Spec:
    """A task: how to draw its samples and how they are scored.

    min_length: tokens below which no tokenizer that splits digits one by one can fit it.
    options: the config keys, besides data paths, that mean something to this task.
    paths: data files that a sample is made of; raises ValueError where one is missing.
    samples: how many samples to run where the configuration asks for n.
    """

    name: str
    draw: Callable[[Streams, Options], Draft]
    metric: str
    max_new_tokens: int
    min_length: int
    haystack: str
    options: frozenset[str] = frozenset()
    paths: Callable[[Options], list[Path]] = lambda options: []
    samples: Callable[[Options, int], int] = lambda options, n: n

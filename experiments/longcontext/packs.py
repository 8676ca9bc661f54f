"""From prompts to packs: documents of one step, put end to end in a fixed number of tokens.

A pack is a function of (seed, step, index), so that it can be made by any process, ahead of time,
and again after an interruption. Its size is always the same, so that a compiled model compiles
once; what is left at its end is filled with plain text.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from experiments.longcontext import material, prompts
from xsparse.tasks.fit import TooLong, fit
from xsparse.tasks.prompt import PromptFormat

TEXT = "text"  # the family of plain text, all of whose tokens are learned
_LEAST = 512  # tokens: a shorter rest of a pack becomes plain text
_FILL = 0.9  # a prompt has between this share of its intended tokens and all of them


@dataclass(frozen=True)
class Phase:
    """steps optimizer steps of documents of shortest..longest tokens (log-uniform)."""

    steps: int
    shortest: int
    longest: int


@dataclass(frozen=True)
class Recipe:
    """What decides the content of every pack."""

    seed: int
    pack_tokens: int
    phases: tuple[Phase, ...]
    mixture: Mapping[str, float]
    """Weight of each family; `text` is plain text."""

    def __post_init__(self) -> None:
        known = {*prompts.FAMILIES, TEXT}
        if unknown := sorted(set(self.mixture) - known):
            raise ValueError(f"mixture.{unknown[0]}: known are {', '.join(sorted(known))}")
        if not any(weight > 0 for weight in self.mixture.values()):
            raise ValueError("mixture: needs a weight above 0")
        for phase in self.phases:
            if not 0 < phase.shortest <= phase.longest <= self.pack_tokens:
                raise ValueError(
                    f"phases: {phase.shortest} to {phase.longest} tokens, allowed is 1 <= shortest "
                    f"<= longest <= pack_tokens={self.pack_tokens}"
                )

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase(self, step: int) -> Phase:
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        raise ValueError(f"step={step}: the phases have {self.steps} steps")


@dataclass(frozen=True)
class Document:
    """ids: [n]; learned: [n], whether a token is to be predicted; the first never is."""

    family: str
    ids: np.ndarray
    learned: np.ndarray


@dataclass(frozen=True)
class Pack:
    """ids, learned: [pack_tokens]; document i has lengths[i] tokens and is of families[i]."""

    ids: np.ndarray
    learned: np.ndarray
    lengths: list[int]
    families: list[str]


class Frame:
    """The chat template as pieces of text around the turns of a conversation."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.format = PromptFormat(tokenizer)
        eos = tokenizer.eos_token
        text = tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "first-message"},
                {"role": "assistant", "content": "first-answer"},
                {"role": "user", "content": "second-message"},
            ],
            tokenize=False,
        )
        _, _, rest = text.partition("first-answer")
        self.between = rest.partition("second-message")[0]
        if not self.between.startswith(eos):
            raise ValueError(f"the chat template does not end an answer with {eos!r}")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt_document(family: str, frame: Frame, rng: random.Random, tokens: int) -> Document:
    """A conversation of at most `tokens` tokens. TooLong if the smallest one has more."""
    draft = prompts.draw(family, rng, tokens)
    first, *later = draft.turns
    pieces: list[tuple[list[int], bool]] = [(_answer(frame, first.answer), True)]
    eos = frame.tokenizer.eos_token
    for turn in later:
        asked = f"{frame.between.removeprefix(eos)}{turn.question}{frame.format.tail}{turn.prefix}"
        pieces += [(frame.encode(asked), False), (_answer(frame, turn.answer), True)]
    # Further questions may take up to a quarter of a short document.
    while len(pieces) > 1 and sum(len(ids) for ids, _ in pieces) > tokens / 4:
        pieces = pieces[:-2]
    budget = tokens - sum(len(ids) for ids, _ in pieces)
    _, start = fit(
        lambda size: frame.format.encode(draft.message(size) + first.question, first.prefix).ids,
        len,
        smallest=draft.smallest,
        largest=None,
        enough=int(_FILL * budget),
        budget=budget,
    )
    pieces = [(start, False), *pieces]
    ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in pieces])
    learned = np.concatenate([np.full(len(ids), answer) for ids, answer in pieces])
    return Document(family, ids, learned)


def _answer(frame: Frame, text: str) -> list[int]:
    return [*frame.encode(text), frame.tokenizer.eos_token_id]


def text_document(frame: Frame, rng: random.Random, tokens: int) -> Document:
    """Plain text of exactly `tokens` tokens."""
    haystack = material.prose(rng)
    sentences = tokens // 16 + 8
    ids: list[int] = []
    while len(ids) < tokens:
        ids = frame.encode("".join(haystack.take(sentences)))
        sentences *= 2
    learned = np.ones(tokens, dtype=bool)
    learned[0] = False
    return Document(TEXT, np.asarray(ids[:tokens], dtype=np.int32), learned)


def generator(seed: int, step: int, index: int) -> random.Random:
    """What a pack is drawn from; no evaluation prompt has a generator of this form."""
    digest = hashlib.sha256(f"longcontext|{seed}|{step}|{index}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def pack(recipe: Recipe, frame: Frame, step: int, index: int) -> Pack:
    """Pack `index` of an optimizer step."""
    rng = generator(recipe.seed, step, index)
    phase = recipe.phase(step)
    families, weights = zip(*sorted(recipe.mixture.items()), strict=True)
    documents: list[Document] = []
    left = recipe.pack_tokens
    while left:
        tokens = round(math.exp(rng.uniform(math.log(phase.shortest), math.log(phase.longest))))
        family = rng.choices(families, weights)[0]
        own = random.Random(rng.getrandbits(64))
        document = _document(family, frame, own, min(tokens, left))
        documents.append(document)
        left -= len(document.ids)
    return Pack(
        ids=np.concatenate([d.ids for d in documents]),
        learned=np.concatenate([d.learned for d in documents]),
        lengths=[len(d.ids) for d in documents],
        families=[d.family for d in documents],
    )


def _document(family: str, frame: Frame, rng: random.Random, tokens: int) -> Document:
    if family == TEXT or tokens < _LEAST:
        return text_document(frame, rng, tokens)
    try:
        return prompt_document(family, frame, rng, tokens)
    except TooLong:
        return text_document(frame, rng, tokens)


class Packs:
    """Packs in order, made ahead of time by `workers` processes (0: made when asked for)."""

    def __init__(self, recipe: Recipe, tokenizer_folder: str, *, accumulate: int, workers: int):
        self._recipe, self._accumulate, self._ahead = recipe, accumulate, 3 * workers
        self._pool = None
        self._arguments = (recipe, tokenizer_folder)
        if workers:
            self._pool = ProcessPoolExecutor(
                workers, get_context("spawn"), initializer=_begin, initargs=self._arguments
            )

    def steps(self, first: int) -> Iterator[list[Pack]]:
        """The packs of step `first`, first + 1, ... to the end of the recipe."""
        order = (
            (step, index)
            for step in range(first, self._recipe.steps)
            for index in range(self._accumulate)
        )
        made = self._ahead_of_time(order) if self._pool else self._in_turn(order)
        while batch := [p for _, p in zip(range(self._accumulate), made, strict=False)]:
            yield batch

    def _in_turn(self, order: Iterator[tuple[int, int]]) -> Iterator[Pack]:
        recipe, folder = self._arguments
        frame = Frame(tokenizer(folder))
        for step, index in order:
            yield pack(recipe, frame, step, index)

    def _ahead_of_time(self, order: Iterator[tuple[int, int]]) -> Iterator[Pack]:
        assert self._pool is not None
        waiting: deque[Future[Pack]] = deque()
        for place in order:
            waiting.append(self._pool.submit(_make, place))
            if len(waiting) > self._ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)


def tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    made.model_max_length = 1 << 30  # packs are longer than what the base model was made for
    return made


_worker: dict[str, Any] = {}  # of a worker process: what `_begin` prepared


def _begin(recipe: Recipe, folder: str) -> None:
    _worker.update(recipe=recipe, frame=Frame(tokenizer(folder)))


def _make(place: tuple[int, int]) -> Pack:
    return pack(_worker["recipe"], _worker["frame"], *place)

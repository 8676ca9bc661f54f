"""Tasks: what is asked of a model, and how an answer is scored. Needs neither torch nor a network.

    names(node)                       the tasks that a configuration node stands for
    check(name, length, node)         ValueError if it cannot be made
    build(name, tokenizer, ...)       a Task, whose sample(index) is a finished prompt
    score(metric, prediction, refs)   0..1

A sample is a function of (seed, task, length, index), the tokenizer and the node alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xsparse.tasks import files
from xsparse.tasks.draft import Draft, Spec, Streams
from xsparse.tasks.families import RULER, specs
from xsparse.tasks.fit import TooLong, fit
from xsparse.tasks.options import Options
from xsparse.tasks.prompt import Prompt, PromptFormat
from xsparse.tasks.scoring import score

__all__ = ["Sample", "Task", "build", "check", "data_paths", "names", "sample_count", "score"]

# A prompt is accepted when prompt and new tokens fill this share of the length; where the filler
# is too coarse for it, the largest prompt that fits is.
FILL = 0.98
# Rows made with another tokenizer, or without the chat template, may be a little too long.
TOLERANCE = 1.1


@dataclass(frozen=True)
class Sample:
    """One prompt with its answers. meta is JSON: depth, needle_token, question_token, haystack."""

    task: str
    length: int
    index: int
    input_ids: list[int]
    references: list[str]
    max_new_tokens: int
    metric: str
    prompt_hash: str
    meta: dict[str, Any]


def names(node: Any) -> list[str]:
    """Task names of a node; ValueError for unknown ones.

    An explicit `tasks` list is taken as it is. `ruler` without one is every RULER task that can be
    made: the generated ones, qa_1 and qa_2 where `qa_data` has them, or what `ruler_data` has.
    """
    options = Options.of(node)
    if options.tasks:
        for name in options.tasks:
            _spec(name)
        return list(options.tasks)
    if options.name != "ruler":
        _spec(options.name)
        return [options.name]
    available = [name for name in RULER if _available(name, options)]
    if not available:
        raise ValueError(f"task.ruler_data={options.ruler_data}: holds no file of a RULER task")
    return available


def check(name: str, length: int, node: Any) -> None:
    """ValueError, naming key and value, if the task cannot be made at this length."""
    options, spec = Options.of(node), _spec(name)
    for key in ("depths", "rounds", "haystack"):
        value = getattr(options, key)
        if key not in spec.options and value != getattr(Options, key):
            raise ValueError(f"task.{key}={value}: has no meaning for task {name}, leave it out")
    data_paths(name, length, options)
    if options.ruler_data is None and length < spec.min_length:
        raise ValueError(
            f"length={length}: task {name} needs a length of at least {spec.min_length} tokens"
        )


def data_paths(name: str, length: int, node: Any) -> list[Path]:
    """Files whose content decides the prompts. ValueError if one is missing."""
    options, spec = Options.of(node), _spec(name)
    if options.ruler_data is None:
        return spec.paths(options)
    path = files.find(options.ruler_data, name, length)
    if path is None:
        raise ValueError(
            f"task.ruler_data={options.ruler_data}: no {name}/validation.jsonl and no {name}.jsonl "
            f"for length={length}"
        )
    return [path]


def sample_count(name: str, length: int, node: Any, samples: int) -> int:
    """How many samples to run where the configuration asks for `samples`.

    A data set may have fewer; the niah grid has `rounds` for each depth instead.
    """
    options, spec = Options.of(node), _spec(name)
    if options.ruler_data is not None:
        return min(samples, len(files.Rows(data_paths(name, length, options)[0])))
    return spec.samples(options, samples)


def build(
    name: str,
    tokenizer: Any,
    *,
    length: int,
    seed: int,
    node: Any,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Task:
    """A task of prompts for one tokenizer. ValueError as in `check`."""
    check(name, length, node)
    options, spec = Options.of(node), _spec(name)
    prompt_format = PromptFormat(tokenizer, chat_template_kwargs)
    if options.ruler_data is None:
        return GeneratedTask(spec, prompt_format, length, options, seed)
    rows = files.Rows(data_paths(name, length, options)[0])
    return RecordedTask(spec, prompt_format, length, options, rows)


class Task:
    """Samples of one task at one length, by index."""

    def __init__(self, spec: Spec, prompt_format: PromptFormat, length: int, options: Options):
        self._spec = spec
        self._format = prompt_format
        self._options = options
        self.name = spec.name
        self.length = length
        self.metric = spec.metric
        self.max_new_tokens = spec.max_new_tokens
        self.haystack = options.haystack or spec.haystack

    def sample(self, index: int) -> Sample:
        raise NotImplementedError

    def _sample(
        self, index: int, prompt: Prompt, references: list[str], meta: dict[str, Any]
    ) -> Sample:
        return Sample(
            task=self.name,
            length=self.length,
            index=index,
            input_ids=prompt.ids,
            references=references,
            max_new_tokens=self.max_new_tokens,
            metric=self.metric,
            prompt_hash=hashlib.sha256(",".join(map(str, prompt.ids)).encode()).hexdigest(),
            meta=meta,
        )


class GeneratedTask(Task):
    """Samples drawn by a family of this package."""

    def __init__(
        self,
        spec: Spec,
        prompt_format: PromptFormat,
        length: int,
        options: Options,
        seed: int,
    ):
        super().__init__(spec, prompt_format, length, options)
        self._seed = seed

    def sample(self, index: int) -> Sample:
        """ValueError if the smallest prompt is too long for this tokenizer, or data run out."""
        streams = Streams(self._seed, self.name, self.length, index)
        draft = self._spec.draw(streams, self._options)
        size, prompt = self._fit(draft)
        body = draft.body(size)
        start = len(self._format.head)
        needle_tokens = [prompt.token_at(start + needle) for needle in body.needles]
        return self._sample(
            index,
            prompt,
            draft.references,
            {
                **draft.meta,
                "source": "generated",
                "depth": body.depths[0] if body.depths else None,
                "depths": list(body.depths),
                "needle_token": needle_tokens[0] if needle_tokens else None,
                "needle_tokens": needle_tokens,
                "question_token": prompt.token_at(start + body.question),
            },
        )

    def _fit(self, draft: Draft) -> tuple[int, Prompt]:
        budget = self.length - self.max_new_tokens
        try:
            size, prompt = fit(
                lambda size: self._format.encode(draft.body(size).text, draft.answer_prefix),
                lambda prompt: len(prompt.ids),
                smallest=draft.smallest,
                largest=draft.largest,
                enough=int(FILL * self.length) - self.max_new_tokens,
                budget=budget,
            )
        except TooLong as error:
            raise ValueError(
                f"length={self.length}: task {self.name} needs a length of at least "
                f"{error.tokens + self.max_new_tokens} tokens with this tokenizer"
            ) from None
        filled = len(prompt.ids) + self.max_new_tokens
        if size == draft.largest and filled < 0.95 * self.length:
            raise ValueError(
                f"length={self.length}: the data of task {self.name} fill only {filled} tokens"
            )
        return size, prompt


class RecordedTask(Task):
    """Samples of a file made by RULER's generator; the seed is the generator's."""

    def __init__(
        self,
        spec: Spec,
        prompt_format: PromptFormat,
        length: int,
        options: Options,
        rows: files.Rows,
    ):
        super().__init__(spec, prompt_format, length, options)
        self._rows = rows

    def sample(self, index: int) -> Sample:
        """ValueError if the row is malformed or is not one of this length."""
        row = self._rows[index]
        where = f"{self._rows.path}, row {index}"
        prompt = files.encode(row, self._format, where)
        total = len(prompt.ids) + self.max_new_tokens
        if not self.length / 2 < total <= TOLERANCE * self.length:
            raise ValueError(
                f"length={self.length}: {where} needs {total} tokens; generate the data for this "
                "length with this model's tokenizer"
            )
        question, needles = files.places(prompt, row)
        if "documents" in self.haystack or "words" in self.haystack:
            needles = []  # the answers are everywhere, or mentioned by chance
        needle_tokens = [prompt.token_at(needle) for needle in needles]
        depths = [needle / len(prompt.text) for needle in needles]
        return self._sample(
            index,
            prompt,
            row["outputs"],
            {
                "haystack": self.haystack,
                "source": "ruler_data",
                "depth": depths[0] if depths else None,
                "depths": depths,
                "needle_token": needle_tokens[0] if needle_tokens else None,
                "needle_tokens": needle_tokens,
                "question_token": None if question is None else prompt.token_at(question),
            },
        )


def _spec(name: str) -> Spec:
    known = specs()
    if name not in known:
        raise ValueError(f"task={name}: known are ruler, {', '.join(known)}")
    return known[name]


def _available(name: str, options: Options) -> bool:
    if options.ruler_data is not None:
        return files.exists(options.ruler_data, name)
    try:
        specs()[name].paths(options)
    except ValueError:
        return False
    return True

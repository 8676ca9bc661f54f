"""Common words: a numbered list in which ten words come more often than all others; name them.

One worked example comes first. The answer is everywhere in the context, so that a method which
keeps only a few blocks has to lose something.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

from xsparse.tasks.draft import Body, Draft, Spec, Streams
from xsparse.tasks.haystack import lazily
from xsparse.tasks.options import Options
from xsparse.tasks.words import distinct_words

COMMON = 10
INSTRUCTION = (
    "The numbered list below repeats its words, some of them more often than the others. "
    "Keep in mind which words are repeated most."
)
QUESTION = f"Question: Which {COMMON} words come most often in the list above?"
ANSWER = f" Answer: The {COMMON} words that come most often in the list are:"


def draw(streams: Streams, options: Options) -> Draft:
    short = streams.length < 4096
    common_times, other_times = (6, 1) if short else (30, 3)
    words = distinct_words(streams("words"))

    shown = list(islice(words, 20 if short else 40))
    shown_times = (3, 1) if short else (10, 3)
    shown_list = _numbered(shown[:COMMON], shown[COMMON:], *shown_times, streams("example"))
    example = f"{INSTRUCTION}\n{shown_list}\n{QUESTION}{ANSWER} {_answer(shown[:COMMON])}"

    common = list(islice(words, COMMON))
    others = lazily(words)
    order = streams("order").getrandbits(64)
    head = f"{example}\n\n{INSTRUCTION}\n"

    def body(size: int) -> Body:
        context = _numbered(common, others(size), common_times, other_times, random.Random(order))
        return Body(text=f"{head}{context}\n{QUESTION}", question=len(head) + len(context) + 1)

    return Draft(
        body=body,
        smallest=COMMON // 2,
        answer_prefix=ANSWER,
        references=common,
        meta={"haystack": "words", "common_times": common_times, "other_times": other_times},
    )


def _numbered(
    common: Sequence[str],
    others: Sequence[str],
    common_times: int,
    other_times: int,
    rng: random.Random,
) -> str:
    words = [*common] * common_times + [*others] * other_times
    rng.shuffle(words)
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _answer(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


TASKS = [
    Spec(
        name="cwe",
        draw=draw,
        metric="all",
        max_new_tokens=120,
        min_length=1024,
        haystack="words",
    )
]

"""Haystacks as endless lists of sentences, and how needles are woven into them.

A haystack is a function `take(n)` that gives its first n sentences, each with the white space that
follows it. The first n of a sample never depend on how many were asked for before.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from xsparse.tasks.words import data_lines

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
# RULER draws the places of needles from so many evenly spaced depths.
DEPTH_POINTS = 40


@dataclass(frozen=True)
class Haystack:
    """take(n): first n sentences. `paragraph`: needles go between groups of so many sentences.

    own_line: a needle stands on a line of its own; otherwise it runs on in the prose.
    """

    label: str
    take: Callable[[int], list[str]]
    paragraph: int
    own_line: bool


def noise() -> Haystack:
    """One five-sentence paragraph per line, over and over."""

    def take(n: int) -> list[str]:
        return [NOISE[i % 5] + ("\n" if i % 5 == 4 else " ") for i in range(n)]

    return Haystack("noise", take, paragraph=5, own_line=True)


def essay(rng: random.Random) -> Haystack:
    """Running prose from the frames of data/essay.txt. Not the essays that RULER uses."""
    return Haystack("generated essay", lazily(_sentences(rng)), paragraph=1, own_line=False)


def statements(lines: Iterator[str]) -> Haystack:
    """A haystack of lines that look like needles."""
    return Haystack("needle", lazily(f"{line}\n" for line in lines), paragraph=1, own_line=True)


def lazily(items: Iterator[str]) -> Callable[[int], list[str]]:
    """take(n) over an endless iterator, drawing each item once."""
    drawn: list[str] = []

    def take(n: int) -> list[str]:
        drawn.extend(islice(items, max(0, n - len(drawn))))
        return drawn[:n]

    return take


def draw_depths(rng: random.Random, count: int) -> list[float]:
    """Depths 0..1 without replacement from evenly spaced points, in random order."""
    return [point / (DEPTH_POINTS - 1) for point in rng.sample(range(DEPTH_POINTS), count)]


def weave(
    haystack: Haystack, n: int, needles: Sequence[str], depths: Sequence[float]
) -> tuple[str, tuple[int, ...]]:
    """The first n sentences with needle i at depth i -> text, character offset of each needle.

    Needles go to sentence borders. Needles with the same place keep their order.
    """
    sentences = haystack.take(n)
    places = [_place(depth, n, haystack.paragraph) for depth in depths]
    order = sorted(range(len(needles)), key=lambda i: places[i])
    pieces: list[str] = []
    offsets = [0] * len(needles)
    done = length = 0
    for i in order:
        before = "".join(sentences[done : places[i]])
        done = places[i]
        if haystack.own_line and before.endswith(" "):
            before = before[:-1] + "\n"
        offsets[i] = length + len(before)
        piece = before + needles[i] + ("\n" if haystack.own_line else " ")
        pieces.append(piece)
        length += len(piece)
    pieces.append("".join(sentences[done:]))
    return "".join(pieces).rstrip(), tuple(offsets)


def _place(depth: float, n: int, paragraph: int) -> int:
    if depth >= 1:
        return n
    return min(n, paragraph * round(depth * n / paragraph))


@lru_cache(maxsize=1)
def _topics() -> tuple[tuple[str, ...], ...]:
    """Frames of data/essay.txt by topic."""
    topics: list[list[str]] = [[]]
    for line in data_lines("essay.txt"):
        if line:
            topics[-1].append(line)
        elif topics[-1]:
            topics.append([])
    return tuple(tuple(topic) for topic in topics if topic)


def _sentences(rng: random.Random) -> Iterator[str]:
    """Paragraphs of 4 to 7 sentences, one topic each; no frame returns before its topic is used up.

    All topics are used before one returns, so that a frame comes back after about 150 sentences.
    """
    topics = _topics()
    decks: list[list[str]] = [[] for _ in topics]
    queue: list[int] = []
    while True:
        if not queue:
            queue = rng.sample(range(len(topics)), len(topics))
        topic = queue.pop()
        length = rng.randint(4, 7)
        for i in range(length):
            if not decks[topic]:
                decks[topic] = rng.sample(topics[topic], len(topics[topic]))
            sentence = re.sub(
                r"\[([^\]]+)\]", lambda m: rng.choice(m[1].split("|")), decks[topic].pop()
            )
            yield sentence[0].upper() + sentence[1:] + ("\n" if i == length - 1 else " ")

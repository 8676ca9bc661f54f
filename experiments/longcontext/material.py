"""What training prompts are made of: words, noise and prose, none of it the evaluation's.

Prose has two sources: sentence frames of this project (data/frames.txt) and the language reference
that every Python carries as `pydoc_data.topics` (PSF licence), its code blocks left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files

from experiments.longcontext import wordings
from xsparse.tasks.haystack import Haystack, lazily

_LEAST_TOPICS = 40  # of pydoc_data.topics: fewer means that this Python came without them


@lru_cache(maxsize=1)
def words() -> tuple[str, ...]:
    """data/words.txt, sorted."""
    return tuple(word for line in _lines("words.txt") for word in line.split())


@lru_cache(maxsize=1)
def frames() -> tuple[tuple[str, ...], ...]:
    """data/frames.txt by topic."""
    topics: list[list[str]] = [[]]
    for line in _lines("frames.txt"):
        if line:
            topics[-1].append(line)
        elif topics[-1]:
            topics.append([])
    return tuple(tuple(topic) for topic in topics if topic)


@lru_cache(maxsize=1)
def reference() -> tuple[tuple[str, ...], ...]:
    """Paragraphs of Python's language reference, each its sentences. ValueError if it is absent."""
    from pydoc_data.topics import topics

    if len(topics) < _LEAST_TOPICS:
        raise ValueError("pydoc_data.topics is empty: this Python has no documentation to train on")
    paragraphs = []
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            lines = block.splitlines()
            text = " ".join(line.strip() for line in lines)
            letters = sum(c.isalpha() or c == " " for c in text)
            if len(text) < 80 or letters < 0.9 * len(text) or "::=" in text:
                continue  # headings, grammar, code
            paragraphs.append(tuple(re.split(r"(?<=[.!?])\s+(?=[A-Z\"])", text)))
    return tuple(paragraphs)


def key(rng: random.Random) -> str:
    return f"{rng.choice(words())}-{rng.choice(words())}"


def distinct_words(rng: random.Random) -> Iterator[str]:
    """Every word once in random order, then compounds."""
    yield from rng.sample(words(), len(words()))
    seen: set[str] = set()
    while True:
        compound = key(rng)
        if compound not in seen:
            seen.add(compound)
            yield compound


def noise(rng: random.Random) -> Haystack:
    """One paragraph of 3 to 6 short sentences and a closing phrase, over and over."""
    count = rng.randint(3, 6)
    form = rng.choice(wordings.NOISE_SENTENCES)
    paragraph = [
        form.format(thing=thing, quality=rng.choice(wordings.QUALITIES))
        for thing in rng.sample(wordings.THINGS, count)
    ]
    paragraph += rng.sample(wordings.CLOSINGS, rng.randint(1, 2))
    size = len(paragraph)

    def take(n: int) -> list[str]:
        return [paragraph[i % size] + ("\n" if i % size == size - 1 else " ") for i in range(n)]

    return Haystack("noise", take, paragraph=size, own_line=True)


def prose(rng: random.Random) -> Haystack:
    sentences = _from_frames(rng) if rng.random() < 0.5 else _from_reference(rng)
    return Haystack("prose", lazily(sentences), paragraph=1, own_line=False)


def _from_frames(rng: random.Random) -> Iterator[str]:
    """Paragraphs of 3 to 6 sentences about one topic each."""
    while True:
        topic = rng.choice(frames())
        chosen = rng.sample(topic, min(len(topic), rng.randint(3, 6)))
        for i, frame in enumerate(chosen):
            text = re.sub(r"\[([^\]]+)\]", lambda m: rng.choice(m[1].split("|")), frame)
            yield text[0].upper() + text[1:] + ("\n" if i == len(chosen) - 1 else " ")


def _from_reference(rng: random.Random) -> Iterator[str]:
    """The reference from a random paragraph on, over and over."""
    paragraphs = reference()
    at = rng.randrange(len(paragraphs))
    while True:
        paragraph = paragraphs[at % len(paragraphs)]
        at += 1
        for sentence in paragraph[:-1]:
            yield sentence + " "
        yield paragraph[-1] + "\n"


def _lines(name: str) -> list[str]:
    text = (files("experiments.longcontext") / "data" / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("#")]

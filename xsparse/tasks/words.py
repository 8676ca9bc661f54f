"""Words, keys and values: everything a needle or a word list is made of."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.resources import files


def data_lines(name: str) -> list[str]:
    """Lines of a data file of this package, without comments."""
    text = (files("xsparse.tasks") / "data" / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("#")]


@lru_cache(maxsize=1)
def word_lists() -> dict[str, tuple[str, ...]]:
    """The frozen lists of data/words.txt: adjectives, nouns, verbs; each sorted, no repeats."""
    lists: dict[str, list[str]] = {}
    section = ""
    for line in data_lines("words.txt"):
        if line.startswith("["):
            section = line.strip("[]")
            lists[section] = []
        elif line:
            lists[section].extend(line.split())
    return {name: tuple(words) for name, words in lists.items()}


def distinct_words(rng: random.Random) -> Iterator[str]:
    """Endless distinct words: the frozen ones in random order, then adjective-noun compounds."""
    lists = word_lists()
    single = sorted(set().union(*lists.values()))
    rng.shuffle(single)
    yield from single
    yield from distinct(lambda: word_key(rng))


def word_key(rng: random.Random) -> str:
    lists = word_lists()
    return f"{rng.choice(lists['adjectives'])}-{rng.choice(lists['nouns'])}"


def number(rng: random.Random, digits: int = 7) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def uuid4(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def letters(rng: random.Random, count: int, alphabet: str = string.ascii_lowercase) -> str:
    return "".join(rng.choices(alphabet, k=count))


def distinct(draw: Callable[[], str], taken: set[str] | None = None) -> Iterator[str]:
    """What `draw()` gives, without repeats and without what is `taken`."""
    seen = set(taken or ())
    while True:
        item = draw()
        if item not in seen:
            seen.add(item)
            yield item

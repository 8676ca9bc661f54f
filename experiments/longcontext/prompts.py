"""Training prompts of the eleven generated RULER families, as drafts without a size.

The structure is the evaluation's; words, wordings, noise, prose and seeds are others, and the
numbers of keys, values, hops and answers vary. Where a context holds more than one answer, further
questions follow as turns of the same conversation: the long context then teaches several times.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from experiments.longcontext import material, wordings
from xsparse.tasks.haystack import lazily, statements, weave
from xsparse.tasks.words import distinct, letters, number, uuid4


@dataclass(frozen=True)
class Turn:
    """A question, the answer's beginning (in the assistant's turn), and what is to be learned."""

    question: str
    prefix: str
    answer: str


@dataclass(frozen=True)
class Draft:
    """`message(size)` is the text of the first message before its question; it grows with size."""

    message: Callable[[int], str]
    turns: list[Turn]
    smallest: int = 1


def draw(family: str, rng: random.Random, tokens: int) -> Draft:
    """A prompt of a family that will get about so many tokens."""
    return FAMILIES[family](rng, tokens)


# Retrieval


@dataclass(frozen=True)
class Variant:
    """Ranges (low, high) of how many keys there are, values each has, keys a question asks for."""

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: tuple[int, int] = (1, 3)
    values: tuple[int, int] = (1, 1)
    queries: tuple[int, int] = (1, 1)


def retrieval(variant: Variant, rng: random.Random, tokens: int) -> Draft:
    kind = "words" if variant.value == "numbers" and rng.random() < 0.15 else variant.value
    digits = rng.choice((7, 7, 7, 7, 5, 6, 8, 9))
    draw_value = {
        "numbers": lambda: number(rng, digits),
        "uuids": lambda: uuid4(rng),
        "words": lambda: rng.choice(material.words()),
    }[kind]
    draw_key = {"words": lambda: material.key(rng), "uuids": lambda: uuid4(rng)}[variant.key]
    keys, values = distinct(draw_key), distinct(draw_value)
    adjective, (one, many) = rng.choice(wordings.ADJECTIVES), rng.choice(wordings.NOUNS[kind])
    one, many = f"{adjective} {one}", f"{adjective} {many}"
    form = rng.choice(wordings.NEEDLES)

    def line(key: str, value: str) -> str:
        text = form.format(one=one, many=many, key=key, value=value)
        return text[0].upper() + text[1:] if variant.key == "words" else text

    names = list(islice(keys, rng.randint(*variant.keys)))
    per_key = rng.randint(*variant.values)
    pairs = [(name, next(values)) for name in names for _ in range(per_key)]
    rng.shuffle(pairs)  # now in the order of the text
    depths = sorted(rng.random() for _ in pairs)
    if variant.haystack == "needles":
        haystack = statements(line(next(keys), next(values)) for _ in iter(int, 1))
    else:
        haystack = material.noise(rng) if variant.haystack == "noise" else material.prose(rng)

    instruction = rng.choice(wordings.RETRIEVAL_INSTRUCTIONS)
    head = instruction.format(what=many) + "\n" if instruction else ""

    def turn(asked: Sequence[str]) -> Turn:
        found = [v for name in asked for key, v in pairs if key == name]
        single = len(found) == 1
        fill = {
            "what": one if single else many,
            "keys": _listed(asked, ", "),
            "is_are": "is" if single else "are",
        }
        return Turn(
            rng.choice(wordings.RETRIEVAL_QUESTIONS).format(**fill),
            rng.choice(wordings.RETRIEVAL_PREFIXES).format(**fill),
            f" {_listed(found, rng.choice(wordings.LISTS))}.",
        )

    order = rng.sample(names, len(names))
    turns = []
    while order and len(turns) < 6:
        count = rng.randint(*variant.queries)
        turns.append(turn(order[:count]))
        order = order[count:]
    lines = [line(*pair) for pair in pairs]
    return Draft(lambda size: head + weave(haystack, size, lines, depths)[0] + "\n", turns)


def _listed(items: Sequence[str], comma: str) -> str:
    """Items joined by `comma`, the last by 'and'."""
    return items[0] if len(items) == 1 else f"{comma.join(items[:-1])} and {items[-1]}"


# Variable tracking


def tracking(rng: random.Random, tokens: int) -> Draft:
    width = rng.choice((4, 5, 5, 6))
    names = distinct(lambda: letters(rng, width, string.ascii_uppercase))
    values = distinct(lambda: number(rng, rng.choice((4, 5, 5, 6))))
    first, later = rng.choice(wordings.ASSIGNMENTS)
    question = rng.choice(wordings.TRACKING_QUESTIONS)
    prefix = rng.choice(wordings.TRACKING_PREFIXES)
    instruction = rng.choice(wordings.TRACKING_INSTRUCTIONS)
    haystack = material.noise(rng)
    length = rng.randint(3, 6)

    def chain() -> tuple[list[str], Turn]:
        own, value = list(islice(names, length)), next(values)
        lines = [first.format(a=own[0], value=value)]
        lines += [later.format(a=a, b=b) for b, a in zip(own, own[1:], strict=False)]
        fill = {"value": value, "count": length}
        return lines, Turn(question.format(**fill), prefix.format(**fill), f" {' '.join(own)}")

    shown, answered = chain()
    sentences = 25 if tokens >= 2048 else 5
    example = weave(haystack, sentences, shown, sorted(rng.random() for _ in shown))[0]
    head = (
        f"{instruction}\n{example}\n{answered.question}{answered.prefix}{answered.answer}"
        f"\n\n{instruction}\n"
    )
    chains = [chain() for _ in range(rng.choice((1, 1, 2, 3)))]
    placed = [
        (depth, text)
        for lines, _ in chains
        for depth, text in zip(sorted(rng.random() for _ in lines), lines, strict=True)
    ]
    placed.sort()
    depths, lines = [depth for depth, _ in placed], [text for _, text in placed]
    turns = [turn for _, turn in chains]
    return Draft(lambda size: head + weave(haystack, size, lines, depths)[0] + "\n", turns)


# Frequent words


def common_words(rng: random.Random, tokens: int) -> Draft:
    count = rng.choice((10, 10, 10, 5, 6, 8, 12))
    short = tokens < 4096
    times = rng.randint(5, 8) if short else rng.randint(15, 32)
    others_times = 1 if short else rng.randint(1, 3)
    words = material.distinct_words(rng)
    fill = {"count": rng.choice((count, wordings.NUMBER_WORDS[count]))}
    instruction = rng.choice(wordings.COUNTING_INSTRUCTIONS)
    question = rng.choice(wordings.COUNTING_QUESTIONS).format(**fill)
    prefix = rng.choice(wordings.COUNTING_PREFIXES).format(**fill)
    numbered = rng.random() < 0.7

    def answer(common: Sequence[str]) -> str:
        return f" {_numbered(common)}" if numbered else f" {', '.join(common)}"

    def listed(common: Sequence[str], others: Sequence[str], a: int, b: int, seed: float) -> str:
        items = [*common] * a + [*others] * b
        random.Random(seed).shuffle(items)
        return _numbered(items)

    shown = list(islice(words, 3 * count if short else 4 * count))
    example = listed(shown[:count], shown[count:], *((3, 1) if short else (10, 3)), rng.random())
    head = f"{instruction}\n{example}\n{question}{prefix}{answer(shown[:count])}\n\n{instruction}\n"
    common = list(islice(words, count))
    others, order = lazily(words), rng.random()
    return Draft(
        lambda size: head + listed(common, others(size), times, others_times, order) + "\n",
        # In no order: the next word of an answer is any frequent one that was not named yet.
        [Turn(question, prefix, answer(common))],
        smallest=5,
    )


def _numbered(items: Sequence[str]) -> str:
    return " ".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def coded_words(rng: random.Random, tokens: int) -> Draft:
    alpha = rng.choice((2.0, 2.0, 1.8, 2.2, 2.5))
    width, count = rng.choice((6, 6, 6, 5, 7)), rng.choice((3, 3, 3, 2, 4))
    filler = rng.choice(wordings.FILLERS)
    coded = islice(distinct(lambda: letters(rng, width)), max(count + 2, tokens // 50 - 1))
    ranked = [filler, *coded]
    weights = [rank**-alpha for rank in range(1, len(ranked) + 1)]
    total = math.fsum(weights)
    order = rng.random()
    fill = {"count": rng.choice((count, wordings.NUMBER_WORDS[count])), "filler": filler}
    instruction = rng.choice(wordings.CIPHER_INSTRUCTIONS)

    def message(size: int) -> str:
        words = [
            word
            for word, weight in zip(ranked, weights, strict=True)
            for _ in range(int(size * weight / total))
        ]
        random.Random(order).shuffle(words)
        return f"{instruction}\n{' '.join(words)}\n"

    # The last answer must be more frequent than the next word, by one at least.
    smallest = math.ceil(2 * total / (weights[count] - weights[count + 1]))
    turn = Turn(
        rng.choice(wordings.CIPHER_QUESTIONS).format(**fill),
        rng.choice(wordings.CIPHER_PREFIXES).format(**fill),
        f" {' '.join(ranked[1 : count + 1])}",
    )
    return Draft(message, [turn], smallest)


FAMILIES: dict[str, Callable[[random.Random, int], Draft]] = {
    "niah_single_1": partial(retrieval, Variant("noise")),
    "niah_single_2": partial(retrieval, Variant("prose")),
    "niah_single_3": partial(retrieval, Variant("prose", value="uuids")),
    "niah_multikey_1": partial(retrieval, Variant("prose", keys=(4, 8))),
    "niah_multikey_2": partial(retrieval, Variant("needles", keys=(1, 6))),
    "niah_multikey_3": partial(
        retrieval, Variant("needles", key="uuids", value="uuids", keys=(1, 6))
    ),
    "niah_multivalue": partial(retrieval, Variant("prose", keys=(1, 3), values=(2, 6))),
    "niah_multiquery": partial(retrieval, Variant("prose", keys=(4, 8), queries=(2, 4))),
    "vt": tracking,
    "cwe": common_words,
    "fwe": coded_words,
}

"""Needles in a haystack: RULER's eight retrieval tasks, and the length x depth grid.

A needle gives a value to a key; the question asks for the values of some keys. The variants differ
in the haystack, in the kind of keys and values, and in how many needles only distract.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from xsparse.tasks.draft import Body, Draft, Spec, Streams
from xsparse.tasks.haystack import Haystack, draw_depths, essay, noise, statements, weave
from xsparse.tasks.options import Options
from xsparse.tasks.words import distinct, number, uuid4, word_key

DRAW: dict[str, Callable[[random.Random], str]] = {
    "words": word_key,
    "numbers": number,
    "uuids": uuid4,
}
GRID_DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)


@dataclass(frozen=True)
class Variant:
    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


def needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def draw(variant: Variant, streams: Streams, options: Options) -> Draft:
    """A RULER task: needles at depths drawn without replacement."""
    count = max(variant.keys, variant.queries) * variant.values
    return needles(variant, streams, draw_depths(streams("depths"), count))


def draw_cell(streams: Streams, options: Options) -> Draft:
    """One prompt of the grid: the depths take turns, so that a few samples cover them evenly."""
    percents = options.depths or GRID_DEPTHS
    depth = percents[streams.index % len(percents)] / 100
    return needles(Variant(options.haystack or "essay"), streams, [depth])


def cells(options: Options, samples: int) -> int:
    """A grid has no empty cells: `rounds` prompts for each depth, whatever `samples` is."""
    return options.rounds * len(options.depths or GRID_DEPTHS)


def needles(variant: Variant, streams: Streams, depths: Sequence[float]) -> Draft:
    """The asked keys are the first `queries` keys; their needles are the first of `depths`."""
    rng = streams("needles")
    keys = distinct(lambda: DRAW[variant.key](rng))
    values = distinct(lambda: DRAW[variant.value](rng))
    pairs = [
        (key, next(values))
        for key in [next(keys) for _ in range(max(variant.keys, variant.queries))]
        for _ in range(variant.values)
    ]
    lines = [needle(variant.value, key, value) for key, value in pairs]
    asked = variant.queries * variant.values
    asked_keys = list(dict.fromkeys(key for key, _ in pairs[:asked]))
    haystack = _haystack(variant, streams("haystack"), pairs)

    noun = variant.value.removesuffix("s")
    if asked == 1:
        hidden, it, which, what = f"A special magic {noun} is", "it", "is the", noun
    else:
        hidden, it, which, what = f"Special magic {noun}s are", "them", "are all the", f"{noun}s"
    instruction = (
        f"{hidden} hidden somewhere in the following text. Remember {it} well: a question about "
        f"{it} comes at the end."
    )
    named = f"special magic {what} for {listed(asked_keys)}"
    question = f"What {which} {named} given in the text above?"

    def body(size: int) -> Body:
        context, offsets = weave(haystack, size, lines, depths)
        head = f"{instruction}\n"
        return Body(
            text=f"{head}{context}\n{question}",
            question=len(head) + len(context) + 1,
            needles=tuple(len(head) + offset for offset in offsets[:asked]),
            depths=tuple(depths[:asked]),
        )

    return Draft(
        body=body,
        smallest=1,
        answer_prefix=f" The {named} given in the text above {'is' if asked == 1 else 'are'}",
        references=[value for _, value in pairs[:asked]],
        meta={"haystack": haystack.label, "keys": asked_keys},
    )


def _haystack(variant: Variant, rng: random.Random, pairs: list[tuple[str, str]]) -> Haystack:
    if variant.haystack == "noise":
        return noise()
    if variant.haystack == "essay":
        return essay(rng)
    # Distractors share neither a key nor a value with the needles.
    keys = distinct(lambda: DRAW[variant.key](rng), {key for key, _ in pairs})
    values = distinct(lambda: DRAW[variant.value](rng), {value for _, value in pairs})
    return statements(needle(variant.value, next(keys), next(values)) for _ in iter(int, 1))


def _spec(name: str, min_length: int, variant: Variant) -> Spec:
    return Spec(
        name=name,
        draw=partial(draw, variant),
        metric="all",
        max_new_tokens=128,
        min_length=min_length,
        haystack=variant.haystack,
    )


TASKS = [
    _spec("niah_single_1", 384, Variant("noise")),
    _spec("niah_single_2", 384, Variant("essay")),
    _spec("niah_single_3", 384, Variant("essay", value="uuids")),
    _spec("niah_multikey_1", 384, Variant("essay", keys=4)),
    _spec("niah_multikey_2", 384, Variant("needle")),
    _spec("niah_multikey_3", 512, Variant("needle", key="uuids", value="uuids")),
    _spec("niah_multivalue", 448, Variant("essay", values=4)),
    _spec("niah_multiquery", 448, Variant("essay", keys=4, queries=4)),
    Spec(
        name="niah",
        draw=draw_cell,
        metric="all",
        max_new_tokens=32,
        min_length=256,
        haystack="essay",
        options=frozenset({"depths", "rounds", "haystack"}),
        samples=cells,
    ),
]

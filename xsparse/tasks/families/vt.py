"""Variable tracking: one chain of five variables that hand a value on; name them all.

The statements keep their order and lie scattered in noise. One worked example comes first.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

from xsparse.tasks.draft import Body, Draft, Spec, Streams
from xsparse.tasks.haystack import draw_depths, noise, weave
from xsparse.tasks.options import Options
from xsparse.tasks.words import distinct, letters, number

HOPS = 4
INSTRUCTION = (
    "Variables are assigned somewhere in the following text, some of them from one another. "
    "Follow how a value is handed on."
)


def draw(streams: Streams, options: Options) -> Draft:
    rng = streams("variables")
    names = distinct(lambda: letters(rng, 5, string.ascii_uppercase))
    values = distinct(lambda: number(rng, 5))
    haystack = noise()

    shown, shown_names, shown_value = _chain(names, next(values))
    shown_sentences = 25 if streams.length >= 2048 else 5
    shown_context, _ = weave(haystack, shown_sentences, shown, _depths(streams("example")))
    example = (
        f"{INSTRUCTION}\n{shown_context}\n{_question(shown_value)}"
        f"{_answer(shown_value)} {' '.join(shown_names)}"
    )

    chain, chain_names, value = _chain(names, next(values))
    depths = _depths(streams("depths"))
    question = _question(value)
    head = f"{example}\n\n{INSTRUCTION}\n"

    def body(size: int) -> Body:
        context, offsets = weave(haystack, size, chain, depths)
        return Body(
            text=f"{head}{context}\n{question}",
            question=len(head) + len(context) + 1,
            needles=tuple(len(head) + offset for offset in offsets),
            depths=tuple(depths),
        )

    return Draft(
        body=body,
        smallest=1,
        answer_prefix=_answer(value),
        references=chain_names,
        meta={"haystack": haystack.label},
    )


def _chain(names: Iterator[str], value: str) -> tuple[list[str], list[str], str]:
    """Statements, variables, value."""
    chain = [next(names) for _ in range(HOPS + 1)]
    sources = [value] + [f"VAR {name}" for name in chain[:-1]]
    return [f"VAR {a} = {b}" for a, b in zip(chain, sources, strict=True)], chain, value


def _depths(rng: random.Random) -> list[float]:
    return sorted(draw_depths(rng, HOPS + 1))


def _question(value: str) -> str:
    return f"Question: Which variables in the text above have the value {value}?"


def _answer(value: str) -> str:
    return f" Answer: In the text above, {HOPS + 1} variables have the value {value}. They are:"


TASKS = [
    Spec(
        name="vt",
        draw=draw,
        metric="all",
        max_new_tokens=30,
        min_length=512,
        haystack="noise",
    )
]

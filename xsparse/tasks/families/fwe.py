"""Frequent coded words: words without meaning, as frequent as a zeta law says; name the top three.

The most frequent "word" is dots, which the question says to ignore.
"""

from __future__ import annotations

import math
import random
from itertools import islice

from xsparse.tasks.draft import Body, Draft, Spec, Streams
from xsparse.tasks.options import Options
from xsparse.tasks.words import distinct, letters

DOTS = "..."
# With alpha = 2 the share of rank k is k^-2 / zeta(2).
ZETA_2 = math.pi**2 / 6
# From here on rank 4, the last answer, is more frequent than rank 5.
SMALLEST = 53
INSTRUCTION = (
    "The following text is written in coded words. Count how often each of them comes and find "
    "the three most frequent ones."
)
QUESTION = (
    'Question: Leaving out the dots "...", which three coded words come most often in the text '
    "above? Do not explain."
)


def draw(streams: Streams, options: Options) -> Draft:
    rng = streams("words")
    coded = list(islice(distinct(lambda: letters(rng, 6)), streams.length // 50 - 1))
    ranked = [DOTS, *coded]
    order = streams("order").getrandbits(64)

    def body(size: int) -> Body:
        words = [
            word
            for rank, word in enumerate(ranked, 1)
            for _ in range(int(size / (ZETA_2 * rank * rank)))
        ]
        random.Random(order).shuffle(words)
        context = " ".join(words)
        return Body(
            text=f"{INSTRUCTION}\n{context}\n{QUESTION}",
            question=len(INSTRUCTION) + len(context) + 2,
        )

    return Draft(
        body=body,
        smallest=SMALLEST,
        answer_prefix=" Answer: The three coded words that come most often in the text above are:",
        references=ranked[1:4],
        meta={"haystack": "coded words"},
    )


TASKS = [
    Spec(
        name="fwe",
        draw=draw,
        metric="all",
        max_new_tokens=50,
        min_length=384,
        haystack="coded words",
    )
]

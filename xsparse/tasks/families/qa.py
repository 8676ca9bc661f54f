"""Questions over documents: SQuAD (qa_1) and HotpotQA (qa_2), among documents that do not answer.

The data are files in their original format in `task.qa_data`: squad.json, hotpotqa.json. The order
of the documents is drawn anew for every sample: a fixed place of the gold document would flatter a
method that prefers that place. Filler grows by sentences, so the last distractor may be cut short.
"""

from __future__ import annotations

import bisect
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path

from xsparse.tasks.draft import Body, Draft, Spec, Streams
from xsparse.tasks.options import Options

FILES = {"qa_1": "squad.json", "qa_2": "hotpotqa.json"}
INSTRUCTION = (
    "Answer the question from the documents below. Give only the answer, without any other words."
)


@dataclass(frozen=True)
class Question:
    """gold: documents that answer it; near: others of the same topic, the hardest to tell apart."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True)
class Corpus:
    """documents: each a tuple of sentences, to be joined by nothing."""

    documents: tuple[tuple[str, ...], ...]
    questions: tuple[Question, ...]


def read_squad(data: dict) -> Corpus:
    """SQuAD 1 or 2; questions without an answer are left out."""
    documents: dict[str, int] = {}
    questions: list[Question] = []
    for article in data["data"]:
        ids = [documents.setdefault(p["context"], len(documents)) for p in article["paragraphs"]]
        for own, paragraph in zip(ids, article["paragraphs"], strict=True):
            near = tuple(i for i in dict.fromkeys(ids) if i != own)
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible"):
                    answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                    questions.append(Question(qa["question"], answers, (own,), near))
    return Corpus(tuple(_sentences(text) for text in documents), tuple(questions))


def read_hotpotqa(data: list) -> Corpus:
    """HotpotQA, distractor setting; a document is its title and its sentences."""
    documents: dict[tuple[str, ...], int] = {}
    questions: list[Question] = []
    for row in data:
        supporting = {title for title, _ in row["supporting_facts"]}
        gold, near = [], []
        for title, sentences in row["context"]:
            document = (f"{title}\n", *sentences)
            i = documents.setdefault(document, len(documents))
            (gold if title in supporting else near).append(i)
        questions.append(Question(row["question"], (row["answer"],), tuple(gold), tuple(near)))
    return Corpus(tuple(documents), tuple(questions))


READERS: dict[str, Callable[..., Corpus]] = {"qa_1": read_squad, "qa_2": read_hotpotqa}


@lru_cache(maxsize=2)
def read_corpus(name: str, path: Path) -> Corpus:
    try:
        return READERS[name](json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not in the original format of {name} ({error!r})") from error


def corpus_of(name: str, options: Options) -> Corpus:
    return read_corpus(name, paths(name, options)[0])


def paths(name: str, options: Options) -> list[Path]:
    path = options.qa_data and options.qa_data / FILES[name]
    if path is None or not path.is_file():
        raise ValueError(
            f"task.qa_data={options.qa_data}: {name} needs a folder with {FILES[name]}"
        )
    return [path]


def draw(name: str, streams: Streams, options: Options) -> Draft:
    corpus = corpus_of(name, options)
    # Every length asks the same questions, none of them twice.
    order = list(range(len(corpus.questions)))
    streams.shared("questions").shuffle(order)
    if streams.index >= len(order):
        raise ValueError(f"index={streams.index}: {name} has {len(order)} questions")
    question = corpus.questions[order[streams.index]]

    distractors = _distractors(corpus, question, streams("distractors"))
    ends = list(accumulate(len(corpus.documents[i]) for i in distractors))
    rng = streams("places")
    place = {i: rng.random() for i in (*question.gold, *distractors)}
    head = f"{INSTRUCTION}\n\n"
    tail = f"{INSTRUCTION}\n\nQuestion: {question.text}"

    def body(size: int) -> Body:
        """The gold documents and the first `size` sentences of the distractors."""
        whole = bisect.bisect_right(ends, size)
        chosen = {i: corpus.documents[i] for i in (*question.gold, *distractors[:whole])}
        rest = size - (ends[whole - 1] if whole else 0)
        if rest:
            chosen[distractors[whole]] = corpus.documents[distractors[whole]][:rest]
        pieces = [head]
        offset = len(head)
        needles = []
        for position, i in enumerate(sorted(chosen, key=place.__getitem__), 1):
            if i in question.gold:
                needles.append(offset)
            pieces.append(f"Document {position}:\n{''.join(chosen[i]).strip()}\n\n")
            offset += len(pieces[-1])
        span = max(1, offset - len(head))
        return Body(
            text="".join(pieces) + tail,
            question=offset + tail.index("Question: "),
            needles=tuple(needles),
            depths=tuple((needle - len(head)) / span for needle in needles),
        )

    return Draft(
        body=body,
        smallest=0,
        largest=ends[-1] if ends else 0,
        answer_prefix=" Answer:",
        references=list(question.answers),
        meta={"haystack": "documents"},
    )


def available(name: str, options: Options, samples: int) -> int:
    return min(samples, len(corpus_of(name, options).questions))


def _distractors(corpus: Corpus, question: Question, rng: random.Random) -> list[int]:
    """Documents of the same topic first, then all others, each group in random order."""
    near = list(question.near)
    rng.shuffle(near)
    taken = {*question.gold, *near}
    others = [i for i in range(len(corpus.documents)) if i not in taken]
    rng.shuffle(others)
    return near + others


def _sentences(text: str) -> tuple[str, ...]:
    return tuple(re.split(r"(?<=[.!?] )", text))


TASKS = [
    Spec(
        name=name,
        draw=partial(draw, name),
        metric="part",
        max_new_tokens=32,
        min_length=2048,
        haystack="documents",
        paths=partial(paths, name),
        samples=partial(available, name),
    )
    for name in FILES
]

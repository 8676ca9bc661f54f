"""Training prompts are right, packs are the same wherever they are made, answers are masked."""

import random
import re
from collections import Counter

import numpy as np
import pytest

from experiments.longcontext import packs, prompts
from xsparse.tasks.fit import TooLong


def recipe(**changes):
    phases = (packs.Phase(2, 700, 1000), packs.Phase(2, 1000, 3000))
    mixture = {**dict.fromkeys(prompts.FAMILIES, 1.0), packs.TEXT: 1.0}
    return packs.Recipe(
        **{"seed": 3, "pack_tokens": 3000, "phases": phases, "mixture": mixture} | changes
    )


def draws(family, count=30, tokens=4096, size=400):
    for seed in range(count):
        draft = prompts.draw(family, random.Random(seed), tokens)
        yield draft, draft.message(max(size, draft.smallest))


@pytest.mark.parametrize("family", prompts.FAMILIES)
def test_prompts_grow_and_depend_on_the_seed_alone(family):
    for draft, text in draws(family, count=5):
        assert len(draft.message(draft.smallest + 600)) > len(draft.message(draft.smallest))
        assert text == draft.message(max(400, draft.smallest))
    again = [text for _, text in draws(family, count=5)]
    assert again == [text for _, text in draws(family, count=5)]
    assert len(set(again)) == 5


@pytest.mark.parametrize("family", [name for name in prompts.FAMILIES if name.startswith("niah")])
def test_answers_stand_in_a_line_with_their_key(family):
    turns = set()
    for draft, text in draws(family):
        turns.add(len(draft.turns))
        for turn in draft.turns:
            values = re.findall(r"[\w-]+", turn.answer.replace(" and ", " "))
            keys = re.findall(r"[0-9a-f]{8}-[-0-9a-f]{27}|[a-z]+-[a-z]+", turn.question)
            assert values
            for value in values:
                # the only sentence with the value names a key that was asked for
                [sentence] = [
                    s
                    for s in re.split(r"\n|(?<=[.!?]) ", text)
                    if value in re.findall(r"[\w-]+", s)
                ] or [""]
                assert any(key in sentence.lower() for key in keys), (turn, sentence)
    assert family == "niah_single_1" or len(turns) > 1


def test_chains_lead_to_their_value():
    for draft, text in draws("vt"):
        for turn in draft.turns:
            names = turn.answer.split()
            [value] = set(re.findall(r"\d{4,6}", turn.question))
            lines = [line for line in text.splitlines() if re.search(rf"\b{names[0]}\b", line)]
            assert value in lines[0]
            places = []
            for before, name in zip(names, names[1:], strict=False):
                [line] = [
                    x for x in text.splitlines() if {before, name} <= set(re.findall(r"\w+", x))
                ]
                places.append(text.index(line))
            assert places == sorted(places)


def test_common_words_are_the_most_common():
    for draft, text in draws("cwe", size=60):
        [turn] = draft.turns
        answer = re.findall(r"[a-z-]+", turn.answer)
        listed = Counter(re.findall(r"\d+\. ([a-z-]+)", text.split("\n\n")[1]))
        assert {word for word, _ in listed.most_common(len(answer))} == set(answer)
        counts = [count for _, count in listed.most_common(len(answer) + 1)]
        assert counts[-1] < counts[-2]
        example = text.split("\n\n")[0]
        assert not set(answer) & set(re.findall(r"[a-z-]+", example))


def test_coded_words_are_the_most_frequent_in_order():
    for draft, text in draws("fwe", size=1):
        [turn] = draft.turns
        answer = turn.answer.split()
        context = text.splitlines()[1].split()
        counted = [word for word, _ in Counter(context).most_common(len(answer) + 2)]
        assert counted[1 : len(answer) + 1] == answer
        counts = [count for _, count in Counter(context).most_common(len(answer) + 2)]
        assert counts[-1] < counts[-2]


@pytest.mark.parametrize("family", prompts.FAMILIES)
def test_what_is_learned_is_the_answer(family, frame):
    tokens = 16000
    eos = frame.tokenizer.eos_token
    for seed in range(4):
        document = packs.prompt_document(family, frame, random.Random(seed), tokens)
        draft = prompts.draw(family, random.Random(seed), tokens)
        assert 0.85 * tokens < len(document.ids) <= tokens
        learned = frame.tokenizer.decode(document.ids[document.learned])
        answers = learned.split(eos)[:-1]
        assert answers == [turn.answer for turn in draft.turns[: len(answers)]]
        text = frame.tokenizer.decode(document.ids)
        first = draft.turns[0]
        # as the evaluation assembles it: head, body, tail, answer prefix
        assert first.question + frame.format.tail + first.prefix + first.answer + eos in text
        assert text.startswith(frame.format.head)
        assert not document.learned[0]


def test_a_prompt_that_cannot_be_that_short(frame):
    with pytest.raises(TooLong):
        packs.prompt_document("vt", frame, random.Random(0), 200)


def test_text_has_exactly_its_tokens_and_all_are_learned(frame):
    document = packs.text_document(frame, random.Random(0), 777)
    assert document.ids.shape == document.learned.shape == (777,)
    assert document.learned.sum() == 776


def test_packs_are_full_and_repeatable(frame):
    made = [packs.pack(recipe(), frame, step, index) for step in range(4) for index in range(2)]
    again = [packs.pack(recipe(), frame, step, index) for step in range(4) for index in range(2)]
    for one, two in zip(made, again, strict=True):
        assert one.ids.shape == one.learned.shape == (3000,)
        assert sum(one.lengths) == 3000
        assert np.array_equal(one.ids, two.ids)
        assert np.array_equal(one.learned, two.learned)
        starts = np.cumsum([0, *one.lengths[:-1]])
        assert not one.learned[starts].any()
    assert len({pack.ids.tobytes() for pack in made}) == 8
    other = packs.pack(recipe(seed=4), frame, 0, 0)
    assert not np.array_equal(other.ids, made[0].ids)
    assert all(max(pack.lengths) <= 1000 for pack in made[:4])  # the first phase


def test_worker_processes_make_the_same_packs_in_order(base):
    with_workers = packs.Packs(recipe(), str(base), accumulate=2, workers=1)
    alone = packs.Packs(recipe(), str(base), accumulate=2, workers=0)
    try:
        for first in (0, 2):
            made, expected = list(with_workers.steps(first)), list(alone.steps(first))
            assert [len(batch) for batch in made] == [2] * (4 - first)
            for a, b in zip(sum(made, []), sum(expected, []), strict=True):
                assert np.array_equal(a.ids, b.ids)
    finally:
        with_workers.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": {"niah": 1.0}}, "mixture.niah: known are"),
        ({"mixture": {"vt": 0.0}}, "mixture: needs a weight above 0"),
        ({"phases": (packs.Phase(1, 10, 3001),)}, "10 to 3001 tokens, allowed is"),
    ],
)
def test_bad_recipes(changes, message):
    with pytest.raises(ValueError, match=message):
        recipe(**changes)

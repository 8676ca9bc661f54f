"""Training prompts share no words, sentences, wordings or seeds with the evaluation's."""

import re
import string
from itertools import islice, product

import pytest

from experiments.longcontext import material, packs, prompts, wordings
from xsparse.tasks import haystack
from xsparse.tasks.draft import Streams, _generator
from xsparse.tasks.families import RULER, specs
from xsparse.tasks.families.niah import needle
from xsparse.tasks.options import Options
from xsparse.tasks.words import data_lines, word_lists

GENERATED = [name for name in RULER if not name.startswith("qa")]
EVALUATION = set().union(*map(set, word_lists().values()))


def test_words():
    assert len(material.words()) > 5000
    assert not set(material.words()) & EVALUATION


def test_noise_sentences():
    own = {
        form.format(thing=thing, quality=quality)
        for form, thing, quality in product(
            wordings.NOISE_SENTENCES, wordings.THINGS, wordings.QUALITIES
        )
    } | set(wordings.CLOSINGS)
    assert not {s.lower() for s in own} & {s.lower() for s in haystack.NOISE}


def test_prose():
    frames = {frame for topic in material.frames() for frame in topic}
    assert len(frames) >= 40
    assert not frames & set(data_lines("essay.txt"))

    import random

    own = {s.strip() for seed in range(20) for s in material.prose(random.Random(seed)).take(500)}
    theirs = {
        s.strip() for seed in range(20) for s in haystack.essay(random.Random(seed)).take(500)
    }
    assert len(theirs) > 1000
    assert not own & theirs


FIELDS = {"is_are": "(is|are)", "keys": r"[\w-]+(, [\w-]+)*( and [\w-]+)?", "what": ".+"}


def pattern(template):
    """What a template can become, as a regular expression."""
    return "".join(
        re.escape(text) + (FIELDS.get(field, r"\S+") if field is not None else "")
        for text, field, _, _ in string.Formatter().parse(template)
    )


# What the evaluation says, by what it is said for.
def said_by_the_evaluation():
    found = {"instruction": set(), "question": set(), "prefix": set()}
    for name in GENERATED:
        for index in range(3):
            draft = specs()[name].draw(Streams(0, name, 4096, index), Options(name))
            body = draft.body(max(draft.smallest, 60))
            found["instruction"].add(body.text.partition("\n")[0])
            found["question"].add(body.text[body.question :])
            found["prefix"].add(draft.answer_prefix)
    return found


WORDINGS = {
    "instruction": (
        wordings.RETRIEVAL_INSTRUCTIONS,
        wordings.TRACKING_INSTRUCTIONS,
        wordings.COUNTING_INSTRUCTIONS,
        wordings.CIPHER_INSTRUCTIONS,
    ),
    "question": (
        wordings.RETRIEVAL_QUESTIONS,
        wordings.TRACKING_QUESTIONS,
        wordings.COUNTING_QUESTIONS,
        wordings.CIPHER_QUESTIONS,
    ),
    "prefix": (
        wordings.RETRIEVAL_PREFIXES,
        wordings.TRACKING_PREFIXES,
        wordings.COUNTING_PREFIXES,
        wordings.CIPHER_PREFIXES,
    ),
}


@pytest.mark.parametrize("part", WORDINGS)
def test_wordings(part):
    said = said_by_the_evaluation()[part]
    assert len(said) >= 5
    for group in WORDINGS[part]:
        assert len(set(group)) >= 8
        for template, text in product(group, said):
            assert not re.fullmatch(pattern(template.strip()), text.strip()), (template, text)


def test_needles_and_statements():
    assert len(set(wordings.NEEDLES)) >= 8
    for template, kind in product(wordings.NEEDLES, ("numbers", "uuids", "words")):
        assert not re.fullmatch(pattern(template), needle(kind, "a-b", "7"))
    assert len(set(wordings.ASSIGNMENTS)) >= 8
    for pair in wordings.ASSIGNMENTS:
        for template in pair:
            for text in ("VAR ABCDE = 12345", "VAR ABCDE = VAR FGHIJ"):
                assert not re.fullmatch(pattern(template), text)
    assert len(set(wordings.FILLERS)) >= 8
    assert "..." not in wordings.FILLERS


def test_seeds():
    """No generator of a training prompt is one of the evaluation's, and no name of a task is."""
    theirs = {
        Streams(seed, name, length, index)(purpose).getstate()
        for seed, name, length, index, purpose in product(
            range(2), GENERATED, (4096, 65536), range(20), ("needles", "words", "variables")
        )
    }
    own = {
        state
        for seed, step, index in product((0, 20261), range(300), range(2))
        for state in [packs.generator(seed, step, index).getstate()]
    }
    assert len(own) == 1200
    assert not own & theirs
    # Even with the evaluation's seed: what is hashed never has the same form.
    assert packs.generator(0, 1, 2).getstate() != _generator(0, 1, 2).getstate()


@pytest.mark.parametrize("family", prompts.FAMILIES)
def test_no_answer_of_the_evaluation_is_trained(family):
    """Keys and answers, except numbers: both sides draw them from the same few millions."""
    import random

    theirs = set()
    for index in range(40):
        draft = specs()[family].draw(Streams(0, family, 4096, index), Options(family))
        theirs |= {*draft.references, *draft.meta.get("keys", [])}
    theirs = {item for item in theirs if not item.isdigit()}
    own = {
        turn.answer + (turn.question if "niah" in family else "")
        for seed in range(40)
        for turn in prompts.draw(family, random.Random(seed), 4096).turns
    }
    text = " ".join(own)
    words = set(re.findall(r"[\w-]+", text))
    assert not words & theirs, words & theirs


def test_distinct_words_are_distinct():
    import random

    words = list(islice(material.distinct_words(random.Random(0)), 7000))
    assert len(set(words)) == 7000
    assert not {part for word in words for part in word.split("-")} & EVALUATION

"""Every generated task: budget, assembly, answers, seeds, and no hang at any length."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

import pytest

from xsparse import tasks
from xsparse.tasks.families import specs

GENERATED = [name for name in specs() if not name.startswith("qa_")]
# Tasks whose filler is too coarse for 95 % at 512 tokens: a UUID needle has about 90 tokens.
COARSE = {("niah_multikey_3", 512)}


def make(name, tokenizer, length=2048, index=0, seed=0, **node):
    task = tasks.build(name, tokenizer, length=length, seed=seed, node={"name": name, **node})
    return task.sample(index)


def context_of(sample, tokenizer):
    return tokenizer.decode(sample.input_ids)


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 16384])
@pytest.mark.parametrize("name", GENERATED)
def test_budget_is_used_or_the_minimum_is_named(name, length, llama):
    for index in range(3):
        try:
            sample = make(name, llama, length, index)
        except ValueError as error:
            assert length < 2048
            least = re.search(rf"length={length}: .*at least (\d+) tokens", str(error))
            assert least is not None
            assert length < int(least[1]) <= 2048
            return
        filled = len(sample.input_ids) + sample.max_new_tokens
        assert filled <= length
        if (name, length) not in COARSE:
            assert filled >= 0.95 * length


@pytest.mark.parametrize("name", GENERATED)
def test_least_length_works(name, llama):
    make(name, llama, specs()[name].min_length)
    with pytest.raises(ValueError, match="length=100: .*at least"):
        tasks.check(name, 100, {"name": name})


def test_minimum_depends_on_the_tokenizer(llama):
    """A tokenizer with more tokens per word passes check and is refused with its own number."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = {chr(i): i for i in range(128)}
    raw = Tokenizer(models.WordLevel(characters, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?")
    with pytest.raises(ValueError, match=r"length=512: .* at least (\d+) tokens with this"):
        make("niah_multiquery", tokenizer, 512)


@pytest.mark.parametrize("name", GENERATED)
def test_prompt_ends_with_the_answer_prefix_in_the_assistant_turn(name, tokenizer):
    sample = make(name, tokenizer)
    text = context_of(sample, tokenizer)
    header = (
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        if tokenizer.bos_token
        else "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    before, found, prefix = text.rpartition(header)
    assert found
    assert re.fullmatch(r" \S.*\S", prefix)  # leading space kept, nothing trailing
    assert "<|eot_id|>" in before or "<|im_end|>" in before
    if name.startswith("niah"):
        several = name in ("niah_multivalue", "niah_multiquery")
        assert prefix.endswith(" are" if several else " is")
        assert ("numbers for" in prefix) == several


@pytest.mark.parametrize("name", GENERATED)
def test_exactly_one_bos(name, llama):
    ids = make(name, llama).input_ids
    assert ids[0] == llama.bos_token_id
    assert ids.count(llama.bos_token_id) == 1


def test_no_bos_where_the_tokenizer_has_none(qwen):
    ids = make("vt", qwen).input_ids
    assert ids[0] == qwen.convert_tokens_to_ids("<|im_start|>")


def test_prompt_does_not_depend_on_the_day(qwen):
    assert "Today is 26 July 2024." in context_of(make("vt", qwen), qwen)


def test_base_model_gets_body_and_prefix(llama):
    base = type(llama)(tokenizer_object=llama.backend_tokenizer, bos_token="<|begin_of_text|>")
    text = base.decode(make("niah_single_1", base).input_ids)
    assert re.match(r"<\|begin_of_text\|>A special magic number", text)
    assert re.search(r"given in the text above\? The special magic number .* is$", text)


@pytest.mark.parametrize("name", GENERATED)
def test_samples_are_reproducible_and_distinct(name, llama):
    node = {"name": name}
    task = tasks.build(name, llama, length=1024, seed=0, node=node)
    three = [task.sample(i) for i in (2, 0, 1)]
    again = tasks.build(name, llama, length=1024, seed=0, node=node).sample(1)
    assert again == three[2]
    others = [make(name, llama, 1024, 1, seed=1), make(name, llama, 1100, 1)]
    hashes = {s.prompt_hash for s in [*three, *others]}
    assert len(hashes) == 5
    text = ",".join(map(str, again.input_ids))
    assert again.prompt_hash == hashlib.sha256(text.encode()).hexdigest()
    assert json.loads(json.dumps(again.meta)) == again.meta


def test_a_prompt_stays_the_same():
    """Other wording, lists or draws are another benchmark: change them knowingly."""
    from xsparse.tasks.draft import Streams
    from xsparse.tasks.options import Options

    digest = hashlib.sha256()
    for name in GENERATED:
        spec = specs()[name]
        draft = spec.draw(Streams(0, name, 4096, 0), Options(name))
        digest.update((draft.body(60).text + draft.answer_prefix).encode())
    assert digest.hexdigest()[:16] == "a7027dae7a5171bd"


@pytest.mark.parametrize(
    ("name", "asked", "needles"),
    [
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 1, 4),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_needles(name, asked, needles, llama):
    sample = make(name, llama, 4096, 3)
    text = context_of(sample, llama)
    stated = re.findall(r"One of the special magic (\w+) for ([\w-]+) is: ([\w-]+)\.", text)
    assert len(stated) == needles
    assert len(sample.references) == len(set(sample.references)) == asked
    keys = sample.meta["keys"]
    assert [v for key in keys for _, k, v in stated if k == key] == sample.references or asked > 1
    assert {v for _, k, v in stated if k in keys} == set(sample.references)
    for value in sample.references:
        if name == "niah_single_3":
            assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){2}-[89ab][0-9a-f]{3}-\w{12}", value)
        else:
            assert re.fullmatch(r"[1-9]\d{6}", value)
    question = text[text.rindex("\nWhat ") :]
    assert all(key in question for key in keys)


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_haystack_of_needles(name, llama):
    sample = make(name, llama, 8192)
    stated = re.findall(
        r"^One of the special magic \w+ for ([\w-]+) is: ([\w-]+)\.$",
        context_of(sample, llama),
        re.MULTILINE,
    )
    assert len(stated) > 30
    assert len({k for k, _ in stated}) == len({v for _, v in stated}) == len(stated)
    assert dict(stated)[sample.meta["keys"][0]] == sample.references[0]


@pytest.mark.parametrize("name", [n for n in GENERATED if n.startswith("niah") or n == "vt"])
def test_recorded_positions_are_those_of_the_tokens(name, tokenizer):
    sample = make(name, tokenizer, 2048, 5)
    assert len(sample.meta["needle_tokens"]) == len(sample.references)
    for token, reference in zip(sample.meta["needle_tokens"], sample.references, strict=True):
        tail = tokenizer.decode(sample.input_ids[token : token + 120])
        start = "VAR" if name == "vt" else "One of the special magic"
        assert tail.lstrip().startswith(start)
        assert reference in tail
    assert sample.meta["needle_token"] == sample.meta["needle_tokens"][0]
    question = tokenizer.decode(sample.input_ids[sample.meta["question_token"] :]).lstrip()
    assert question.startswith("Question: Which" if name == "vt" else "What ")


@pytest.mark.parametrize("name", ["cwe", "fwe"])
def test_question_position_of_aggregation_tasks(name, tokenizer):
    sample = make(name, tokenizer)
    question = tokenizer.decode(sample.input_ids[sample.meta["question_token"] :])
    assert question.startswith("Question:")
    assert sample.meta["needle_token"] is None


def test_vt_chain(llama):
    sample = make("vt", llama, 4096, 2)
    body = context_of(sample, llama).split("\n\nVariables are assigned")[-1]
    statements = re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", body, re.MULTILINE)
    assert [name for name, _ in statements] == sample.references
    assert [source for _, source in statements][1:] == sample.references[:-1]
    value = statements[0][1]
    assert re.fullmatch(r"\d{5}", value)
    assert f"have the value {value}. They are:" in body
    assert sample.max_new_tokens == 30


@pytest.mark.parametrize(
    ("length", "times", "shown_words", "shown_times"),
    [(2048, (6, 1), 20, (3, 1)), (4096, (30, 3), 40, (10, 3)), (16384, (30, 3), 40, (10, 3))],
)
def test_cwe_counts(length, times, shown_words, shown_times, llama):
    sample = make("cwe", llama, length, 1)
    lists = [
        re.findall(r"(\d+)\. ([a-z-]+)", line)
        for line in context_of(sample, llama).splitlines()
        if line.startswith("1. ")
    ]
    assert len(lists) == 2
    for numbered, counts in zip(lists, (shown_times, times), strict=True):
        assert [int(i) for i, _ in numbered] == list(range(1, len(numbered) + 1))
        common = Counter(word for _, word in numbered)
        assert sorted(set(common.values()), reverse=True) == list(counts)
        assert sum(n == counts[0] for n in common.values()) == 10
    assert len({w for _, w in lists[0]}) == shown_words
    common = Counter(word for _, word in lists[1])
    assert {w for w, n in common.items() if n == times[0]} == set(sample.references)
    assert not {w for _, w in lists[0]} & {w for _, w in lists[1]}


@pytest.mark.parametrize("length", [512, 2048, 16384])
def test_fwe_counts(length, llama):
    for index in range(3):
        sample = make("fwe", llama, length, index)
        coded = context_of(sample, llama).split("frequent ones.\n")[1].split("\nQuestion")[0]
        counts = Counter(coded.split(" "))
        top = counts.most_common(5)
        assert top[0][0] == "..."
        assert [word for word, _ in top[1:4]] == sample.references
        assert top[3][1] > top[4][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word in counts if word != "...")
        # a zeta law with alpha 2: rank 2 comes a quarter as often as rank 1
        assert top[1][1] == pytest.approx(top[0][1] / 4, abs=1)


def test_cwe_has_words_enough_for_a_million_tokens():
    import random
    from itertools import islice

    from xsparse.tasks.words import distinct_words, word_lists

    lists = word_lists()
    assert len(lists["adjectives"]) >= 400
    assert len(lists["nouns"]) >= 800
    words = list(islice(distinct_words(random.Random(0)), 40_000))
    assert len(set(words)) == 40_000


@pytest.mark.parametrize("haystack", ["essay", "noise"])
def test_grid_visits_all_depths(haystack, llama):
    depths = [0, 30, 50, 100]
    samples = [make("niah", llama, 2048, i, depths=depths, haystack=haystack) for i in range(8)]
    assert [s.meta["depth"] for s in samples] == [0, 0.3, 0.5, 1] * 2
    assert len({s.references[0] for s in samples}) == 8
    for sample in samples:
        first = make("niah", llama, 2048, 0, depths=[0], haystack=haystack).meta["needle_token"]
        span = sample.meta["question_token"] - first
        place = (sample.meta["needle_token"] - first) / span
        assert place == pytest.approx(sample.meta["depth"], abs=0.04)
        assert sample.meta["haystack"] in ("noise", "generated essay")
    # depth 100 is right before the question
    tail = llama.decode(samples[3].input_ids[samples[3].meta["needle_token"] :])
    assert re.match(r" ?One of the special magic numbers for \S+ is: \d+\.\nWhat is", tail)


def test_needles_stand_at_sentence_borders(llama):
    for index in range(10):
        for name in ("niah_multikey_1", "niah_single_1"):
            text = context_of(make(name, llama, 1024, index), llama)
            for match in re.finditer("One of the special magic", text):
                assert re.search(r"[.?]\s$|end\.\n$", text[: match.start()])


def test_depths_vary_between_samples(llama):
    depths = {make("niah_single_2", llama, 1024, i).meta["depth"] for i in range(12)}
    assert len(depths) > 6


def test_prose_does_not_repeat_itself_soon():
    import random

    from xsparse.tasks.haystack import essay

    for seed in range(5):
        sentences = [s.strip() for s in essay(random.Random(seed)).take(140)]
        assert len(set(sentences)) == 140
        assert not any("[" in s or "|" in s for s in sentences)
        assert all(s[0].isupper() or s[0].isdigit() for s in sentences)
        assert all(s.endswith(".") for s in sentences)


def test_haystack_is_a_prefix_of_a_longer_one():
    import random

    from xsparse.tasks.haystack import essay

    long_first, short_first = essay(random.Random(1)), essay(random.Random(1))
    long = long_first.take(500)
    assert short_first.take(20) == long[:20]
    assert short_first.take(500) == long

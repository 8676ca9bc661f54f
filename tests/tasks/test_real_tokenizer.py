"""The default model's own tokenizer, where it is already in the cache; and the command line."""

from __future__ import annotations

import time

import pytest

from xsparse import tasks
from xsparse.tasks.__main__ import main
from xsparse.tasks.families import specs


@pytest.fixture(scope="module")
def folder():
    """The converted folder of the default model."""
    from xsparse.models import cache_dir

    found = sorted(cache_dir().rglob("tokenizer.json"))
    if not found:
        pytest.skip("the default model is not in the cache")
    return found[0].parent


@pytest.fixture(scope="module")
def smollm(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", [n for n in specs() if not n.startswith("qa_")])
def test_all_tasks(name, smollm):
    for length in (specs()[name].min_length, 2048, 4096):
        task = tasks.build(name, smollm, length=length, seed=0, node={"name": name})
        for index in range(3):
            sample = task.sample(index)
            filled = len(sample.input_ids) + sample.max_new_tokens
            assert filled <= length
            assert length < 1024 or filled >= 0.95 * length
            # <|im_start|> is this tokenizer's BOS and opens every turn: three turns, none doubled
            assert sample.input_ids.count(smollm.bos_token_id) == 3
            answer = smollm(" ".join(sample.references))["input_ids"]
            assert len(answer) <= sample.max_new_tokens


def test_a_long_prompt_takes_about_a_second(smollm):
    task = tasks.build("niah_single_2", smollm, length=131072, seed=0, node={"name": "x"})
    task.sample(0)
    best_s = 1e9
    for index in (1, 2, 3):
        begin_s = time.perf_counter()
        sample = task.sample(index)
        best_s = min(best_s, time.perf_counter() - begin_s)
    assert len(sample.input_ids) > 0.95 * 131072
    assert best_s < 5  # about 0.6 s on two idle cores


def test_show(folder, capsys):
    arguments = ["show", "task=niah_multikey_2", "length=1024", "index=2", f"tokenizer={folder}"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "<|im_start|>assistant\n The special magic number for" in out
    for field in ("answers", "hash", "needle_token", "of 1024"):
        assert field in out


def test_list(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(specs())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "needs task=NAME and length"),
        (["show", "task=nope", "length=1024"], "task=nope: known are"),
        (["show", "task=cwe", "length=256"], "length=256: task cwe needs"),
        (["show", "task=ruler", "length=4096"], "show one of"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err

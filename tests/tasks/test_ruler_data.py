"""Files in the format of RULER's generator: bare, with this model's template, with another's."""

from __future__ import annotations

import json

import pytest

from xsparse import tasks

BODY = (
    "Some text comes first.\n" + "The grass is green. The sky is blue.\n" * 60
    + "One of the special magic numbers for odd-lamp is: 4455667.\n"
    + "The grass is green. The sky is blue.\n" * 20
    + "What is the special magic number for odd-lamp mentioned in the provided text?"
)  # fmt: skip
PREFIX = " The special magic number for odd-lamp mentioned in the provided text is"


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def row(**change):
    return {
        "index": 0,
        "input": BODY,
        "outputs": ["4455667"],
        "length": 1000,
        "answer_prefix": PREFIX,
        **change,
    }


def sample(tmp_path, tokenizer, *rows, length=1300, index=0):
    write(tmp_path / "niah_single_1" / "validation.jsonl", *rows)
    node = {"name": "niah_single_1", "ruler_data": str(tmp_path)}
    task = tasks.build("niah_single_1", tokenizer, length=length, seed=0, node=node)
    return task.sample(index)


def test_bare_input_is_put_into_the_chat_template(tmp_path, tokenizer):
    made = sample(tmp_path, tokenizer, row())
    text = tokenizer.decode(made.input_ids)
    assert BODY in text
    assert text.endswith(PREFIX)
    assert "assistant" in text[text.index(BODY) + len(BODY) : -len(PREFIX)]
    assert made.references == ["4455667"]
    assert made.meta["source"] == "ruler_data"
    needle = tokenizer.decode(made.input_ids[made.meta["needle_token"] :])
    assert needle.lstrip().startswith("4")
    question = tokenizer.decode(made.input_ids[made.meta["question_token"] :])
    assert question.startswith("What is the special magic")


def test_input_with_this_template_is_used_as_it_is(tmp_path, llama):
    head = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
    tail = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    made = sample(tmp_path, llama, row(input=head + BODY + tail))
    assert llama.decode(made.input_ids) == head + BODY + tail + PREFIX
    assert made.input_ids == sample(tmp_path, llama, row()).input_ids
    assert made.input_ids.count(llama.bos_token_id) == 1


def test_another_models_template_is_refused(tmp_path, llama, qwen):
    text = f"<|im_start|>user\n{BODY}<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match=r"row 0: input holds <\|im_"):
        sample(tmp_path, llama, row(input=text))
    sample(tmp_path, qwen, row(input=text))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer_prefix": ""}, "no answer_prefix"),
        ({"outputs": []}, "needs 'outputs', a list"),
        ({"input": None}, "needs 'input', a str"),
    ],
)
def test_malformed_rows(tmp_path, llama, change, message):
    with pytest.raises(ValueError, match=message):
        sample(tmp_path, llama, row(), row(**change), index=1)


@pytest.mark.parametrize("length", [700, 4096])
def test_rows_of_another_length_are_refused(tmp_path, llama, length):
    with pytest.raises(ValueError, match=f"length={length}: .* row 0 needs"):
        sample(tmp_path, llama, row(), length=length)


def test_folders_by_length(tmp_path, llama):
    write(tmp_path / "1300" / "data" / "vt" / "validation.jsonl", row(), row(index=1))
    write(tmp_path / "fwe.jsonl", row())
    node = {"name": "ruler", "ruler_data": str(tmp_path)}
    assert tasks.names(node) == ["vt", "fwe"]
    tasks.check("vt", 1300, node)
    tasks.check("fwe", 1300, node)
    with pytest.raises(ValueError, match="no vt/validation.jsonl .* for length=2600"):
        tasks.check("vt", 2600, node)
    assert tasks.sample_count("vt", 1300, node, 500) == 2
    assert tasks.data_paths("fwe", 1300, node) == [tmp_path / "fwe.jsonl"]
    task = tasks.build("vt", llama, length=1300, seed=0, node=node)
    with pytest.raises(ValueError, match="index=2: .* has 2 rows"):
        task.sample(2)


def test_no_file_at_all(tmp_path):
    with pytest.raises(ValueError, match="holds no file of a RULER task"):
        tasks.names({"name": "ruler", "ruler_data": str(tmp_path)})

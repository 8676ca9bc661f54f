"""qa_1 and qa_2 over small files in the original formats."""

from __future__ import annotations

import json
import random
import re

import pytest

from xsparse import tasks


def sentences(rng, count):
    words = ["river", "stone", "window", "paper", "garden", "silver", "engine", "morning"]
    return [" ".join(rng.choices(words, k=9)).capitalize() + ". " for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qa")
    rng = random.Random(0)
    articles = []
    for a in range(6):
        paragraphs = []
        for p in range(8):
            fact = f"The emblem of club {a}-{p} is animal{a}{p}. "
            context = "".join([*sentences(rng, 4), fact, *sentences(rng, 3)]).strip()
            answer = {"text": f"animal{a}{p}", "answer_start": context.index("animal")}
            qas = [
                {"question": f"What is the emblem of club {a}-{p}?", "id": f"{a}{p}",
                 "answers": [answer, answer, {**answer, "text": f"Animal{a}{p}"}],
                 "is_impossible": False},
                {"question": "Unanswerable?", "id": f"x{a}{p}", "answers": [],
                 "is_impossible": True},
            ]  # fmt: skip
            paragraphs.append({"context": context, "qas": qas})
        articles.append({"title": f"article {a}", "paragraphs": paragraphs})
    (folder / "squad.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    rows = []
    for i in range(12):
        context = [[f"Title {i}-{j}", sentences(rng, 6)] for j in range(10)]
        context[3][1][2] = f"Clue one of case {i}. "
        context[7][1][0] = f"Clue two says answer{i}. "
        rows.append(
            {
                "_id": str(i),
                "question": f"Who did case {i}?",
                "answer": f"answer{i}",
                "supporting_facts": [[f"Title {i}-3", 2], [f"Title {i}-7", 0]],
                "context": context,
                "type": "bridge",
                "level": "hard",
            }
        )
    (folder / "hotpotqa.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture
def node(folder):
    return {"name": "ruler", "qa_data": str(folder)}


def test_names_include_what_the_folder_has(node, folder, tmp_path):
    assert tasks.names(node)[-2:] == ["qa_1", "qa_2"]
    (tmp_path / "squad.json").write_bytes((folder / "squad.json").read_bytes())
    assert tasks.names({"name": "ruler", "qa_data": str(tmp_path)})[-1] == "qa_1"
    assert tasks.data_paths("qa_1", 4096, node) == [folder / "squad.json"]


@pytest.mark.parametrize(("name", "gold"), [("qa_1", 1), ("qa_2", 2)])
def test_prompt(name, gold, node, llama):
    task = tasks.build(name, llama, length=4096, seed=0, node=node)
    for index in range(8):
        sample = task.sample(index)
        text = llama.decode(sample.input_ids)
        assert 0.95 * 4096 <= len(sample.input_ids) + 32 <= 4096
        assert text.endswith("\n\n Answer:")
        assert sample.metric == "part"
        documents = re.split(r"Document \d+:\n", text.rpartition("\n\nAnswer the")[0])[1:]
        assert len(documents) == len(set(documents)) > 10
        answer = sample.references[0]
        holding = [d for d in documents if answer in d]
        assert len(holding) == 1
        assert len(sample.meta["needle_tokens"]) == gold
        golds = [
            llama.decode(sample.input_ids[t : t + 400]).split("\n\n")[0]
            for t in sample.meta["needle_tokens"]
        ]
        assert any(answer in document for document in golds)
        assert all(document.startswith("Document ") for document in golds)
        question = llama.decode(sample.input_ids[sample.meta["question_token"] :])
        assert question.startswith("Question: W")
    assert "Unanswerable" not in text


def test_references_are_unique(node, llama):
    sample = tasks.build("qa_1", llama, length=4096, seed=0, node=node).sample(0)
    assert len(sample.references) == 2
    assert sample.references[0].lower() == sample.references[1].lower()


def test_gold_document_moves_from_sample_to_sample(node, llama):
    task = tasks.build("qa_1", llama, length=4096, seed=0, node=node)
    depths = [task.sample(i).meta["depth"] for i in range(16)]
    assert len(set(depths)) > 10
    assert min(depths) < 0.25
    assert max(depths) > 0.75


def test_documents_are_shuffled_for_each_sample(node, llama):
    """Both lengths ask the same question; their documents must not stand in the same order."""
    orders = []
    for length in (4096, 4000):
        task = tasks.build("qa_2", llama, length=length, seed=0, node=node)
        orders.append(re.findall(r"Title \d+-\d+", llama.decode(task.sample(0).input_ids)))
    common = set(orders[0]) & set(orders[1])
    first, second = ([title for title in order if title in common] for order in orders)
    assert len(common) > 10
    assert first != second


def test_every_question_once(node, llama):
    task = tasks.build("qa_2", llama, length=2048, seed=0, node=node)
    assert tasks.sample_count("qa_2", 2048, node, 500) == 12
    assert len({task.sample(i).references[0] for i in range(12)}) == 12
    with pytest.raises(ValueError, match="index=12: qa_2 has 12 questions"):
        task.sample(12)


def test_too_few_documents_and_bad_files(node, llama, tmp_path):
    with pytest.raises(ValueError, match="length=65536: the data of task qa_1 fill only"):
        tasks.build("qa_1", llama, length=65536, seed=0, node=node).sample(0)
    (tmp_path / "squad.json").write_text("[]")
    bad = {"name": "qa_1", "qa_data": str(tmp_path)}
    with pytest.raises(ValueError, match="not in the original format of qa_1"):
        tasks.build("qa_1", llama, length=4096, seed=0, node=bad).sample(0)

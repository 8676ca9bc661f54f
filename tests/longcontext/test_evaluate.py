"""Batched answers equal answers alone; scores are kept, resumed and compared with a card."""

import json
import time
from dataclasses import replace

import pytest
import torch

from experiments.longcontext import __main__ as cli
from experiments.longcontext import evaluate as module
from experiments.longcontext.decoding import answers
from experiments.longcontext.evaluate import Cell, ScoreFile, compare, evaluate, table
from experiments.longcontext.export import export
from experiments.longcontext.settings import ExportConfig, compose
from experiments.longcontext.train import train
from tests.models import tiny
from xsparse.config import ModelConfig
from xsparse.models import fetch, load, load_tokenizer
from xsparse.prompts import Source


@pytest.fixture
def model(tmp_path):
    tiny.write_model(tmp_path / "short")
    node = tiny.Node(id=str(tmp_path / "short"))
    return load(node, dtype="float32", device="cpu").model


def test_a_batch_answers_as_each_prompt_alone(model):
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 250, (n,), generator=draw).tolist() for n in (40, 7, 100, 1)]
    expected = []
    for ids in prompts:
        got = model.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        expected.append(got[0, len(ids) :].tolist())
    assert answers(model, prompts, new_tokens=12, eos_ids=[]) == expected
    assert len({tuple(row) for row in expected}) > 1
    ends = [expected[0][3], expected[2][5]]
    cut = [
        row[: next((i for i, token in enumerate(row) if token in ends), len(row))]
        for row in expected
    ]
    assert answers(model, prompts, new_tokens=12, eos_ids=ends) == cut
    assert model.config._attn_implementation == "sdpa"


@pytest.fixture
def evaluation(base, tmp_path):
    # The tiny model holds 256 positions; its rotary embedding does not mind more.
    config = json.loads((base / "config.json").read_text())
    folder = tmp_path / "long"
    tiny.write_model(folder)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    composed = compose(
        "evaluate",
        ["length=[1500,2000]", "samples=2", "device=cpu", "dtype=float32", "task=niah_single_1"],
    )
    node = ModelConfig(name="tiny", source="path", id=str(folder))
    return lambda **changes: replace(composed, model=node, **changes)


def test_scores_are_the_tasks_own(evaluation, monkeypatch):
    given = {}

    def right_for_the_first(model, prompts, *, new_tokens, eos_ids):
        given.update(prompts=prompts, new_tokens=new_tokens, eos_ids=eos_ids)
        return [[9], *[[8]] * (len(prompts) - 1)]

    monkeypatch.setattr("experiments.longcontext.decoding.answers", right_for_the_first)
    config = evaluation()
    source = Source(config.model, config.task, config.seed)
    wanted = [("niah_single_1", 1500, i) for i in range(3)]
    task = list(source.samples(wanted, load_tokenizer(config.model)))

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return f"It is {task[0].references[0]}." if ids == [9] else "no idea"

    class Loaded:
        model, tokenizer, eos_ids = None, Tokenizer(), [2]

    cell = module.score(Loaded(), task, batch=25)
    assert cell == Cell(3, 0.3333, cell.low, cell.high)
    assert 0 < cell.low < 0.3333 < cell.high < 1
    assert given == {
        "prompts": [sample.input_ids for sample in task],
        "new_tokens": 128,
        "eos_ids": [2],
    }


def test_finished_cells_are_not_run_again(evaluation, tmp_path, monkeypatch):
    path = tmp_path / "scores.json"
    shown = evaluate(evaluation(scores=str(path)), time.monotonic())
    assert "| niah_single_1 | 0.0 [0.0, 65.8] n=2 | 0.0 [0.0, 65.8] n=2 |" in shown
    stored = ScoreFile.read(path)
    assert set(stored.scores) == {"1500", "2000"}
    with monkeypatch.context() as patch:
        patch.setattr(module, "load", lambda *_, **__: pytest.fail("loaded again"))
        assert evaluate(evaluation(scores=str(path)), time.monotonic()) == shown
    more = evaluate(evaluation(scores=str(path), samples=3), time.monotonic())
    assert "n=3" in more
    with pytest.raises(ValueError, match="holds scores of .* this is"):
        evaluate(evaluation(scores=str(path), seed=1), time.monotonic())


def test_a_limit_of_time_keeps_what_is_done(evaluation, tmp_path):
    path = tmp_path / "scores.json"
    evaluate(evaluation(scores=str(path), limit_s=1.0), time.monotonic())
    assert not path.exists()
    started = time.monotonic()
    module_limit = 10.001 + 5  # one cell starts whatever it takes, the second is expected too long
    evaluate(evaluation(scores=str(path), limit_s=module_limit, length=1500), started)
    assert set(ScoreFile.read(path).scores) == {"1500"}


def test_lengths_beyond_the_model_are_refused(evaluation):
    with pytest.raises(ValueError, match="length=5000: allowed is <= 4096"):
        evaluate(evaluation(length=5000), time.monotonic())


def test_the_verdict_of_a_card():
    card = Cell(50, 0.98, 0.9, 1.0)
    assert compare(Cell(10, 0.9, 0.6, 0.98), card) == "inside the card's interval"
    assert compare(Cell(10, 0.8, 0.5, 0.94), card) == "intervals overlap"
    assert compare(Cell(50, 0.5, 0.4, 0.6), card) == "DIFFERENT"


def test_the_table():
    scores = {
        "4096": {"a": Cell(50, 1.0, 0.93, 1.0), "b": Cell(50, 0.5, 0.4, 0.6)},
        "8192": {"a": Cell(50, 0.9, 0.8, 0.95)},
    }
    card = ScoreFile({}, {"4096": {"a": Cell(50, 0.99, 0.9, 1.0)}})
    shown = table(scores, card).splitlines()
    assert shown[0] == "| task | 4096 | 8192 |"
    assert shown[2].endswith(
        "card 99.0 [90.0, 100.0] n=50: inside the card's interval | 90.0 [80.0, 95.0] n=50 |"
    )
    assert shown[4] == "| mean of 2 | 75.0 |  |"
    assert shown[-1] == "1 inside the card's interval, 0 intervals overlap, 0 DIFFERENT"


def test_the_card_of_an_export(config, base, evaluation, tmp_path):
    own = config(steps=1)
    train(own, time.monotonic())
    place = ExportConfig(
        folder=own.folder, name="small", out=str(tmp_path / "out"), machine="a CPU"
    )
    export(place)
    node = ModelConfig(
        name="small",
        source="path",
        id=str(base),
        adapter=str(tmp_path / "out" / "small.safetensors"),
    )
    scores = tmp_path / "scores.json"
    tried = replace(evaluation(length=1500, scores=str(scores)), model=node)
    evaluate(tried, time.monotonic())
    written = export(replace(place, scores=str(scores))).splitlines()
    assert [name.rpartition(".")[2] for name in written] == ["safetensors", "json", "md"]
    text = (tmp_path / "out" / "small.md").read_text()
    for part in ("## Data", "## Recipe", "## Scores", "## Limits", "## Licence", "CC BY 3.0 US"):
        assert part in text
    assert "| niah_single_1 | 0.0 [0.0, 65.8] n=2 |" in text
    again = evaluate(replace(tried, scores=None), time.monotonic())
    assert "1 inside the card's interval" in again

    stored = ScoreFile.read(scores)
    stored.subject["weights_sha256"] = fetch(replace(node, adapter=None)).weights_sha256
    stored.write(scores)
    with pytest.raises(ValueError, match="of other weights than"):
        export(replace(place, scores=str(scores)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "train|evaluate|export"),
        (["burn"], "train|evaluate|export"),
        (["train", "colour=red"], "colour"),
        (["train", "rank=0"], "rank=0: allowed is >= 1"),
        (["train", "mixture.niah=1"], "mixture"),
        (["evaluate", "model.adapter=absent"], "model.adapter=absent: no such file"),
        (["evaluate", "samples=0"], "samples=0: allowed is >= 1"),
        (["export", "folder=absent"], "folder=absent: holds no checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments, message, capsys, base):
    if arguments[:1] == ["evaluate"]:
        arguments = [*arguments, "model=path", f"model.id={base}"]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert arguments[:1] in ([], ["burn"]) or error.count("\n") == 1

"""Calibration: the rule against plain loops, what is observed against transformers, the command."""

import json
import os
import re
import subprocess
import sys
from bisect import bisect_left
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.families import prompt, tiny
from tests.models.tiny import write_model
from tests.ops.oracle import select_row
from xsparse.calibrate import __main__ as command
from xsparse.calibrate import calibration
from xsparse.calibrate.calibration import HELD_OUT_SEED, SEED, Rows
from xsparse.calibrate.compare import STEPS, HeldOut
from xsparse.calibrate.observe import observed
from xsparse.calibrate.rule import MARGIN, block_shares, covering_shares, row_thresholds
from xsparse.ops.torch_backend import select_blocks

ROOT = Path(__file__).parents[1]
COVERAGES = (0.3, 0.9, 0.99, 1.0)
KINDS = ("spread", "peaked", "ties", "zeros")


def masses(kind: str, rows: int, first_block: int = 0, seed: int = 0, heads: int = 3):
    """Causal fp32 [heads, rows, first_block + rows]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(heads, rows, first_block + rows, generator=generator)
    if kind == "peaked":
        drawn = drawn**12
    if kind in ("ties", "zeros"):
        drawn = (drawn * 4).floor() + (kind == "ties")
    return drawn.tril(first_block)


def each_row(first_block: int, *tensors):
    """(head, row, diagonal, the causal part of each row as a list)"""
    heads, rows, _ = tensors[0].shape
    for head in range(heads):
        for row in range(rows):
            end = first_block + row + 1
            yield head, row, end - 1, *(t[head, row, :end].tolist() for t in tensors)


def smaller(threshold: torch.Tensor) -> torch.Tensor:
    """By a relative 1e-6, and by more than the margin of a threshold that is hardly above 0."""
    return (threshold * (1 - 1e-6) - 2 * MARGIN).clamp(min=0)


# The rule


@pytest.mark.parametrize("coverage", COVERAGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first_block", [0, 5])
def test_a_row_threshold_is_the_least_that_keeps_what_covers(kind, coverage, first_block):
    true, scores = (masses(kind, 9, first_block, seed) for seed in (1, 2))
    found = row_thresholds(true, scores, coverage, first_block)
    assert found.shape == (3, 9)
    for head, row, diagonal, t, s in each_row(first_block, true, scores):
        needed = select_row(t, coverage, diagonal)
        order = sorted(range(1, diagonal), key=lambda b, s=s: (-s[b], b))
        place = max((order.index(b) for b in needed - {0, diagonal}), default=None)
        threshold = float(found[head, row])
        if place is None:
            assert threshold == 0
            continue
        before = sum(s[b] for b in {0, diagonal, *order[:place]})
        expected = before / sum(s) if sum(s) else 1.0
        assert threshold == pytest.approx(expected, abs=1e-8)
        assert needed <= select_row(s, threshold, diagonal)
        assert not needed <= select_row(s, float(smaller(found[head, row])), diagonal)


@pytest.mark.parametrize("coverage", COVERAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_keeps_what_covers_at_the_threshold_of_each_row(kind, coverage):
    true, scores = (masses(kind, 12, 0, seed) for seed in (3, 4))
    found = row_thresholds(true, scores, coverage, 0)
    for row in range(12):
        needed = select_blocks(true[:, row : row + 1], coverage, q_block_start=row)
        mine = scores[:, row : row + 1]
        assert not (needed & ~select_blocks(mine, found[:, row], q_block_start=row)).any()
        less = select_blocks(mine, smaller(found[:, row]), q_block_start=row)
        missed = (needed & ~less).flatten(1).any(-1)
        assert missed.tolist() == (found[:, row] > 0).tolist()


def test_forced_blocks_count():
    true = torch.tensor([[[0.5, 0.05, 0.05, 0.4]], [[0.2, 0.0, 0.6, 0.2]]])
    scores = torch.tensor([[[0.1, 0.4, 0.4, 0.1]], [[0.1, 0.5, 0.3, 0.1]]])
    found = row_thresholds(true, scores, 0.89, 3).flatten().tolist()
    assert found[0] == 0  # block 0 and the diagonal hold 0.9 themselves
    assert found[1] == pytest.approx(0.1 + 0.1 + 0.5)  # what is taken before block 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [0, 0.2, 0.5, 0.77, 0.9, 1 - 1e-9, 1])
def test_shares_say_what_the_rule_keeps(kind, threshold):
    scores = masses(kind, 11, 4)
    kept = block_shares(scores, 4) < threshold
    for head, row, diagonal, s in each_row(4, scores):
        expected = select_row(s, threshold, diagonal)
        assert set(kept[head, row].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [0, 0.3, 0.6, 0.95, 1])
def test_covering_shares_say_which_rows_keep_their_mass(kind, threshold):
    true, scores = (masses(kind, 11, 2, seed) for seed in (5, 6))
    shares = covering_shares(true, block_shares(scores, 2), 0.9)
    for head, row, diagonal, t, s in each_row(2, true, scores):
        kept = sum(t[b] for b in select_row(s, threshold, diagonal))
        assert bool(shares[head, row] < threshold) == (kept >= 0.9 * sum(t))


# Tables


def test_a_table_is_a_quantile_over_rows_with_a_choice_rounded_up():
    true, scores = masses("peaked", 10, heads=2), masses("spread", 10, heads=2, seed=1)
    rows = Rows(0.9)
    for first, last in ((0, 1), (1, 4), (4, 10)):  # as chunks come
        rows.watch(0, first, true[:, first:last, :last], scores[:, first:last, :last])
    assert rows.count == 8
    needs = row_thresholds(true, scores, 0.9, 0)[:, 2:]
    for quantile in (1.0, 0.75, 0.5, 0.01):
        [table] = rows.table(quantile)
        for head in range(2):
            enough = sum(x <= table[head] for x in needs[head].tolist())
            fewer = sum(x <= table[head] - 1e-6 for x in needs[head].tolist())
            assert fewer < max(1, 8 * quantile) <= enough
            assert round(float(table[head]), 6) == table[head]


def test_the_comparison_against_masks():
    tables = torch.tensor([[[0.9, 0.5], [0.7, 1.0]], [[0.0, 0.0], [0.3, 0.2]]]).double()
    prompts = [
        [[masses(kind, n, 0, seed + i, heads=2) for i in (0, 10)] for seed in (0, 1)]
        for kind, n in (("peaked", 9), ("spread", 14))
    ]
    made = HeldOut(tables, coverage=0.8)
    for layers in prompts:
        made.begin()
        n = layers[0][0].shape[1]
        for first, last in ((0, 4), (4, n)):
            for layer, (true, scores) in enumerate(layers):
                chunk = slice(first, last)
                made.watch(layer, first, true[:, chunk, :last], scores[:, chunk, :last])

    def kept(layers, threshold):
        """Blocks, mass and covered rows by threshold [layers, heads] or a number."""
        sums = torch.zeros(3, dtype=torch.float64)
        for layer, (true, scores) in enumerate(layers):
            own = threshold[layer] if isinstance(threshold, torch.Tensor) else threshold
            mask = select_blocks(scores, own, q_block_start=0)
            mass = (true.double() * mask).sum(-1)
            covered = (mass >= 0.8 * true.double().sum(-1))[:, 2:]
            sums += torch.stack([mask.sum(), mass.sum(), covered.sum()])
        return sums

    def total(threshold):
        return sum((kept(layers, threshold) for layers in prompts), torch.zeros(3))

    for found, table in zip(made.compare(), tables, strict=True):
        sums = (total(table) / total(1.0)).tolist()
        assert [*vars(found.table).values()] == pytest.approx(sums)
        at = total(found.scalar)
        assert [*vars(found.by_scalar).values()] == pytest.approx((at / total(1.0)).tolist())
        assert at[0] >= total(table)[0]
        if found.scalar > 0:
            assert total(found.scalar - 1 / STEPS)[0] < total(table)[0]
        ahead = [0, 0]
        for layers in prompts:
            own = kept(layers, table)
            steps = range(STEPS + 1)
            least = bisect_left(steps, own[0], key=lambda k, x=layers: kept(x, k / STEPS)[0])
            by_scalar = kept(layers, least / STEPS)
            ahead = [n + int(own[i] > by_scalar[i]) for i, n in enumerate(ahead, 1)]
        assert [found.more_recall, found.more_covered] == ahead


# What is observed


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_observed_is_the_attention_of_the_model(family):
    model, ids = tiny(family), prompt(150)
    with torch.inference_mode():
        maps = model(ids, output_attentions=True).attentions
    blocks = torch.arange(150) // 16
    one_hot = torch.nn.functional.one_hot(blocks).float()
    seen: dict[int, list[Any]] = {0: [], 1: []}

    def watch(layer, first_block, mass, scores):
        assert mass.shape == scores.shape
        whole = torch.bincount(blocks)[first_block : first_block + mass.shape[1]].float()
        assert torch.allclose(mass.sum(-1), whole.expand(6, -1), atol=1e-4)
        strided = (whole / 4).ceil()
        assert torch.allclose(scores.sum(-1), strided.expand(6, -1), atol=1e-4)
        seen[layer].append((first_block, mass))

    loaded: Any = SimpleNamespace(model=model)
    with observed(loaded, stride=4, block_size=16, chunk_size=64) as prefill:
        for _ in range(2):  # a prompt leaves nothing behind for the next
            for chunks in seen.values():
                chunks.clear()
            prefill(ids[0].tolist(), watch)
    for layer, chunks in seen.items():
        assert [first for first, _ in chunks] == [0, 4, 8]
        expected = torch.einsum("htu,ta,ub->hab", maps[layer][0], one_hot, one_hot)
        for first, mass in chunks:
            part = expected[:, first : first + mass.shape[1], : mass.shape[2]]
            assert torch.allclose(mass, part, atol=2e-4)


# The command

SMALL = ("task=niah_single_1", "length=1024", "block_size=64", "samples=1", "held_out=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, max_position_embeddings=8192)
    return folder


@pytest.fixture
def small(folder, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return ["model=path", f"model.id={folder}", *SMALL]


def test_the_command_writes_a_table_that_a_point_accepts(small, folder, tmp_path, capsys):
    from xsparse import cli, plan, runner
    from xsparse.progress import Progress

    assert command.main([*small, "coverage=0.8", "quantile=0.5"]) == 0
    out, err = capsys.readouterr()
    file = tmp_path / "thresholds-tiny.json"
    made = json.loads(file.read_text())
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert "2 layers x 4 query heads" in out
    assert "n = 1 prompts" in out
    assert re.search(r"^0.5    \*", out, re.MULTILINE)
    assert f"threshold=@{file.name}" in out
    assert "calibrate 1/1  niah_single_1 1024 #0" in err
    shown = {"model": str(folder), "stride": 8, "block_size": 64, "coverage": 0.8, "quantile": 0.5}
    shown |= {"selector": "xattention", "length": [1024], "samples": 1, "seed": SEED}
    assert {key: made[key] for key in shown} == shown
    assert len(made["weights_sha256"]) == 64
    assert len(made["prompt_hashes"]) == 1
    assert made["held_out"]["seed"] == HELD_OUT_SEED
    assert made["held_out"]["prompt_hashes"] != made["prompt_hashes"]
    assert [row["quantile"] for row in made["held_out"]["by_quantile"]] == [1, 0.99, 0.95, 0.9, 0.5]
    assert "  [0." in file.read_text()  # a layer is a line

    point = [*cli.name_model(f"model={folder}"), "task=niah_single_1", "block_size=64"]
    point += [f"threshold=@{file}"]
    runner.Workshop(plan.make(cli.compose(point)), Progress())
    with pytest.raises(ValueError, match="made for stride=8, not 16"):
        runner.Workshop(plan.make(cli.compose([*point, "stride=16"])), Progress())


def test_chunks_do_not_change_the_table(small, tmp_path):
    for size in (128, 512):
        assert command.main([*small, f"chunk_size={size}", f"out={size}.json"]) == 0
    one, two = (json.loads((tmp_path / f"{size}.json").read_text()) for size in (128, 512))
    assert torch.tensor(one["table"]).shape == (2, 4)
    assert one["table"] == [pytest.approx(row, abs=1e-4) for row in two["table"]]


def test_the_prompts_are_of_no_evaluation(small, folder):
    from xsparse import models, tasks

    options, config = command.read(small)
    tokenizer = models.load_tokenizer(config.model)
    one, two, evaluation = (
        tasks.build("niah_single_1", tokenizer, length=1024, seed=seed, node=config.task)
        for seed in (SEED, HELD_OUT_SEED, 0)
    )
    hashes = [task.sample(i).prompt_hash for task in (one, two, evaluation) for i in range(4)]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("coverage=0", "coverage=0: allowed is a number in (0, 1]"),
        ("coverage=nan", "coverage=nan: allowed"),
        ("quantile=1.5", "quantile=1.5: allowed is a number in (0, 1]"),
        ("held_out=0", "held_out=0: allowed is an integer >= 1"),
        ("out=.", "out=.: allowed is a file"),
        ("out=absent/table.json", "out=absent/table.json: allowed is a file"),
        ("seed=1", "seed: no such key; allowed are coverage"),
        ("selector=minmax", "selector: no such key"),
        ("samples", "samples: allowed is KEY=VALUE"),
        ("samples=0", "samples=0: allowed is >= 1"),
        ("stride=7", "stride=7: allowed is a divisor"),
        ("length=9000", "length=9000: allowed is <= 8192"),
        ("model.id=/nowhere", "model.id=/nowhere: no such folder"),
        ("block_size=512", "length=1024: a prompt of niah_single_1 has"),
        ("task.ruler_data=.", "task.ruler_data=.: "),
    ],
)
def test_bad_input_is_one_line_and_code_2(small, argument, message, tmp_path, capsys):
    small = [given for given in small if given.split("=")[0] != argument.split("=")[0]]
    assert command.main([*small, argument]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"xsparse.calibrate: {message}")
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_the_file_as_it_was(small, tmp_path, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    (tmp_path / "table.json").write_text("older")
    monkeypatch.setattr(calibration, "calibrate", interrupted)
    assert command.main([*small, "out=table.json"]) == 130
    assert capsys.readouterr().err == "interrupted; nothing was written\n"
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("table.json", "older")]


def test_help_names_every_key(capsys):
    assert command.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for key in (*command.Options.__dataclass_fields__, *command.SHARED):
        assert re.search(rf"\b{key}\b", shown), key


@pytest.mark.slow
def test_a_table_of_the_default_model_runs(tmp_path):
    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words, "task=niah_single_1", "length=512", "samples=1"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "xsparse.calibrate", "held_out=1", "out=table.json")
    table = torch.tensor(json.loads((tmp_path / "table.json").read_text())["table"])
    assert table.shape == (30, 9)
    run(str(ROOT / "run.py"), "threshold=@table.json", "tracker=disabled")
    [rows] = [
        rows
        for path in tmp_path.glob("results/runs/*/rows.json")
        if (rows := json.loads(path.read_text()))[0]["selector"] == "xattention"
    ]
    assert rows[0]["threshold"] == "@table.json"
    assert 0 < rows[0]["mask_density"] < 1

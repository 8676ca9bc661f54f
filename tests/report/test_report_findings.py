"""Warnings and the tolerance table: what the report refuses to claim."""

import pytest
from synthetic_sweeps import SETTINGS, Setting, make_sweep

from xsparse import stats
from xsparse.report import load
from xsparse.report.findings import findings, tolerances


def titles(folder, **options):
    return {f.title: f for f in findings(load.read(folder), **options)}


def test_the_sparsest_point_without_a_detected_loss(many_tasks):
    rows = load.read(many_tasks).rows
    by_task = {t.task: t for t in tolerances(rows)}
    assert set(by_task) == {"mean of 3 tasks", "niah", "vt", "cwe"}
    # 12 % lost at n = 50 is 6 prompts of 50: seen by the interval though not after Holm.
    found = by_task["vt"]
    assert found.label == "xattention, τ 0.9"
    assert found.sparsity == pytest.approx(1 - 0.48)
    assert found.points == len(SETTINGS)
    assert found.n == 50
    assert found.visible == stats.smallest_visible_loss(50)
    assert found.verdict == (
        "no detectable loss at n = 50 (a loss under 15 points would not be seen)"
    )


def test_holm_spans_the_points_of_a_task_and_length(many_tasks):
    rows = load.read(many_tasks).rows
    of_vt = rows[rows["task"] == "vt"].reset_index(drop=True)
    chosen = of_vt.index[of_vt["label"] == "xattention, τ 0.9"][0]
    found = next(t for t in tolerances(rows) if t.task == "vt")
    assert found.p_adjusted == pytest.approx(stats.holm(of_vt["p_value"].tolist())[chosen])


def test_a_weak_baseline_refuses_a_conclusion(tmp_path):
    sweep = make_sweep(tmp_path, n=10, dense_accuracy=0.5, settings=SETTINGS[:1])
    read = load.read(sweep)
    assert all(
        t.sparsity is None and t.verdict.startswith("refused") for t in tolerances(read.rows)
    )
    problem = findings(read)[0]
    assert problem.level == "problem"
    assert "below 80 %" in problem.title
    assert "niah at 2,048 tokens 50.0 % (n = 10)" in problem.detail
    assert not any("below" in title for title in titles(sweep, floor=0.4))


def test_every_point_lost(tmp_path):
    sweep = make_sweep(tmp_path, n=40, lengths=(2048,), settings=[Setting("x", 0.5, 0.2, 0.5)])
    assert [t.verdict for t in tolerances(load.read(sweep).rows)] == [
        "every point lost accuracy detectably (n = 40)"
    ]


def test_too_few_prompts(tmp_path):
    sweep = make_sweep(tmp_path, n=4, lengths=(2048,), settings=SETTINGS[2:3])
    found = titles(sweep)
    few = found["Too few prompts for a claim of no loss"]
    assert "n = 4: too few prompts to see a loss of any size (niah at 2,048 tokens)" in few.detail
    assert "Speed-ups without an interval: fewer than 5 paired prompts" in found


def test_sparse_above_dense(tmp_path):
    better = Setting("x", 0.9, 0.4, 0.0)
    sweep = make_sweep(tmp_path, n=40, lengths=(2048,), settings=[better])
    read = load.read(sweep)
    read.rows.loc[:, ["delta", "delta_low", "delta_high"]] = [0.1, 0.02, 0.2]
    found = {f.title: f for f in findings(read)}
    wins = found["Sparse beats dense beyond the 95 % interval"]
    assert "x, τ 0.9 on niah at 2,048 tokens: +10.0 [+2.0, +20.0] points (n = 40)" in wins.detail


def test_unfinished_points_come_first(sweep):
    first = findings(load.read(sweep))[0]
    assert first.title == "1 of 6 points did not finish"
    assert "threshold=7 (failed: ValueError: threshold=7 must lie in 0..1)" in first.detail


def test_the_dense_kernel_is_named(sweep):
    assert "Speed-ups are over dense attention by sdpa-flash" in titles(sweep)


def test_a_missing_speedup_says_why(tmp_path):
    sweep = make_sweep(tmp_path, n=6, lengths=(2048,), settings=SETTINGS[:1], comparable=False)
    read = load.read(sweep)
    assert any(
        f.title == "No speed-up: dense did not run on the same host, device, engine and chunk_size"
        for f in findings(read)
    )
    read.dense.loc[:, "device"] = "cpu"
    assert any(
        f.title == "No speed-up: dense ran with another setting (device NVIDIA H200 against cpu)"
        for f in findings(read)
    )


def test_points_from_different_machines_are_flagged(sweep):
    read = load.read(sweep)
    read.rows.loc[0, "host"] = "node-2"
    mixed = next(f for f in findings(read) if f.title == "Points were not measured alike")
    assert "host: node-1, node-2" in mixed.detail


def test_a_sweep_without_a_baseline(sweep):
    read = load.read(sweep)
    for column in ("dense_accuracy", "p_value", "delta", "delta_low", "prefill_speedup"):
        read.rows[column] = float("nan")
    assert {t.verdict for t in tolerances(read.rows)} == {
        "not compared: no dense baseline on these prompts"
    }
    found = {f.title for f in findings(read)}
    assert "No dense baseline" in found
    assert "No speed-up: no dense run on these prompts" in found


def test_a_busy_machine(tmp_path):
    sweep = make_sweep(tmp_path, n=4, lengths=(2048,), settings=SETTINGS[2:3])
    read = load.read(sweep)
    busy = "The machine was busy: times and speed-ups are not to be trusted"
    assert busy not in {f.title for f in findings(read)}
    read.rows.loc[0, "cpu_share"] = 0.3
    found = {f.title: f for f in findings(read)}
    assert "in the worst 30 %" in found[busy].detail


def test_more_bytes_than_dense_moves(tmp_path):
    sweep = make_sweep(tmp_path, n=6, lengths=(2048,), settings=SETTINGS[:2], digest="streamed")
    title = "More bytes were moved than dense attention moves"
    assert title not in titles(sweep)
    read = load.read(sweep)
    read.rows.loc[read.rows["threshold"] == 0.7, "transfer_ratio"] = 1.44
    found = {f.title: f for f in findings(read)}[title]
    assert found.level == "warning"
    assert "xattention, τ 0.7 on niah at 2,048 tokens: 1.44" in found.detail
    assert "τ 0.8" not in found.detail
    assert "digest=resident_k" in found.detail

"""Reading what is stored: sweeps, folders of runs, files of rows, and what is broken in them."""

import json
import shutil

import pytest
from synthetic_sweeps import IDENTITY, SETTINGS, Setting, make_sweep, write_run

from xsparse import stats
from xsparse.report import load
from xsparse.rows import build_rows
from xsparse.store import RunFolder


def test_a_sweep_has_its_points_and_the_dense_runs_they_name(sweep):
    read = load.read(sweep)
    assert len(read.points) == len(SETTINGS) + 1
    assert [point.overrides for point in read.unfinished] == ["threshold=7"]
    # The run's own record wins over the index, which still says running.
    assert read.unfinished[0].state == "failed"
    assert read.unfinished[0].error == "ValueError: threshold=7 must lie in 0..1"
    assert len(load.primary(read.rows)) == len(SETTINGS) * 2
    assert set(read.dense["run_id"]) == {"dense-niah-2048-node-1", "dense-niah-4096-node-1"}


def test_labels_name_what_differs(sweep):
    labels = set(load.read(sweep).rows["label"])
    assert {"xattention, τ 0.7", "minmax, τ 0.95"} <= labels


def test_a_dense_macro_row_is_made_over_the_tasks_of_the_sweep(many_tasks):
    dense = load.read(many_tasks).dense
    macro = dense[dense["task"] == "mean"]
    assert macro[["tasks", "n", "length"]].values.tolist() == [[3, 150, 4096]]
    per_task = [(1.0, *stats.wilson(50, 50))] * 3
    assert macro["accuracy_low"].item() == pytest.approx(stats.combine(per_task)[1])
    tasks = dense[dense["task"] != "mean"]
    assert macro["attend_s"].item() == pytest.approx(tasks["attend_s"].mean())


def test_a_folder_with_runs_below_it(sweep, tmp_path):
    # A run's folder may hold characters that mean something to a shell or a glob.
    shutil.copytree(sweep.parent.parent / "runs", tmp_path / "a=[1]" / "org" / "name")
    read = load.read(tmp_path)
    assert len(read.points) == len(SETTINGS) + 1
    assert len(read.dense) == 2
    assert [point.state for point in read.unfinished] == ["failed"]


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_a_file_of_rows(sweep, tmp_path, kind):
    from xsparse.report import make

    rows = [
        row
        for file in sorted(sweep.parent.parent.glob("runs/*/rows.json"))
        for row in json.loads(file.read_text())
    ]
    if kind == "json":
        file = tmp_path / "rows.json"
        file.write_text(json.dumps(rows))
    else:
        file = make(sweep, out=tmp_path).with_name(f"results.{kind}")
    read = load.read(file)
    expected = load.read(sweep)
    columns = ["label", "task", "length", "accuracy", "mask_density", "prefill_speedup"]
    order = ["label", "task", "length"]
    assert (
        read.rows[columns].sort_values(order).values.tolist()
        == expected.rows[columns].sort_values(order).values.tolist()
    )
    assert len(read.dense) == len(expected.dense)


def test_a_failure_noted_by_the_sweep_stands_though_the_run_is_done(sweep, tmp_path):
    index = json.loads((sweep / "index.json").read_text())
    index["points"][0] |= {"state": "failed", "error": "OSError: disk full"}
    (tmp_path / "index.json").write_text(json.dumps(index))
    first = load.read(tmp_path, sweep.parent.parent / "runs").points[0]
    assert (first.state, first.error) == ("failed", "OSError: disk full")


def test_a_point_refused_before_it_had_a_run(sweep, tmp_path):
    refused = {"run_id": None, "overrides": ["stride=7", "x=1"], "state": "pending"}
    (tmp_path / "index.json").write_text(json.dumps({"points": [refused]}))
    [point] = load.read(tmp_path, sweep.parent.parent / "runs").points
    assert (point.overrides, point.error) == ("stride=7 x=1", "it never started")


def test_options_of_a_selector_stand_in_its_labels(tmp_path):
    settings = [Setting("random", t, t, 0.1) for t in (0.3, 0.4)]
    sweep = make_sweep(tmp_path, lengths=(2048,), n=5, settings=settings)
    for i, run in enumerate(sorted((sweep.parent.parent / "runs").glob("*random*"))):
        (run / "config.yaml").write_text(f"selector: {{name: random, density: 0.{i + 5}}}\n")
    labels = set(load.read(sweep).rows["label"])
    assert labels == {"random, τ 0.3, density 0.5", "random, τ 0.4, density 0.6"}


def test_full_prefill_with_sparse_decode_is_a_point_and_not_dense():
    rows = [
        {"run_id": "a", "selector": "full", "decode_selector": "full"},
        {"run_id": "b", "selector": "full", "decode_selector": "minmax"},
    ]
    sparse, dense = load.split_dense(load.frame(rows))
    assert (sparse["run_id"].tolist(), dense["run_id"].tolist()) == (["b"], ["a"])


def test_a_dense_point_does_not_count_its_baselines_twice(tmp_path):
    sweep = make_sweep(tmp_path, tasks=("vt", "cwe"), lengths=(2048,), n=5, settings=())
    runs = sweep.parent.parent / "runs"
    samples = [sample for run in sorted(runs.iterdir()) for sample in RunFolder(run).samples()]
    identity = {**IDENTITY, "selector": "full", "run_id": "point"}
    ids = {(task, 2048): f"dense-{task}-2048-node-1" for task in ("vt", "cwe")}
    rows = build_rows(identity, samples, samples, dense_run_ids=ids)
    write_run(runs / "point", rows, samples)
    points = [{"run_id": "point", "overrides": "selector=full", "state": "done"}]
    (sweep / "index.json").write_text(json.dumps({"points": points}))
    assert sorted(load.read(sweep).dense["task"]) == ["cwe", "mean", "vt"]


def test_a_killed_point_and_a_vanished_one_are_not_dropped(tmp_path):
    sweep = make_sweep(tmp_path, lengths=(2048,), n=5, settings=SETTINGS[:3])
    runs = sweep.parent.parent / "runs"
    killed, gone = (f"{sweep.name}-{setting.run_id}" for setting in SETTINGS[:2])
    (runs / killed / "status.json").write_text(json.dumps({"state": "running"}))
    (runs / killed / "rows.json").unlink()
    shutil.rmtree(runs / gone)
    read = load.read(sweep)
    assert [(point.state, point.error) for point in read.unfinished] == [
        ("interrupted", "it was stopped or killed"),
        ("missing", "no stored result was found"),
    ]
    assert set(read.rows["run_id"]) == {f"{sweep.name}-{SETTINGS[2].run_id}"}


def test_one_configuration_swept_twice_is_one_point(sweep, tmp_path):
    index = json.loads((sweep / "index.json").read_text())
    index["points"] += index["points"][:2]
    (tmp_path / "index.json").write_text(json.dumps(index))
    read = load.read(tmp_path, sweep.parent.parent / "runs")
    assert len(read.points) == len(SETTINGS) + 1
    assert len(load.primary(read.rows)) == len(SETTINGS) * 2


def test_thresholds_are_rounded_and_may_be_files():
    rows = [{"run_id": str(i), "selector": "x", "threshold": t} for i, t in enumerate([0.1 + 0.2])]
    assert load.frame(rows)["threshold"].tolist() == [0.3]
    named = [*rows, {"run_id": "f", "selector": "x", "threshold": "@heads.json"}]
    assert load.frame(named)["threshold"].tolist() == ["0.3", "@heads.json"]
    assert load.frame(named)["label"].tolist() == ["x, τ 0.3", "x, τ @heads.json"]


def test_runs_that_differ_in_no_parameter_keep_apart():
    rows = [{"run_id": run_id, "selector": "x", "threshold": 0.9} for run_id in ("aaaa", "bbbb")]
    assert load.frame(rows)["label"].tolist() == ["x, τ 0.9 (aaaa)", "x, τ 0.9 (bbbb)"]


def test_nothing_to_report_on_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"holds no index.json, rows.json or status.json"):
        load.read(tmp_path)
    with pytest.raises(ValueError, match="no such file or folder"):
        load.read(tmp_path / "absent")
    (tmp_path / "rows.txt").write_text("")
    with pytest.raises(ValueError, match=r"\.json, \.csv or \.parquet, got \.txt"):
        load.read(tmp_path / "rows.txt")

"""Tables and figures of a study against arithmetic by hand on made-up results."""

import json
from itertools import product
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer

from experiments.study import collect, figures, mask_figures, tables
from experiments.study.__main__ import main as command
from tests.report import synthetic_sweeps as made_up
from xsparse.rows import COLUMNS, build_rows

POINT = made_up.Setting("xattention", 0.8, 0.33, 0.25, 2.0)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("study")
    made_up.make_sweep(root, tasks=("niah", "vt"), n=8, failed=["threshold=7"])
    return root / "results"


@pytest.fixture(scope="module")
def study(results) -> Path:
    folder = results.parent / "tables"
    collect.write(results, folder)
    return folder


# Tables


def test_rows_are_those_of_the_runs(results, study):
    stored = {
        (row["run_id"], row["task"], row["length"]): row
        for file in results.glob("runs/*/rows.json")
        for row in json.loads(file.read_text())
    }
    rows = tables.rows(study)
    assert len(rows) == len(stored) == 5 * 6 + 4 * 2  # points: tasks and mean; baselines
    assert set(COLUMNS) <= set(rows.columns)
    for row in rows.to_dict("records"):
        own = stored[row["run_id"], row["task"], row["length"]]
        for column in ("accuracy", "delta", "delta_low", "mask_density", "prefill_speedup", "n"):
            assert row[column] == pytest.approx(own[column]) or pd.isna(row[column])
    assert (study / "rows.csv").read_text().splitlines()[0].startswith("run_id,dense_run_id,")
    assert len(pd.read_csv(study / "rows.csv")) == len(rows)


def test_samples_hold_the_prompt_beside_dense(results, study):
    samples = tables.samples(study)
    lines = {
        (file.parent.name, s["task"], s["length"], s["index"]): s
        for file in results.glob("runs/*/samples.jsonl")
        for s in map(json.loads, file.read_text().splitlines())
    }
    assert len(samples) == len(lines)
    assert not {"prediction", "references"} & set(samples.columns)
    for row in samples.to_dict("records"):
        cell = row["task"], row["length"], row["index"]
        own = lines[row["run_id"], *cell]
        counters = own["counters"]
        assert row["score"] == own["score"]
        assert row["bytes_moved"] == counters["bytes_h2d"]
        assert own["prompt_hash"].startswith(row["prompt_hash"])
        assert row["prefill_s"] == pytest.approx(own["prefill_s"], rel=1e-6)
        assert row["mask_density"] == pytest.approx(counters["mask_kept"] / counters["mask_causal"])
        assert row["page_density"] == pytest.approx(counters["pages_moved"] / 1000)
        if row["selector"] == "full":
            assert pd.isna(row["dense_score"])
        else:
            twin = lines[f"dense-{row['task']}-{row['length']}-node-1", *cell]
            assert row["dense_score"] == twin["score"]
            assert row["dense_prefill_s"] == pytest.approx(twin["prefill_s"], rel=1e-6)


def test_the_rows_follow_from_the_samples(study):
    """Accuracy, delta and density of every task row, by pandas."""
    rows, samples = tables.rows(study), tables.samples(study)
    sparse = rows[(rows["selector"] != "full") & (rows["task"] != "mean")]
    cells = samples.groupby(["run_id", "task", "length"])
    assert len(sparse) == 20
    for row in sparse.to_dict("records"):
        own = cells.get_group((row["run_id"], row["task"], row["length"]))
        assert row["n"] == len(own)
        assert row["accuracy"] == pytest.approx(own["score"].mean())
        assert row["delta"] == pytest.approx((own["score"] - own["dense_score"]).mean())
        assert row["mask_density"] == pytest.approx(own["mask_density"].mean(), rel=1e-5)
        speedup = median(own["dense_prefill_s"]) / median(own["prefill_s"])
        assert row["prefill_speedup"] == pytest.approx(speedup, rel=1e-5)


def test_tables_are_small_and_the_same_again(results, study, tmp_path):
    collect.write(results, tmp_path)
    for name in ("rows.parquet", "rows.csv", "samples.parquet"):
        assert (tmp_path / name).read_bytes() == (study / name).read_bytes()
    samples = pd.read_parquet(study / "samples.parquet")
    assert samples["task"].dtype == "category"
    assert samples["prefill_s"].dtype == "float32"


def split_runs(root: Path, tasks: tuple[str, ...], **identity: Any) -> dict[str, list[dict]]:
    """One point as a run per task, with its baselines; returns sparse and dense samples."""
    common = {**made_up.IDENTITY, **identity}
    samples: dict[str, list[dict]] = {"sparse": [], "dense": []}
    for task in tasks:
        dense = made_up.make_samples(task, 2048, 8, None)
        sparse = made_up.make_samples(task, 2048, 8, POINT)
        full = {**common, "run_id": f"dense-{task}", "selector": "full", "threshold": None}
        made_up.write_run(root / "runs" / f"dense-{task}", build_rows(full, dense, None), dense)
        own = {**common, "run_id": f"own-{task}", "dense_run_id": f"dense-{task}"}
        own |= {"selector": "xattention", "threshold": 0.8}
        made_up.write_run(root / "runs" / f"own-{task}", build_rows(own, sparse, dense), sparse)
        samples["sparse"] += sparse
        samples["dense"] += dense
    return samples


def test_a_point_spread_over_runs_gets_its_mean(tmp_path):
    samples = split_runs(tmp_path, ("vt", "cwe", "fwe"))
    collect.write(tmp_path, tmp_path / "tables")
    rows = tables.rows(tmp_path / "tables")
    [mean] = rows[rows["tasks"] == 3].to_dict("records")
    assert pd.isna(mean["run_id"])
    assert (mean["task"], mean["n"], mean["threshold"]) == ("mean", 24, 0.8)
    scores = pd.DataFrame(samples["sparse"]).groupby("task")["score"].mean()
    assert mean["accuracy"] == pytest.approx(scores.mean())
    assert mean["delta"] == pytest.approx(scores.mean() - 1)
    times = {side: median(s["prefill_s"] for s in samples[side]) for side in samples}
    assert mean["prefill_speedup"] == pytest.approx(times["dense"] / times["sparse"])
    assert len(rows) == 3 * 2 * 2 + 1
    assert set(tables.as_selected(rows)["label"]) == {"dense", "xattention, τ 0.8"}


def test_a_table_of_thresholds_stands_beside_numbers(tmp_path):
    split_runs(tmp_path, ("niah",))
    dense, sparse = (made_up.make_samples("niah", 2048, 8, s) for s in (None, POINT))
    own = {**made_up.IDENTITY, "run_id": "by-head", "dense_run_id": "dense-niah"}
    own |= {"selector": "xattention", "threshold": "@heads.json"}
    made_up.write_run(tmp_path / "runs" / "by-head", build_rows(own, sparse, dense), sparse)
    collect.write(tmp_path, tmp_path / "tables")
    samples = tables.samples(tmp_path / "tables")
    point = {"selector": "xattention", "threshold": 0.8}
    assert set(tables.where(samples, point)["run_id"]) == {"own-niah"}
    assert set(tables.where(samples, {"threshold": "@heads.json"})["run_id"]) == {"by-head"}
    maps = figures.niah(samples)["niah"].axes[:2]
    assert [ax.get_title(loc="left").split("\n")[0] for ax in maps] == ["dense", "xattention 0.8"]


def test_runs_that_are_not_done_are_skipped_and_counted(tmp_path, capsys):
    split_runs(tmp_path, ("vt", "cwe"))
    status = tmp_path / "runs" / "own-cwe" / "status.json"
    status.write_text(json.dumps({"state": "interrupted"}))
    (tmp_path / "runs" / "own-vt" / "rows.json").unlink()
    made_up.write_run(tmp_path / "runs" / "stale", [], [], state="failed")
    assert command(["collect", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "2 of 5 runs are done; skipped: 1 failed, 1 interrupted, 1 without rows"
    assert set(tables.rows(tmp_path / "out")["selector"]) == {"full"}


def test_a_full_point_repeats_no_prompt(tmp_path):
    samples = split_runs(tmp_path, ("vt", "cwe"))["dense"]
    full = {**made_up.IDENTITY, "run_id": "full", "selector": "full"}
    ids = {(task, 2048): f"dense-{task}" for task in ("vt", "cwe")}
    rows = build_rows(full, samples, samples, dense_run_ids=ids)
    made_up.write_run(tmp_path / "runs" / "full", rows, samples)
    collect.write(tmp_path, tmp_path / "tables")
    assert "full" in set(tables.rows(tmp_path / "tables")["run_id"])
    assert "full" not in set(tables.samples(tmp_path / "tables")["run_id"])


def test_a_prompt_that_is_not_the_one_of_dense_is_refused(tmp_path):
    split_runs(tmp_path, ("vt",))
    file = tmp_path / "runs" / "own-vt" / "samples.jsonl"
    line, rest = file.read_text().split("\n", 1)
    file.write_text(json.dumps(json.loads(line) | {"prompt_hash": "other"}) + "\n" + rest)
    with pytest.raises(ValueError, match="run own-vt: prompt 0 of vt at 2048 tokens is not"):
        collect.write(tmp_path, tmp_path / "tables")


# Points and pairs


def test_a_point_counts_once_and_as_its_selector_made_it(tmp_path):
    split_runs(tmp_path / "a", ("vt",))
    rows = collect.row_table(collect.done_runs(tmp_path / "a")[0])
    slow = rows.assign(mass_recall=0.9, n=99.0, run_id="slow", prefill_speedup=float("nan"))
    vote = rows.assign(reduce_heads="vote", run_id="vote")
    shown = tables.as_selected(pd.concat([slow, rows, vote], ignore_index=True))
    assert set(shown["run_id"]) == {"own-vt", "dense-vt"}
    assert len(shown) == len(rows)
    only_slow = tables.as_selected(slow[slow["selector"] == "xattention"])
    assert set(only_slow["run_id"]) == {"slow"}


def test_pairs_are_of_prompts_that_both_answered(study):
    samples = tables.samples(study)
    one, two = (
        tables.where(samples, {"selector": s, "threshold": t})
        for s, t in (("xattention", 0.7), ("minmax", 0.8))
    )
    one = one[one["index"] < 6]
    made = tables.paired(one, two).set_index(["task", "length"])
    both = one.merge(two, on=["task", "length", "index"])
    for (task, length), cell in both.groupby(["task", "length"]):
        difference = cell["score_y"] - cell["score_x"]
        row = made.loc[(task, length)]
        assert row["n"] == 6
        assert row["delta"] == pytest.approx(difference.mean())
        assert row["low"] <= row["delta"] <= row["high"]
        gains, losses = (difference > 0).sum(), (difference < 0).sum()
        n, k = gains + losses, min(gains, losses)
        mcnemar = min(1.0, 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0
        assert row["p"] == pytest.approx(mcnemar)
        assert row["p_adjusted"] >= row["p"]
    for length, cell in both.groupby("length"):
        by_task = (cell["score_y"] - cell["score_x"]).groupby(cell["task"]).mean()
        assert made.loc[("mean", length), "delta"] == pytest.approx(by_task.mean())


def test_what_cannot_be_paired_is_refused(study):
    samples = tables.samples(study)
    with pytest.raises(ValueError, match="a holds a prompt twice"):
        tables.paired(samples, samples)
    one = tables.where(samples, {"selector": "minmax", "threshold": 0.8})
    with pytest.raises(ValueError, match="share no prompt"):
        tables.paired(one[one["length"] == 2048], one[one["length"] == 4096])


# Figures


def bars(ax) -> list[tuple[float, float, float, float]]:
    """(x, y, low, high) of each point with an interval."""
    found = []
    for container in ax.containers:
        assert isinstance(container, ErrorbarContainer)
        line, _, (segments,) = container
        assert line is not None
        [[(_, low), (_, high)]] = segments.get_segments()
        found.append((line.get_xdata()[0], line.get_ydata()[0], low, high))
    return found


def test_figures_come_from_the_tables_alone_and_are_the_same_again(study, tmp_path, capsys):
    for name in ("one", "two"):
        assert command(["figures", str(study), "--out", str(tmp_path / name)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {file.name for file in (tmp_path / "one").iterdir()}
    stems = {"pareto_mask_density", "pareto_prefill_speedup", "tolerance_2048", "tolerance_4096"}
    assert names == {f"{s}.{kind}" for s, kind in product(stems | {"niah"}, ("png", "svg"))}
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    missing = [line for line in lines if "left out" in line][:3]
    assert [line.split(":")[0] for line in missing] == ["heads", "mass", "traffic"]
    assert "heads.parquet: no such table" in missing[0]
    assert "no row of rows.parquet has mass_recall" in missing[1]


def test_times_of_a_busy_machine_are_not_drawn(study):
    rows = tables.rows(study)
    assert figures.pareto(rows, "prefill_speedup")
    with pytest.raises(ValueError, match=r"busy \(cpu_share 0.30\)"):
        figures.pareto(rows.assign(cpu_share=0.3), "prefill_speedup")
    with pytest.raises(ValueError, match="has prefill_speedup"):
        figures.pareto(rows.assign(prefill_speedup=float("nan")), "prefill_speedup")


def test_tolerance_shows_the_paired_difference(study):
    rows = tables.rows(study)
    made = figures.tolerance(rows)
    assert sorted(made) == ["tolerance_2048", "tolerance_4096"]
    titles = [ax.get_title(loc="left") for ax in made["tolerance_2048"].axes]
    assert titles == ["mean of 2 tasks\nn = 16", "niah\nn = 8", "vt\nn = 8"]
    samples = tables.samples(study)
    own = samples[(samples["length"] == 2048) & (samples["task"] == "vt")]
    own = own[own["selector"] != "full"]
    cells = own.assign(delta=100 * (own["score"] - own["dense_score"])).groupby("run_id")
    expected = {(100 * cell["mask_density"].mean(), cell["delta"].mean()) for _, cell in cells}
    shown = bars(made["tolerance_2048"].axes[2])
    for (x, y, *_), cell in zip(sorted(shown), sorted(expected), strict=True):
        assert (x, y) == pytest.approx(cell, abs=1e-3)
    assert all(low <= y <= high for _, y, low, high in shown)


def mass_study(tmp_path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The oracle keeps 0.9 and 0.7 of the mass at two densities, xattention less."""
    points = [("oracle_topp", 0.3, 0.9), ("oracle_topp", 0.1, 0.7), ("xattention", 0.3, 0.8)]
    for i, (selector, density, recall) in enumerate(points):
        setting = made_up.Setting(selector, density, density, 0.0)
        samples = made_up.make_samples("vt", 2048, 8, setting)
        for sample in samples:
            total = 100.0 * sample["prompt_tokens"]
            kept = total * (recall + 0.01 * (sample["index"] - 3.5))
            sample["counters"] |= {"mass_kept": kept, "mass_total": total}
        own = {**made_up.IDENTITY, "run_id": f"run-{i}", "selector": selector}
        own["threshold"] = density
        made_up.write_run(tmp_path / "runs" / f"run-{i}", build_rows(own, samples, None), samples)
    collect.write(tmp_path, tmp_path / "tables")
    return tables.rows(tmp_path / "tables"), tables.samples(tmp_path / "tables")


def test_mass_stands_against_density_below_the_oracle(tmp_path):
    figure = figures.mass(*mass_study(tmp_path))["mass_recall"]
    [ax] = figure.axes
    assert ax.get_title(loc="left") == "vt\n2,048 tokens, n = 8"
    shown = sorted(bars(ax))
    assert [x for x, *_ in shown] == pytest.approx([10, 30, 30], abs=0.1)
    assert [y for _, y, *_ in shown] == pytest.approx([70, 80, 90], abs=0.1)
    assert all(y - 3 < low < y < high < y + 3 for _, y, low, high in shown)
    bound = ax.lines[0]
    assert list(bound.get_ydata()) == pytest.approx([70, 90], abs=0.1)


def mask_tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    prompt = {"selector": "xattention", "stride": 8, "task": "vt"}
    heads = [
        {**prompt, "threshold": t, "length": length, "index": i, "layer": layer, "head": head}
        | {"mask_kept": int(100 * t) - 10 * layer - head - i, "mask_causal": 100}
        for t, length, i, layer, head in product((0.9, 0.8), (2048, 4096), range(6), (0, 1), (0, 1))
    ]
    traffic = [
        {**prompt, "threshold": 0.9, "length": 2048, "index": i, "block_size_ratio": ratio}
        | {"reduce_heads": rule, "reduce_queries": "any", "reduce_sub_blocks": "any"}
        | {"transfer": "ring", "pages_moved": 5 * ratio + i, "pages_history": 50}
        | {"bytes_moved": 10 * ratio + i, "bytes_history": 200 + i, "executed": 30}
        | {"mask_causal": 100}
        for i, ratio, rule in product(range(6), (1, 2, 4), ("any", "vote"))
    ]
    return pd.DataFrame(heads), pd.DataFrame(traffic)


def test_density_by_layer_and_head():
    table = mask_tables()[0]
    made = mask_figures.heads(table)
    maps = [ax for ax in made["density_heads"].axes if ax.images]
    assert [ax.get_title(loc="left").split("\n")[0] for ax in maps] == [
        "xattention, τ 0.9, stride 8",
        "xattention, τ 0.8, stride 8",
    ]
    # Means over six prompts: index 0 to 5 takes 2.5 off.
    assert maps[0].images[0].get_array().tolist() == [[87.5, 86.5], [77.5, 76.5]]
    assert maps[1].images[0].get_array().tolist() == [[77.5, 76.5], [67.5, 66.5]]
    assert "82.0 [" in maps[0].get_title(loc="left")
    assert "n = 6" in maps[0].get_title(loc="left")
    by_layer = made["density_layers"].axes[0].lines
    assert [list(line.get_ydata()) for line in by_layer] == [[87.0, 77.0]] * 2


def test_traffic_by_pages_and_reduction():
    table = mask_tables()[1]
    [(name, figure)] = mask_figures.traffic(table).items()
    assert name == "traffic_xattention_0.9_stride_8"
    pages, moved, executed = figure.axes
    assert pages.get_title(loc="left") == "2,048 tokens\nn = 6"
    any_rule = table[table["reduce_heads"] == "any"].groupby("block_size_ratio")
    sums = any_rule[["pages_moved", "pages_history", "bytes_moved", "bytes_history"]].sum()
    shown = bars(pages)[:3]
    expected = 100 * sums["pages_moved"] / sums["pages_history"]
    assert [y for _, y, *_ in shown] == pytest.approx(expected.tolist())
    assert all(low < y < high for _, y, low, high in shown)
    expected = 100 * sums["bytes_moved"] / sums["bytes_history"]
    assert [y for _, y, *_ in bars(moved)[:3]] == pytest.approx(expected.tolist())
    assert {y for _, y, *_ in bars(executed)} == {30.0}


def test_tables_of_masks_are_drawn_where_they_are(study, tmp_path):
    for name in ("rows", "samples"):
        (tmp_path / f"{name}.parquet").write_bytes((study / f"{name}.parquet").read_bytes())
    heads, traffic = mask_tables()
    heads.to_parquet(tmp_path / "heads.parquet")
    traffic.drop(columns="executed").to_parquet(tmp_path / "traffic.parquet")
    lines = figures.write(tmp_path, tmp_path / "figures")
    assert f"heads: {tmp_path / 'figures' / 'density_heads'}.png, .svg" in lines
    assert lines[-1].endswith("traffic.parquet: lacks executed")


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collect", ".", "--out", "out"], ".: no runs; allowed is a folder with runs/<run_id>"),
        (["collect", "absent", "--out", "out"], "absent: no runs; allowed is"),
        (["figures", "."], "rows.parquet: no such table"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_done_run_is_refused(tmp_path):
    made_up.write_run(tmp_path / "runs" / "stale", [], [], state="failed")
    with pytest.raises(ValueError, match=r"no run is done \(1 failed\)"):
        collect.write(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()

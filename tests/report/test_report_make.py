"""The report folder as a whole, its command line, and the terminal table."""

import json
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest
from rich.console import Console
from synthetic_sweeps import SETTINGS, make_sweep

from xsparse.report import console, load, make
from xsparse.report.__main__ import main
from xsparse.rows import COLUMNS


@pytest.fixture(scope="module")
def report(sweep, tmp_path_factory):
    return make(sweep, out=tmp_path_factory.mktemp("report"))


def test_the_folder_is_complete(report):
    names = {file.name for file in report.parent.iterdir()}
    stems = {"pareto_mask_density", "pareto_prefill_speedup", "densities", "stages", "niah_dense"}
    stems |= {f"niah_{s.selector}_{s.threshold:g}" for s in SETTINGS}
    figures = {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    assert names == figures | {"report.html", "results.csv", "results.parquet"}


def test_the_page_is_self_contained_and_says_what_it_must(report):
    html = report.read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert sources
    assert all(source.startswith("data:") for source in sources)
    assert "url(" not in html
    assert "http" not in re.sub(r'src="data:[^"]*"', "", html)
    for words in (
        "1 of 6 points did not finish",
        "ValueError: threshold=7 must lie in 0..1",
        "no detectable loss at n = 20",
        "python run.py -m threshold=0.7,0.9",
        "sdpa-flash",
        "torch 2.13.0",
    ):
        assert words in html


def test_rows_survive_as_csv_and_typed_parquet(report, sweep):
    parquet = pd.read_parquet(report.with_name("results.parquet"))
    assert list(parquet.columns) == [*COLUMNS, "label", "state"]
    assert parquet["accuracy"].dtype == "float64"
    assert len(parquet) == len(pd.read_csv(report.with_name("results.csv")))
    stored = json.loads(
        (sweep.parent.parent / "runs" / f"{sweep.name}-xattention-90" / "rows.json").read_text()
    )
    kept = parquet[parquet["run_id"] == stored[0]["run_id"]].iloc[0]
    assert kept["mask_density"] == stored[0]["mask_density"]


def test_a_mixed_threshold_column_can_be_stored(sweep, tmp_path):
    runs = tmp_path / "results" / "runs"
    shutil.copytree(sweep.parent.parent / "runs", runs)
    file = runs / f"{sweep.name}-xattention-90" / "rows.json"
    rows = json.loads(file.read_text())
    for row in rows:
        row["threshold"] = "@heads.json"
    file.write_text(json.dumps(rows))
    made = make(runs, out=tmp_path / "out")
    assert "@heads.json" in pd.read_parquet(made.with_name("results.parquet"))["threshold"].tolist()


def test_a_deleted_report_is_made_again(tmp_path):
    sweep = make_sweep(tmp_path, lengths=(2048,), n=5, settings=SETTINGS[:1])
    first = make(sweep)
    assert first == sweep / "report" / "report.html"
    before = first.read_bytes()
    shutil.rmtree(first.parent)
    assert make(sweep).read_bytes() == before


def test_a_sweep_in_which_everything_failed_still_has_a_report(tmp_path):
    sweep = make_sweep(tmp_path, settings=(), failed=["threshold=7", "threshold=8"])
    html = make(sweep).read_text()
    assert "2 of 2 points did not finish" in html
    assert "threshold=8" in html


def test_baselines_alone(tmp_path):
    sweep = make_sweep(tmp_path, settings=())
    assert "dense" in make(sweep.parent.parent / "runs", out=tmp_path / "out").read_text()


def test_a_resident_sweep_has_no_traffic_figure(tmp_path):
    sweep = make_sweep(tmp_path, lengths=(2048,), n=5, settings=SETTINGS[:1], offload=False)
    assert not make(sweep).with_name("densities.png").exists()


def test_markup_in_what_is_stored_is_escaped(tmp_path):
    sweep = make_sweep(tmp_path, lengths=(2048,), n=5, settings=SETTINGS[:1], model="<b>m&m</b>")
    html = make(sweep).read_text()
    assert "<b>m&m</b>" not in html
    assert "&lt;b&gt;m&amp;m&lt;/b&gt;" in html


def test_floor_is_a_share(sweep, tmp_path):
    with pytest.raises(ValueError, match=r"floor=80 must lie in 0\.\.1"):
        make(sweep, out=tmp_path, floor=80)


def test_command_line(sweep, tmp_path, capsys):
    assert main([str(sweep), "--out", str(tmp_path)]) == 3  # one point failed
    out = capsys.readouterr().out
    assert "failed: threshold=7" in out
    assert out.rstrip().endswith("report.html")
    assert main([str(tmp_path / "absent")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_importing_the_package_is_cheap():
    heavy = "{'pandas', 'matplotlib', 'scipy', 'torch', 'pyarrow', 'rich'}"
    code = f"import sys, xsparse.report; print({heavy} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def printed(rows, width):
    terminal = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    terminal.print(console.table(rows))
    return terminal.export_text().splitlines()


def test_the_console_table_fits_and_cuts_no_number(many_tasks):
    rows = load.records(load.read(many_tasks).rows)
    lines = printed(rows, 120)
    assert max(len(line.rstrip()) for line in lines) <= 120
    line = next(line for line in lines if "mean of 3 tasks" in line and "0.95" in line)
    row = next(r for r in rows if r["task"] == "mean" and r["threshold"] == 0.95)
    # [selector, τ, task (4 words), length, n, accuracy [low, high], dense, delta, ...]
    assert line.split()[6:8] == ["4096", "150"]
    assert f"{row['accuracy'] * 100:.0f} [" in line
    assert f"{row['prefill_tok_s']:,.0f}" in line
    assert f"{row['prefill_speedup']:.2f} [" in line
    assert len([line for line in lines if "niah" in line]) == len(SETTINGS)


def test_the_console_table_takes_plain_rows_with_nulls():
    row = dict.fromkeys(COLUMNS)
    row |= {"selector": "x", "task": "vt", "length": 512, "n": 1, "accuracy": 1.0, "tasks": 1}
    assert any("vt" in line for line in printed([row], 100))

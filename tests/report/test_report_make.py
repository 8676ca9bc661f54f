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
    line = next(line for line in lines if line.split()[2:9:4] == ["0.9", "tasks"])
    row = next(r for r in rows if (r["task"], r["threshold"], r["length"]) == ("mean", 0.9, 4096))
    # [point (3 words), task (4 words), length, n, accuracy [low, high], dense, delta, ...]
    assert line.split()[3:9] == ["mean", "of", "3", "tasks", "4096", "150"]
    assert f"{row['accuracy'] * 100:.0f} [" in line
    assert f"{row['prefill_tok_s']:,.0f}" in line
    assert f"{row['prefill_speedup']:.2f} [" in line
    assert len([line for line in lines if "niah" in line]) == len(SETTINGS)


def test_the_console_table_takes_plain_rows_with_nulls():
    row = dict.fromkeys(COLUMNS)
    row |= {"selector": "x", "task": "vt", "length": 512, "n": 1, "accuracy": 1.0, "tasks": 1}
    assert any("vt" in line for line in printed([row], 100))


VARIANTS = (
    {"transfer": "ring", "digest": "streamed", "transfer_ratio": 1.44},
    {"transfer": "gather", "digest": "streamed", "transfer_ratio": 1.2},
    {"transfer": "gather", "digest": "resident_k", "transfer_ratio": 0.2},
    {"decode_selector": "minmax"},
    {"decode_selector": "minmax", "decode_cache_gb": 0.2},
    {"decode_selector": "minmax", "cuda_graph": "step"},
    {"digest": "quantised_k", "digest_format": "int4"},
)
PLAIN = dict.fromkeys(COLUMNS) | {
    **{"selector": "xattention", "threshold": 0.9, "decode_selector": "full", "engine": "offload"},
    **{"transfer": "gather", "digest": "streamed", "digest_format": "int8", "cuda_graph": "none"},
    **{"task": "vt", "tasks": 1, "length": 512, "n": 1, "accuracy": 1.0, "decode_cache_gb": 0.0},
    **{"transfer_ratio": 0.5},
}


def test_the_console_table_tells_points_apart_and_shows_what_moved():
    rows = [PLAIN | variant | {"run_id": str(i)} for i, variant in enumerate(VARIANTS)]
    labels = load.frame(rows)["label"].tolist()
    assert len(set(labels)) == len(rows)
    assert not any("(" in label for label in labels)  # told apart by keys, not by run ids
    lines = printed(rows, 200)
    for row, label in zip(rows, labels, strict=True):
        [line] = [line for line in lines if line.startswith(f"{label} ")]
        assert line.rstrip().endswith(f" {row['transfer_ratio'] * 100:.0f}")
    assert "moved" in lines[0]


def test_what_moved_is_shown_for_offload_engines_only():
    assert "moved" not in printed([PLAIN | {"transfer_ratio": None, "engine": "resident"}], 200)[0]


def test_words_of_rows_stay_words():
    read = load.frame([PLAIN])
    assert read["digest_format"].tolist() == ["int8"]
    assert read["cuda_graph"].tolist() == ["none"]

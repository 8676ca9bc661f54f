"""The kernel benchmark without a GPU: arguments, tables, and one part from end to end."""

import csv
import json

import pytest

from experiments import kernels

ROW = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "length": 1024}
ROWS = [
    {"op": "check", "variant": "scores", "ok": True, "error": 0.0, "note": "<= 1"},
    {"op": "check", "variant": "merge", "ok": False, "note": "ValueError: no"},
    {**ROW, "op": "attention", "variant": "plain", "density": 0.5, "ms": 2.0, "tflops": 400.0},
    {**ROW, "op": "attention", "variant": "sdpa-cudnn", "density": 1.0, "ms": 10.0, "tflops": 600},
    {**ROW, "op": "scores", "variant": "default", "stride": 8, "ms": 0.8},
    {**ROW, "op": "select", "variant": "mask+lists-0.9", "stride": 8, "ms": 0.2},
    {**ROW, "op": "chain", "variant": "plain", "stride": 8, "density": 0.1, "ms": 2.5},
]


def test_table_names_failures_and_shares_of_dense():
    text = "\n".join(kernels.table(ROWS))
    assert "1 OK, 1 FAIL" in text
    assert "FAIL merge" in text
    assert "estimate + select = 10.0% of cuDNN dense" in text
    assert "chain plain 4.00x cuDNN dense" in text


def test_rows_become_csv_and_a_plot(tmp_path):
    kernels.write_csv(ROWS, tmp_path / "kernels.csv")
    with open(tmp_path / "kernels.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(ROWS)
    assert rows[2]["tflops"] == "400"
    kernels.plot(ROWS, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 1000


@pytest.mark.parametrize("arguments", [["--budget-s", "0"], ["--device", "tpu"]])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as stop:
        kernels.parse(arguments)
    assert stop.value.code == 2


def test_unknown_parts_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="--parts=nothing: allowed is check"):
        kernels.main(["--parts", "nothing", "--out", str(tmp_path)])


def test_parts_run_in_the_interpreter(tmp_path):
    code = kernels.main(
        ["--device", "cpu", "--parts", "estimate,decode,dense", "--out", str(tmp_path)]
    )
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert {r["op"] for r in rows} == {"scores", "select", "decode"}
    assert all(r["ms"] > 0 for r in rows)
    assert {p.name for p in tmp_path.iterdir()} >= {"kernels.csv", "environment.json", "log.txt"}


def test_every_part_of_the_list_exists():
    from experiments.kernel_parts import RUN

    assert set(kernels.PARTS) == set(RUN)

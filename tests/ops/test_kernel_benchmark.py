"""The kernel benchmark without a GPU: arguments, tables, and one part from end to end."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import kernel_tables as tables
from experiments import kernels, record_masks

ROW = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "length": 1024}
RANDOM = {**ROW, "op": "attention", "masks": "random"}
ROWS = [
    {"op": "check", "variant": "scores", "ok": True, "error": 0.0, "note": "<= 1"},
    {"op": "check", "variant": "merge", "ok": False, "note": "ValueError: no"},
    {**ROW, "op": "attention", "variant": "sdpa-cudnn", "density": 1.0, "ms": 10.0, "tflops": 600},
    {**RANDOM, "variant": "xsparse", "density": 0.5, "ms": 2.0, "tflops": 400.0},
    {**RANDOM, "variant": "fa4", "density": 0.5, "note": "ImportError: no"},
    {**ROW, "op": "estimate+select", "variant": "xsparse", "stride": 8, "ms": 1.0},
    {**ROW, "op": "chain", "variant": "xsparse", "stride": 8, "density": 0.1, "ms": 2.5},
]
DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"
PUBLISHED = Path(__file__).parents[2] / "results" / "published" / "h200" / "kernels.csv"


def test_table_names_failures_and_shares_of_dense():
    text = "\n".join(tables.table(ROWS))
    assert "1 OK, 1 FAIL" in text
    assert "FAIL merge" in text
    assert "| xsparse |  | 400 (2) |" in text
    assert "| estimate+select | xsparse | 8 | 1.000 | 10.0% |" in text
    assert "| chain | xsparse | 8 | 2.500 | 4.00x |" in text
    assert "not measured: attention fa4" in text


def test_rows_become_csv_and_a_plot(tmp_path):
    tables.write_csv(ROWS, tmp_path / "kernels.csv")
    with open(tmp_path / "kernels.csv") as file:
        assert len(list(csv.DictReader(file))) == len(ROWS)
    assert tables.table(tables.read_csv(tmp_path / "kernels.csv")) == tables.table(ROWS)
    tables.plot(ROWS, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 1000


def test_tables_go_between_the_markers_of_a_document(tmp_path):
    tables.write_csv(ROWS, tmp_path / "kernels.csv")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    for _ in range(2):
        argv = ["--table", str(tmp_path / "kernels.csv"), "--into", str(page)]
        assert kernels.main(argv) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("4.00x") == 1
    page.write_text("nothing")
    with pytest.raises(ValueError, match="needs one"):
        kernels.main(argv)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="nothing published")
def test_the_document_shows_what_is_published():
    shown = DOCUMENT.read_text().split(tables.BEGIN)[1].split(tables.END)[0].strip()
    assert shown == "\n".join(tables.table(tables.read_csv(PUBLISHED))).strip()


def test_masks_survive_storage(tmp_path):
    masks = np.random.default_rng(0).random((2, 3, 4, 13, 13)) < 0.3
    record_masks.save(tmp_path / "m.npz", masks, {"model": "tiny"})
    got, about = record_masks.load(tmp_path / "m.npz")
    assert np.array_equal(got, masks)
    assert about == {"model": "tiny"}


def test_the_recorded_masks_are_causal_and_keep_what_is_always_kept():
    masks, about = record_masks.load()
    blocks = masks.shape[-1]
    assert masks.shape[2] == about["heads"][0]
    assert not (masks & ~np.tri(blocks, dtype=bool)).any()
    assert masks[..., 0].all()
    assert masks[..., np.arange(blocks), np.arange(blocks)].all()


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
        ["--device", "cpu", "--parts", "attention,estimate,decode", "--out", str(tmp_path)]
    )
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert {r["op"] for r in rows} == {"attention", "scores", "select", "estimate+select", "decode"}
    assert all(r["ms"] > 0 for r in rows)
    assert {p.name for p in tmp_path.iterdir()} >= {"kernels.csv", "environment.json", "log.txt"}


def test_every_part_of_the_list_exists():
    from experiments.kernel_parts import RUN

    assert set(kernels.PARTS) == set(RUN)

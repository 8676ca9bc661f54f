"""Rows against hand calculation from a few samples."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from xsparse import stats
from xsparse.rows import COLUMNS, build_rows

DOCS = Path(__file__).parent.parent / "docs" / "results.md"
IDENTITY = {"run_id": "r", "dense_run_id": "d", "selector": "xattention", "engine": "offload"}


def sample(index: int, *, task: str = "vt", length: int = 512, **changes: Any) -> dict[str, Any]:
    counters = {
        "mask_kept": 2 + index,
        "mask_causal": 10,
        "executed": 4,
        "pages_moved": 0,
        "pages_history": 0,
        "bytes_h2d": 100 * index,
        "bytes_d2h": 7,
        "bytes_history": 200,
        "decode_tiles_kept": 1,
        "decode_tiles": 4,
        "decode_bytes_h2d": 0,
        "mass_kept": None,
        "mass_total": None,
    }
    return {
        "task": task,
        "length": length,
        "index": index,
        "prompt_hash": f"{task}{length}{index}",
        "prompt_tokens": 500,
        "new_tokens": 11,
        "score": 1.0,
        "ttft_s": 2.0 + index,
        "prefill_s": 2.0,
        "decode_s": 1.0,
        "stages_s": {"estimate": 0.1, "select": 0.1, "transfer": 0.0, "attend": 0.5, "sync": 0.0},
        "counters": counters,
        "digest_bytes": 5,
        "peak_gpu_gb": None,
        "peak_host_gb": 1.0 + index,
        **changes,
    }


def test_columns_are_those_of_the_documentation():
    described = DOCS.read_text().split("## Columns of a row")[1]
    named = [word for span in re.findall(r"`([^`]+)`", described) for word in span.split()]
    documented = [word for word in named if re.fullmatch(r"[a-z0-9_]+", word)]
    assert set(COLUMNS) == set(documented)
    assert len(COLUMNS) == len(set(COLUMNS))


def test_a_row_by_hand():
    sparse = [sample(i, score=float(i > 0)) for i in range(3)]
    dense = [sample(i, prefill_s=4.0, decode_s=2.0) for i in range(5)]
    row, macro = build_rows(IDENTITY, sparse, dense)
    assert list(row) == list(macro) == list(COLUMNS)
    assert (row["task"], row["length"], row["n"], row["tasks"]) == ("vt", 512, 3, 1)
    assert row["accuracy"] == pytest.approx(2 / 3)
    assert (row["accuracy_low"], row["accuracy_high"]) == pytest.approx(stats.wilson(2, 3))
    assert row["dense_accuracy"] == 1.0
    assert (row["delta"], row["p_value"]) == pytest.approx((-1 / 3, 1.0))
    assert row["mask_density"] == pytest.approx((2 + 3 + 4) / 30)
    assert row["executed_density"] == pytest.approx(12 / 30)
    assert row["page_density"] is None  # no history at all
    assert row["transfer_ratio"] == pytest.approx(300 / 600)
    assert row["decode_density"] == pytest.approx(0.25)
    assert row["mass_recall"] is None
    assert (row["bytes_h2d"], row["bytes_d2h"]) == (100, 7)
    assert row["prefill_tok_s"] == pytest.approx(1500 / 6)
    assert row["dense_prefill_tok_s"] == pytest.approx(1500 / 12)
    assert row["decode_tok_s"] == pytest.approx(10 / 1.0)
    assert (row["ttft_s"], row["tpot_s"]) == pytest.approx((3.0, 0.1))
    assert (row["prefill_speedup"], row["decode_speedup"]) == pytest.approx((2.0, 2.0))
    assert row["prefill_speedup_low"] is None  # three pairs
    assert (row["attend_s"], row["rest_s"]) == pytest.approx((0.5, 1.3))
    assert (row["peak_gpu_gb"], row["peak_host_gb"]) == (None, 3.0)


def test_a_macro_row_per_length_averages_tasks():
    sparse = [
        *(sample(i, task="vt", score=1.0) for i in range(4)),
        *(sample(i, task="cwe", score=0.5) for i in range(2)),
        sample(0, task="vt", length=256),
    ]
    rows = build_rows(IDENTITY, sparse, None)
    shape = [(row["task"], row["length"], row["n"], row["tasks"]) for row in rows]
    assert shape == [
        ("vt", 256, 1, 1),
        ("mean", 256, 1, 1),
        ("vt", 512, 4, 1),
        ("cwe", 512, 2, 1),
        ("mean", 512, 6, 2),
    ]
    assert rows[-1]["accuracy"] == pytest.approx(0.75)
    # Densities are ratios of sums over all prompts: (2+3+4+5 + 2+3) / 60.
    assert rows[-1]["mask_density"] == pytest.approx(19 / 60)


def test_times_are_compared_only_where_allowed():
    samples = [sample(i) for i in range(6)]
    compared = build_rows(IDENTITY, samples, samples)[0]
    assert (compared["prefill_speedup"], compared["prefill_speedup_low"]) == (1.0, 1.0)
    elsewhere = build_rows(IDENTITY, samples, samples, dense_comparable=False)[0]
    assert elsewhere["dense_accuracy"] == 1.0
    for column in ("dense_prefill_tok_s", "prefill_speedup", "decode_speedup"):
        assert elsewhere[column] is None


def test_one_new_token_has_no_decode_speed():
    samples = [sample(i, new_tokens=1, decode_s=0.0) for i in range(2)]
    row = build_rows(IDENTITY, samples, samples)[0]
    assert (row["decode_tok_s"], row["tpot_s"], row["decode_speedup"]) == (None, None, None)


def test_overlapping_stages_leave_no_negative_rest():
    stages = {"estimate": 1.5, "select": 0.0, "transfer": 1.0, "attend": 1.0, "sync": 0.0}
    assert build_rows(IDENTITY, [sample(0, stages_s=stages)], None)[0]["rest_s"] == 0.0


def test_a_resident_engine_has_no_transfer_ratio():
    rows = build_rows({**IDENTITY, "engine": "resident"}, [sample(0)], None)
    assert rows[0]["transfer_ratio"] is None


def test_baselines_of_several_runs_are_named_per_row():
    samples = [sample(0, task="vt"), sample(0, task="cwe")]
    ids = {("vt", 512): "d1", ("cwe", 512): "d2"}
    rows = build_rows(IDENTITY, samples, samples, dense_run_ids=ids)
    assert [row["dense_run_id"] for row in rows] == ["d1", "d2", None]


def test_order_of_samples_does_not_matter():
    samples = [sample(i, score=float(i % 2)) for i in range(6)]
    assert build_rows(IDENTITY, samples[::-1], samples) == build_rows(IDENTITY, samples, samples)


def test_rows_are_strict_json():
    rows = build_rows(IDENTITY, [sample(0)], [sample(0)])
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


@pytest.mark.parametrize(
    ("sparse", "dense", "message"),
    [
        ([sample(0)], [sample(0, prompt_hash="other")], "prompt 0 of vt at 512 tokens differs"),
        ([sample(1)], [sample(0)], "prompt 1 of vt at 512 tokens has no dense sample"),
        ([sample(0, task="cwe")], [sample(0)], "prompt 0 of cwe at 512 tokens has no dense"),
        ([sample(0), sample(0)], None, "stored twice"),
        ([], None, "at least one sample"),
    ],
)
def test_what_cannot_be_compared_is_refused(sparse, dense, message):
    with pytest.raises(ValueError, match=message):
        build_rows(IDENTITY, sparse, dense)


def test_unknown_identity_is_refused():
    with pytest.raises(ValueError, match=r"\['treshold'\]"):
        build_rows({"treshold": 1}, [sample(0)], None)

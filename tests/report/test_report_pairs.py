"""Comparing two sweeps."""

import json

import numpy as np
import pytest
from synthetic_sweeps import SETTINGS, make_sweep

from xsparse import stats
from xsparse.report import compare, load
from xsparse.report.__main__ import main
from xsparse.report.pairs import match
from xsparse.store import RunFolder


def samples_of(sweep, setting):
    folder = sweep.parent.parent / "runs" / f"{sweep.name}-{setting.run_id}"
    return RunFolder(folder).samples()


@pytest.fixture
def two(tmp_path):
    """The same points with stride 8 and with stride 16, where more is lost."""
    a = make_sweep(tmp_path, name="a", lengths=(2048,), settings=SETTINGS[:2])
    worse = [
        type(s)(s.selector, s.threshold, s.density, s.lost + 0.2, 2 * s.speed) for s in SETTINGS[:2]
    ]
    return a, make_sweep(tmp_path, name="b", lengths=(2048,), settings=worse, stride=16)


def test_pairs_are_on_the_same_prompts(two):
    a, b = two
    pairs, differs, alone = match(load.read(a), load.read(b))
    assert differs == {"stride": ("8", "16")}
    assert alone == []
    assert pairs["paired"].all()
    assert pairs["label"].tolist() == ["xattention, τ 0.7", "xattention, τ 0.8"]
    for i, setting in enumerate(SETTINGS[:2]):
        first, second = (
            np.array([s["score"] for s in samples_of(sweep, setting)]) for sweep in (a, b)
        )
        expected = stats.paired_delta(second, first)
        columns = ["delta", "delta_low", "delta_high", "p_value"]
        assert pairs.loc[i, columns].tolist() == pytest.approx(expected)
        assert pairs.loc[i, "speedup"] == pytest.approx(2.0, rel=0.05)
    assert pairs["p_adjusted"].tolist() == pytest.approx(stats.holm(pairs["p_value"].tolist()))


def test_without_samples_the_difference_is_unpaired(two):
    for sweep in two:
        for file in sweep.parent.parent.glob("runs/*/samples.jsonl"):
            file.unlink(missing_ok=True)
    pairs, _, _ = match(*map(load.read, two))
    row = pairs.iloc[0]
    assert not row["paired"]
    assert row["delta"] == pytest.approx(row["accuracy_b"] - row["accuracy_a"])
    assert row["delta_low"] < row["delta"] < row["delta_high"]
    assert np.isnan(row["p_adjusted"])
    assert np.isnan(row["speedup"])


def test_times_of_two_hosts_are_not_compared(tmp_path):
    a = make_sweep(tmp_path, name="a", lengths=(2048,), n=6, settings=SETTINGS[:1])
    b = make_sweep(tmp_path, name="b", lengths=(2048,), n=6, settings=SETTINGS[:1], host="node-2")
    pairs, differs, _ = match(load.read(a), load.read(b))
    assert differs == {"host": ("node-1", "node-2")}
    assert pairs["paired"].all()
    assert pairs["speedup"].isna().all()


def test_rows_without_a_partner_are_listed(tmp_path):
    a = make_sweep(tmp_path, name="a", lengths=(2048,), n=6, settings=SETTINGS[:2])
    b = make_sweep(tmp_path, name="b", lengths=(2048,), n=6, settings=SETTINGS[1:3])
    pairs, _, alone = match(load.read(a), load.read(b))
    assert len(pairs) == 1
    assert alone == [
        "xattention, τ 0.7 on niah at 2,048 tokens only in a",
        "xattention, τ 0.9 on niah at 2,048 tokens only in b",
    ]


def test_macro_rows_are_paired_over_tasks(tmp_path):
    make = {"lengths": (2048,), "n": 10, "tasks": ("vt", "cwe"), "settings": SETTINGS[:1]}
    a, b = make_sweep(tmp_path, name="a", **make), make_sweep(tmp_path, name="b", **make)
    pairs, differs, _ = match(load.read(a), load.read(b))
    assert differs == {}
    macro = pairs[pairs["task"] == "mean"].iloc[0]
    assert (macro["n"], macro["delta"], macro["p_value"]) == (20, 0.0, 1.0)


def test_sweeps_with_nothing_in_common_are_refused(tmp_path):
    a = make_sweep(tmp_path, name="a", lengths=(2048,), n=4, settings=SETTINGS[:1])
    b = make_sweep(tmp_path, name="b", lengths=(4096,), n=4, settings=SETTINGS[:1])
    with pytest.raises(ValueError, match="a and b share no configuration"):
        match(load.read(a), load.read(b))


def test_the_page_and_its_csv(two, tmp_path, capsys):
    a, b = two
    html = compare(a, b, out=tmp_path / "out").read_text()
    assert "stride: 8 in A, 16 in B" in html
    assert (tmp_path / "out" / "compare-b.csv").is_file()
    assert main([str(a), str(b)]) == 0
    assert capsys.readouterr().out.strip() == str(a / "report" / "compare-b.html")
    assert json.loads((a / "index.json").read_text())["points"]  # the sweep itself is untouched

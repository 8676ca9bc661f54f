"""The published knee: the tables prove a loss, the page says what is in them."""

import re
from pathlib import Path

import pytest

from experiments.study import figures, tables
from xsparse import stats
from xsparse.report import load

KNEE = Path(__file__).parents[2] / "results/published/cpu/knee"


def test_threshold_0_is_visibly_worse_than_dense():
    samples = tables.samples(KNEE)
    own = tables.where(samples, {"selector": "xattention", "threshold": 0.0})
    own = own[own["mass_recall"].isna()]
    cells = [cell for _, cell in own.groupby(["task", "length"])]
    assert all(len(cell) >= 8 for cell in cells)
    pairs = [(cell["score"].tolist(), cell["dense_score"].tolist()) for cell in cells]
    delta, _, high, p = stats.macro_delta(pairs)
    assert delta < high < 0
    assert p < stats.ALPHA


def test_the_page_names_every_point():
    rows = load.primary(load.split_dense(tables.as_selected(tables.rows(KNEE)))[0])
    page = (KNEE / "README.md").read_text()
    stated = re.findall(r"^\| (.*?) \| ([\d.]+) % \| (\d+)/16 \| ", page, re.MULTILINE)
    measured = {row["label"]: row for row in load.records(rows)}
    assert {label for label, *_ in stated} == set(measured)
    for label, density, right in stated:
        assert float(density) == pytest.approx(100 * measured[label]["mask_density"], abs=0.051)
        assert int(right) == pytest.approx(16 * measured[label]["accuracy"])


def test_the_figures_are_those_of_the_tables(tmp_path):
    figures.write(KNEE, tmp_path)
    made = {file.name for file in tmp_path.iterdir()}
    assert made == {file.name for file in (KNEE / "figures").iterdir()}

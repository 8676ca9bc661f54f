"""Figures: what is drawn, read back from the artists."""

import numpy as np
import pandas as pd
import pytest
from synthetic_sweeps import SETTINGS, make_samples

from xsparse.report import figures, load
from xsparse.report.front import pareto_front


def rows_of(sweep):
    read = load.read(sweep)
    return [*load.records(read.rows), *load.records(read.dense)]


def test_pareto_has_one_accuracy_range_and_a_front_of_steps(sweep):
    figure = figures.pareto(rows_of(sweep))
    assert len(figure.axes) == 2
    assert len({ax.get_ylim() for ax in figure.axes}) == 1
    ax = figure.axes[0]
    steps = [line for line in ax.lines if line.get_drawstyle() == "steps-post"]
    density = np.array([s.density for s in SETTINGS])
    accuracy = np.array([1 - s.lost for s in SETTINGS])
    front = pareto_front(density, accuracy, minimise_x=True)
    assert len(steps) == 1
    assert steps[0].get_xdata() == pytest.approx(density[front] * 100, abs=0.1)
    assert steps[0].get_ydata() == pytest.approx(accuracy[front] * 100, abs=3)
    dashed = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in dashed] == [100.0]  # dense


def test_pareto_over_speedup_steps_the_other_way(sweep):
    figure = figures.pareto(rows_of(sweep), x="prefill_speedup")
    assert any(line.get_drawstyle() == "steps-pre" for line in figure.axes[0].lines)


def test_unknown_axis_is_refused(sweep):
    with pytest.raises(ValueError, match="x='speed' is not an axis"):
        figures.pareto(rows_of(sweep), x="speed")


def test_rows_without_the_baselines_run_still_show_its_accuracy(sweep):
    figure = figures.pareto(load.read(sweep).rows)
    assert any(line.get_linestyle() == "--" for line in figure.axes[0].lines)


def test_stage_bars_put_dense_first(sweep):
    figure = figures.stage_bars(rows_of(sweep))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names[0] == "dense"
    assert len(names) == 1 + len(SETTINGS)
    ends = [bar.get_x() + bar.get_width() for bar in figure.axes[0].patches]
    dense = load.read(sweep).dense.query("length == 2048 and task == 'niah'").iloc[0]
    stages = [f"{stage}_s" for stage in (*figures.STAGES, "rest")]
    assert max(ends) == pytest.approx(dense[stages].sum())


def test_heat_grid_means_and_counts():
    samples = [s for length in (1024, 2048) for s in make_samples("niah", length, 10, SETTINGS[0])]
    mean, count = figures.heat_grid(samples)
    assert list(mean.index) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert list(mean.columns) == [1024, 2048]
    assert (count == 2).all(axis=None)
    at = [s["score"] for s in samples if s["length"] == 2048 and s["meta"]["depth"] == 0.25]
    assert mean.loc[0.25, 2048] == np.mean(at)


def test_heat_grid_takes_samples_as_a_frame():
    samples = make_samples("niah", 1024, 10, SETTINGS[0])
    assert figures.heat_grid(pd.DataFrame(samples))[0].equals(figures.heat_grid(samples)[0])


def test_dense_alone_can_be_drawn(sweep):
    assert len(figures.pareto(load.read(sweep).dense).axes) == 2


def test_heatmap_has_depth_0_at_the_top_and_a_fixed_scale():
    samples = make_samples("niah", 1024, 10, SETTINGS[0])[:9]
    for sample in samples:
        sample["score"] = 0.25 + 0.5 * sample["score"]  # the scale must not follow the data
    figure = figures.heatmap(samples, title="x")
    ax = figure.axes[0]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    assert ax.images[0].get_clim() == (0, 1)
    assert "n = 1 to 2 per cell, 9 in all" in ax.get_title(loc="left")


def test_a_heatmap_without_depths_is_refused():
    with pytest.raises(ValueError, match="needs samples with a needle depth"):
        figures.heatmap(make_samples("vt", 1024, 3, None))


def test_figures_are_reproducible(sweep, tmp_path):
    for name in ("a", "b"):
        figures.save(figures.pareto(rows_of(sweep)), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()

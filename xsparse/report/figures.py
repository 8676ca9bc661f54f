"""Figures over result rows and samples, as matplotlib Figures without pyplot's global state.

One colour per selector, one marker per length, dense attention in grey. Sizes are chosen for a
column of 400 pixels, so that text is still legible on a telephone.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from xsparse.report import load, text
from xsparse.report.front import pareto_front
from xsparse.rows import STAGES

Rows = pd.DataFrame | Iterable[Mapping[str, Any]]

# Okabe and Ito: told apart by every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
DENSE_COLOUR = "#555555"
STAGE_COLOURS = dict(
    zip(
        (*STAGES, "rest"),
        ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#C8C8C8"),
        strict=True,
    )
)
WIDTH_IN = 4.8
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "xsparse",  # the same figure gives the same bytes
}

X_AXES = {
    "mask_density": ("mask density (%)", 100.0, True),
    "executed_density": ("executed density (%)", 100.0, True),
    "page_density": ("page density (%)", 100.0, True),
    "transfer_ratio": ("transfer (% of K+V history)", 100.0, True),
    "prefill_speedup": ("prefill speed-up (×)", 1.0, False),
    "decode_speedup": ("decode speed-up (×)", 1.0, False),
}


def pareto(rows: Rows, x: str = "mask_density") -> Figure:
    """Accuracy against a cost or a speed-up, a panel per (task, length), one accuracy range.

    rows: result rows, dense ones (selector `full`) included where there are any; alone they are
    drawn as points. The front joins non-dominated points by steps; dominated points are faded;
    bars are 95 % intervals.
    Raises ValueError for an unknown `x`.
    """
    if x not in X_AXES:
        raise ValueError(f"x={x!r} is not an axis, allowed are {list(X_AXES)}")
    label, scale, minimise = X_AXES[x]
    points, dense = _split(rows)
    points = load.primary(points if len(points) else dense)
    groups = load.panels(points[points[x].notna()])
    with matplotlib.rc_context(STYLE):
        figure, axes = _panels(len(groups))
        colours, markers = _colours(points), _markers(points)
        accuracy_range = _accuracy_range(points, dense)
        for ax, (key, group) in zip(axes, groups, strict=True):
            _draw_dense(ax, group, dense, key)
            if not minimise:
                ax.axvline(1.0, color=DENSE_COLOUR, linewidth=0.8, linestyle=":")
            xs = group[x].to_numpy() * scale
            ys = group["accuracy"].to_numpy() * 100
            front = pareto_front(xs, ys, minimise_x=minimise)
            # Between two points of the front the cheaper one is what can be had at that budget.
            steps = "steps-post" if minimise else "steps-pre"
            ax.plot(xs[front], ys[front], drawstyle=steps, color="#222222", linewidth=1.1, zorder=2)
            for i, row in enumerate(load.records(group)):
                on_front = i in front
                _draw_point(ax, row, x, scale, colours, markers, faded=not on_front)
                if on_front and len(front) <= 10:
                    ax.annotate(
                        row["short_label"],
                        (xs[i], ys[i]),
                        xytext=(5, -9),
                        textcoords="offset points",
                        fontsize=8,
                        color="#333333",
                    )
            ax.set_title(_panel_title(key, group))
            ax.set_ylim(*accuracy_range)
            ax.set_xlim(*_limits(xs, dense_at=100.0 if minimise else 1.0))
        _label_axes(axes, label, "accuracy (%)")
        _legend(figure, colours, markers)
    return figure


def densities(rows: Rows) -> Figure:
    """What the mask costs to move: page density and traffic against mask density.

    Above the diagonal more is moved than the mask keeps: the price of whole pages, shared heads
    and estimation reads.
    """
    points, _ = _split(rows)
    points = load.primary(points)
    groups = load.panels(points[points["transfer_ratio"].notna() | points["page_density"].notna()])
    with matplotlib.rc_context(STYLE):
        figure, axes = _panels(len(groups))
        colours = _colours(points)
        top = 100 * np.nanmax([1.0, points["transfer_ratio"].max(), points["page_density"].max()])
        for ax, (key, group) in zip(axes, groups, strict=True):
            ax.plot([0, 100], [0, 100], color=DENSE_COLOUR, linewidth=0.8, linestyle=":")
            for row in load.records(group):
                at, colour = row["mask_density"] * 100, colours[row["selector"]]
                pages, moved = row["page_density"] * 100, row["transfer_ratio"] * 100
                ax.plot([at, at], [pages, moved], color=colour, linewidth=0.8, alpha=0.5)
                ax.plot(at, pages, marker="s", color=colour, markersize=5.5, linestyle="none")
                ax.plot(
                    at,
                    moved,
                    marker="o",
                    color=colour,
                    markersize=6,
                    linestyle="none",
                    markerfacecolor="white",
                    markeredgewidth=1.4,
                )
            ax.set_title(_panel_title(key, group))
            ax.set_xlim(0, 103)
            ax.set_ylim(0, top * 1.05)
        _label_axes(axes, X_AXES["mask_density"][0], "% of history")
        handles: list[Artist] = [Patch(color=c, label=name) for name, c in colours.items()]
        handles.append(_key("s", "pages in the set"))
        handles.append(_key("o", "bytes moved to the device", hollow=True))
        handles.append(Line2D([], [], color=DENSE_COLOUR, linestyle=":", label="equal"))
        _place_legend(figure, handles)
    return figure


def stage_bars(rows: Rows) -> Figure:
    """Stage seconds per prompt of every point beside dense, a panel per (task, length).

    Stages are event sums that may overlap, so a bar need not end at the wall time; the tick is
    the median time to first token.
    """
    points, dense = _split(rows)
    if not len(points):
        points, dense = dense, dense.iloc[:0]
    groups = load.panels(load.primary(points))
    bars = []
    for key, group in groups:
        twins = _dense_of(dense, group, key)
        bars.append((key, pd.concat([twins, group], ignore_index=True) if len(twins) else group))
    heights = [len(group) + 1.2 for _, group in bars]
    with matplotlib.rc_context(STYLE):
        height = 0.27 * sum(heights) + 0.25 * len(bars) + 1.1
        figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
        axes = figure.subplots(len(bars), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
        for ax, (key, group) in zip(axes[:, 0], bars, strict=True):
            at = np.arange(len(group))
            left = np.zeros(len(group))
            for stage, colour in STAGE_COLOURS.items():
                width = group[f"{stage}_s"].fillna(0).to_numpy()
                ax.barh(at, width, left=left, height=0.68, color=colour)
                left += width
            ttft = group["ttft_s"].to_numpy()
            ax.plot(ttft, at, linestyle="none", marker="|", markersize=13, color="#111111")
            ax.set_yticks(at, list(group["label"]), fontsize=8)
            ax.invert_yaxis()
            ax.set_xlim(0, 1.05 * np.nanmax([left.max(), *ttft]))
            ax.grid(axis="y", visible=False)
            ax.set_title(_panel_title(key, group))
        axes[-1, 0].set_xlabel("seconds per prompt")
        handles: list[Artist] = [Patch(color=c, label=name) for name, c in STAGE_COLOURS.items()]
        handles.append(_key("|", "time to first token"))
        _place_legend(figure, handles)
    return figure


def heatmap(samples: Rows, title: str = "") -> Figure:
    """NIAH scores by length and needle depth, colour fixed to 0..1, number of samples stated.

    samples: lines of samples.jsonl (task `niah`) as dicts or as a frame; `depth` may also be a
        column of its own.
    Raises ValueError where no sample has a depth.
    """
    with matplotlib.rc_context(STYLE):
        depths = min(len(heat_grid(samples)[0]), 14)
        figure = Figure(figsize=(WIDTH_IN, 1.7 + 0.26 * max(5, depths)), layout="constrained")
        ax = figure.subplots()
        image = draw_heat(ax, samples, title)
        ax.set_xlabel("context length (tokens)")
        ax.set_ylabel("depth of the needle (%)")
        figure.colorbar(image, ax=ax, label="mean score (0 to 1)", pad=0.02)
    return figure


def draw_heat(ax: Axes, samples: Rows, title: str, *, written: bool = True) -> AxesImage:
    """One map of `heatmap` on an Axes; written: the score of each cell where they are few."""
    mean, count = heat_grid(samples)
    depths, lengths = list(mean.index), list(mean.columns)
    ax.set_facecolor("#F0F0F0")
    ax.grid(visible=False)
    image = ax.imshow(
        np.ma.masked_invalid(mean.to_numpy()), cmap="cividis", vmin=0, vmax=1, aspect="auto"
    )
    if written and mean.size <= 80:
        _write_cells(ax, mean)
    _ticks(ax.set_xticks, [f"{length:,}" for length in lengths], most=10)
    _ticks(ax.set_yticks, [f"{100 * depth:.0f}" for depth in depths], most=15)
    counts = count.to_numpy()
    few, many = int(counts[counts > 0].min()), int(counts.max())
    per_cell = f"n = {few}" if few == many else f"n = {few} to {many}"
    missing = ", grey: not measured" if (counts == 0).any() else ""
    heading = f"{title}\n" if title else ""
    ax.set_title(f"{heading}{per_cell} per cell, {counts.sum()} in all{missing}", fontsize=9)
    return image


def heat_grid(samples: Rows) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(mean score, number of samples), each [depths, lengths], depth 0 first."""
    lines = load.records(samples) if isinstance(samples, pd.DataFrame) else samples
    data = pd.DataFrame(
        [(s["length"], (s.get("meta") or s).get("depth"), s["score"]) for s in lines],
        columns=["length", "depth", "score"],
    )
    data = data.dropna(subset=["depth", "score"])
    if not len(data):
        raise ValueError("a heat map needs samples with a needle depth, got none")
    data = data.assign(depth=data["depth"].astype(float).round(4))
    grid = data.pivot_table(
        index="depth", columns="length", values="score", aggfunc=["mean", "count"]
    )
    mean, count = grid.xs("mean", axis=1), grid.xs("count", axis=1)
    return pd.DataFrame(mean), pd.DataFrame(count).fillna(0).astype(int)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `<stem>.png` (200 dpi) and `<stem>.svg`; the same figure gives the same bytes."""
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    with matplotlib.rc_context(STYLE):
        figure.savefig(files[0], dpi=200, metadata={"Software": None})
        figure.savefig(files[1], metadata={"Date": None, "Creator": None})
    return files


def data_uri(svg: Path) -> str:
    """An SVG as the source of an <img>: sharp at every width, its ids kept from the page's."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.read_bytes()).decode("ascii")


def _split(rows: Rows) -> tuple[pd.DataFrame, pd.DataFrame]:
    points, dense = load.split_dense(load.frame(rows))
    return points, load.dense_reference(dense, points)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    if not count:
        raise ValueError("no row has a value to draw")
    columns = 1 if count == 1 else 2
    lines = -(-count // columns)
    height = (2.8 if count == 1 else 2.3 * lines) + 1.0
    figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def _label_axes(axes: list[Axes], x: str, y: str) -> None:
    for ax in axes:
        ax.set_xlabel(x)
        if ax.get_subplotspec().is_first_col():  # pyright: ignore[reportOptionalMemberAccess]
            ax.set_ylabel(y)


def _panel_title(key: tuple[Any, Any, Any], group: pd.DataFrame) -> str:
    task, tasks, length = key
    few, many = int(group["n"].min()), int(group["n"].max())
    n = f"n = {few}" if few == many else f"n = {few} to {many}"
    return f"{text.task_name(task, tasks)}\n{text.tokens(length)}, {n}"


def _colours(points: pd.DataFrame) -> dict[str, str]:
    selectors = sorted(points["selector"].dropna().unique())
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(selectors)}


def _markers(points: pd.DataFrame) -> dict[float, str]:
    lengths = sorted(points["length"].dropna().unique())
    return {length: MARKERS[i % len(MARKERS)] for i, length in enumerate(lengths)}


def _accuracy_range(points: pd.DataFrame, dense: pd.DataFrame) -> tuple[float, float]:
    bounds = [points["accuracy_low"], points["accuracy_high"], points["accuracy"]]
    shown = load.primary(dense) if len(dense) else dense
    values = pd.concat([*bounds, points["dense_accuracy"], shown["accuracy_low"]]) * 100
    low, high = values.min(), values.max()
    margin = max(1.5, 0.06 * (high - low))
    return max(-3.0, low - margin), min(103.0, high + margin)


def _limits(xs: np.ndarray, *, dense_at: float) -> tuple[float, float]:
    """Room around the points; the dense value is in view."""
    low, high = min(xs.min(), dense_at), max(xs.max(), dense_at)
    margin = 0.06 * (high - low) or 0.1 * high
    return low - margin, high + margin


def _dense_of(dense: pd.DataFrame, group: pd.DataFrame, key: tuple[Any, Any, Any]) -> pd.DataFrame:
    """Dense rows of a panel, one per setting that gave another number of tasks or baseline."""
    task, tasks, length = key
    found = dense[(dense["task"] == task) & (dense["length"] == length)]
    if task == "mean":
        found = found[found["tasks"] == tasks]
    if len(found) > 1 and group["dense_run_id"].notna().any():
        own = found[found["run_id"].isin(group["dense_run_id"])]
        found = own if len(own) else found
    return found.drop_duplicates(["model", "dtype", "engine", "chunk_size", "device", "host"])


def _draw_dense(
    ax: Axes, group: pd.DataFrame, dense: pd.DataFrame, key: tuple[Any, Any, Any]
) -> None:
    found = _dense_of(dense, group, key)
    for row in load.records(found):
        ax.axhspan(
            row["accuracy_low"] * 100,
            row["accuracy_high"] * 100,
            color=DENSE_COLOUR,
            alpha=0.10,
            linewidth=0,
        )
        ax.axhline(row["accuracy"] * 100, color=DENSE_COLOUR, linewidth=1.2, linestyle="--")
    if not len(found):  # the baseline's own run is not at hand: its mean is, its interval is not
        for accuracy in group["dense_accuracy"].dropna().unique():
            ax.axhline(accuracy * 100, color=DENSE_COLOUR, linewidth=1.2, linestyle="--")


def _draw_point(
    ax: Axes,
    row: Mapping[str, Any],
    x: str,
    scale: float,
    colours: Mapping[str, str],
    markers: Mapping[float, str],
    *,
    faded: bool,
) -> None:
    at, value = row[x] * scale, row["accuracy"] * 100
    errors: dict[str, Any] = {
        "yerr": [[value - row["accuracy_low"] * 100], [row["accuracy_high"] * 100 - value]]
    }
    if not text.is_null(row.get(f"{x}_low")):
        errors["xerr"] = [[at - row[f"{x}_low"] * scale], [row[f"{x}_high"] * scale - at]]
    ax.errorbar(
        at,
        value,
        **errors,
        color=colours[row["selector"]],
        marker=markers[row["length"]],
        markersize=6.5,
        elinewidth=1.0,
        alpha=0.35 if faded else 1.0,
        zorder=3,
    )


def _legend(figure: Figure, colours: Mapping[str, str], markers: Mapping[float, str]) -> None:
    handles: list[Artist] = [Patch(color=c, label=name) for name, c in colours.items()]
    handles += [_key(marker, text.tokens(length)) for length, marker in markers.items()]
    handles.append(Line2D([], [], color="#222222", linewidth=1.1, label="front"))
    handles.append(Line2D([], [], color=DENSE_COLOUR, linestyle="--", label="dense, 95 % interval"))
    _place_legend(figure, handles)


def _place_legend(figure: Figure, handles: list[Artist]) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=3, columnspacing=1.2)


def _key(marker: str, label: str, *, hollow: bool = False) -> Line2D:
    face = "white" if hollow else "#333333"
    return Line2D(
        [], [], color="#333333", marker=marker, linestyle="none", markerfacecolor=face, label=label
    )


def _write_cells(ax: Axes, mean: pd.DataFrame) -> None:
    for (row, column), value in np.ndenumerate(mean.to_numpy()):
        if not np.isnan(value):
            colour = "#FFFFFF" if value < 0.5 else "#111111"
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)


def _ticks(set_ticks: Any, labels: list[str], *, most: int) -> None:
    step = -(-len(labels) // most)
    set_ticks(range(0, len(labels), step), labels[::step])

"""What the figures of a study have in common: style, panels, points with intervals, legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from xsparse.report import figures as drawn
from xsparse.report import text

WIDE_IN = 7.2  # two columns of a page
STYLE = {
    **drawn.STYLE,
    "axes.titlesize": 8,
    "axes.labelsize": 8.5,
    "figure.titlesize": 8.5,
    "figure.labelsize": 8.5,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}

Named = dict[str, Figure]
styled = matplotlib.rc_context(STYLE)  # a decorator, too


def grid(count: int, *, columns: int, height_in: float = 1.55) -> tuple[Figure, list[Axes]]:
    columns = min(columns, count)
    lines = -(-count // columns)
    width_in = WIDE_IN if columns > 2 else drawn.WIDTH_IN
    figure = Figure(figsize=(width_in, height_in * lines + 1.1), layout="constrained")
    cells = figure.subplots(lines, columns, squeeze=False, sharey=True)
    axes = list(cells.flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def edges(axes: Sequence[Axes], x: str, y: str) -> None:
    """Labels at the left and below the last panel of each column."""
    last = {}
    for ax in axes:
        place: Any = ax.get_subplotspec()
        last[place.colspan.start] = ax
        if place.is_first_col():
            ax.set_ylabel(y)
    for ax in last.values():
        ax.set_xlabel(x)


def point(ax: Axes, x: float, bounds: Sequence[float | None], *, color: str, **look: Any) -> None:
    """A value with its interval, which may be unknown. bounds: value, low, high"""
    value, low, high = bounds
    assert value is not None
    # A bootstrap of a ratio may miss the ratio by rounding.
    bars = None if low is None or high is None else [[max(0, value - low)], [max(0, high - value)]]
    look = {"markersize": 4.5, "elinewidth": 1.0, "linestyle": "none", **look}
    ax.errorbar(x, value, yerr=bars, color=color, zorder=3, **look)


def band(ax: Axes, xs: list[Any], ratios: list[tuple[Any, Any, Any]], colour: str) -> None:
    value, low, high = np.array([percent(ratio) for ratio in ratios], dtype=float).T
    ax.plot(xs, value, color=colour, linewidth=1.1)
    ax.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def percent(bounds: Sequence[float | None]) -> list[float | None]:
    return [None if bound is None else 100 * bound for bound in bounds]


def interval(ratio: tuple[Any, Any, Any]) -> str:
    return f"{text.with_interval(*ratio)} %"


def span(values: Any) -> str:
    few, many = int(min(values)), int(max(values))
    return f"{few}" if few == many else f"{few} to {many}"


def looks(selectors: pd.Series) -> tuple[dict[str, str], dict[str, str]]:
    names = sorted(selectors.dropna().unique())
    colours, markers = cycle(len(names)), cycle(len(names), drawn.MARKERS)
    return dict(zip(names, colours, strict=True)), dict(zip(names, markers, strict=True))


def cycle(count: int, values: Sequence[str] = drawn.COLOURS) -> list[str]:
    return [values[i % len(values)] for i in range(count)]


def keys(colours: dict[str, str], markers: dict[str, str]) -> list[Artist]:
    return [
        Line2D([], [], color=colours[name], marker=markers[name], linestyle="none", label=name)
        for name in colours
    ]


def dot(face: str, label: str) -> Line2D:
    look = {"color": "#333333", "marker": "o", "linestyle": "none"}
    return Line2D([], [], markerfacecolor=face, label=label, **look)  # pyright: ignore


def finish(figure: Figure, handles: list[Artist], about: str) -> None:
    figure.suptitle(about)
    figure.legend(handles=handles, loc="outside lower center", ncols=3)

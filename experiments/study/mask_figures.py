"""Figures from heads.parquet and traffic.parquet, which experiments/study/masks.py writes.

They say where in a model a mask is sparse, and what pages and reductions make of it.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.study import panels, tables
from xsparse import stats
from xsparse.report import figures as drawn
from xsparse.report import load, text

POINT = ["selector", "threshold", "stride"]
MOST_MAPS = 3  # side by side
REDUCTIONS = ["reduce_heads", "reduce_queries", "reduce_sub_blocks"]


@panels.styled
def heads(table: pd.DataFrame) -> panels.Named:
    """Mask density by layer and head at the longest length, and by layer at every length."""
    sites = [*POINT, "length", "layer", "head"]
    sums = table.groupby(sites, dropna=False)[["mask_kept", "mask_causal"]].sum().reset_index()
    sums["density"] = sums["mask_kept"] / sums["mask_causal"]
    points = _points(table)
    longest = table["length"].max()
    shown = [p for p in points if (p.of(table)["length"] == longest).any()][:MOST_MAPS]
    maps = Figure(figsize=(panels.WIDE_IN, 3.4), layout="constrained")
    axes = maps.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for ax, point in zip(axes, shown, strict=True):
        own = point.of(sums)
        grid = own[own["length"] == longest].pivot(index="layer", columns="head", values="density")
        ax.grid(visible=False)
        image = ax.imshow(100 * grid, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        lines = point.of(table)
        lines = lines[lines["length"] == longest]
        ratio, n = _ratio(lines, "mask_kept", "mask_causal")
        ax.set_title(f"{point.name}\n{panels.interval(ratio)}, n = {n}")
        ax.set_xlabel("query head")
    axes[0].set_ylabel("layer")
    maps.suptitle(f"{text.tokens(longest)}; mean with 95 % interval over prompts")
    maps.colorbar(image, ax=list(axes), label="mask density (%)", pad=0.01)
    figure, axes = panels.grid(len(points), columns=2, height_in=2.3)
    lengths = sorted(table["length"].unique())
    colours = dict(zip(lengths, panels.cycle(len(lengths)), strict=True))
    for ax, point in zip(axes, points, strict=True):
        own, ns = point.of(table), []
        for length, at_length in own.groupby("length"):
            found = [_ratio(lines, "mask_kept", "mask_causal") for _, lines in _by_layer(at_length)]
            ns.append(found[0][1])
            layers = [layer for layer, _ in _by_layer(at_length)]
            panels.band(ax, layers, [ratio for ratio, _ in found], colours[length])
        ax.set_title(f"{point.name}\nn = {panels.span(ns)} prompts")
        ax.set_ylim(0, 103)
    panels.edges(axes, "layer", "mask density (%)")
    keys: list[Artist] = [
        Line2D([], [], color=colours[length], label=text.tokens(length)) for length in lengths
    ]
    panels.finish(figure, keys, "bands: 95 % interval over prompts")
    return {"density_heads": maps, "density_layers": figure}


@panels.styled
def traffic(table: pd.DataFrame) -> panels.Named:
    """Pages, bytes and executed blocks against the blocks of a page, a line per reduction.

    One figure per point, a column per length. What moves (pages, bytes) and what is computed
    (executed) stand together, since a reduction that moves less may drop blocks of the mask.
    """
    measures = {
        "page density (%)": ("pages_moved", "pages_history"),
        "transfer (% of K+V)": ("bytes_moved", "bytes_history"),
        "executed (%)": ("executed", "mask_causal"),
    }
    table = table.assign(
        reduction=table[REDUCTIONS].astype(object).fillna("–").agg(" / ".join, axis=1)
    )
    kinds = sorted(table[["transfer", "reduction"]].drop_duplicates().itertuples(index=False))
    looks = dict(zip(map(tuple, kinds), panels.cycle(len(kinds)), strict=True))
    marks = dict(zip(looks, panels.cycle(len(kinds), drawn.MARKERS), strict=True))
    made = {}
    for point in _points(table):
        own = point.of(table)
        lengths, ratios = (sorted(own[c].unique()) for c in ("length", "block_size_ratio"))
        size = (min(panels.WIDE_IN, 2.4 + 1.9 * len(lengths)), 5.6)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(measures), len(lengths), squeeze=False, sharey="row")
        for column, length in enumerate(lengths):
            ns = []
            for row, (label, (over, under)) in enumerate(measures.items()):
                ax = grid[row, column]
                for kind, lines in own[own["length"] == length].groupby(
                    ["transfer", "reduction"], dropna=False
                ):
                    by_ratio = [
                        (ratios.index(ratio), *_ratio(cell, over, under))
                        for ratio, cell in lines.groupby("block_size_ratio")
                        if cell[under].sum() > 0
                    ]
                    ns += [n for _, _, n in by_ratio]
                    look = {"color": looks[kind], "marker": marks[kind]}
                    for at, ratio, _ in by_ratio:
                        panels.point(ax, at, panels.percent(ratio), **look)
                    values = [100 * ratio[0] for _, ratio, _ in by_ratio]
                    ax.plot([at for at, *_ in by_ratio], values, color=looks[kind])
                ax.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
                ax.set_ylim(bottom=0)
                if column == 0:
                    ax.set_ylabel(label)
            grid[0, column].set_title(f"{text.tokens(length)}\nn = {panels.span(ns)}")
            grid[-1, column].set_xlabel("blocks of a page")
        keys: list[Artist] = [
            Line2D([], [], color=looks[kind], marker=marks[kind], label=", ".join(kind))
            for kind in looks
        ]
        about = f"{point.name}; bars: 95 % interval over prompts; heads / queries / sub-blocks"
        panels.finish(figure, keys, about)
        made[f"traffic_{point.slug}"] = figure
    return made


class Point:
    """selector, threshold and stride of lines of heads.parquet or traffic.parquet."""

    def __init__(self, key: dict[str, Any]):
        self.key = key
        named = {"τ": key["threshold"], "stride": key["stride"]}
        parts = [f"{word} {value:g}" for word, value in named.items() if pd.notna(value)]
        self.name = ", ".join([str(key["selector"]), *parts])
        self.slug = self.name.replace("τ ", "").replace(", ", "_").replace(" ", "_")

    def of(self, table: pd.DataFrame) -> pd.DataFrame:
        return tables.where(table, self.key)


def _points(table: pd.DataFrame) -> list[Point]:
    """The points of a table, sparsest thresholds last."""
    found = table[POINT].drop_duplicates().sort_values(POINT, ascending=[True, False, True])
    return [Point(record) for record in load.records(found)]


def _by_layer(lines: pd.DataFrame) -> list[tuple[Any, pd.DataFrame]]:
    return list(lines.groupby("layer"))


def _ratio(lines: pd.DataFrame, over: str, under: str) -> tuple[tuple[Any, Any, Any], int]:
    """The ratio of two sums with its interval over prompts, and the number of prompts."""
    prompts = lines.groupby(["task", "length", "index"], observed=True)[[over, under]].sum()
    prompts = prompts[prompts[under] > 0]
    ratio = stats.ratio_ci(prompts[over].tolist(), prompts[under].tolist())
    return ratio, len(prompts)

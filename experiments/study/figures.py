"""Every figure of a study from its committed tables: what xsparse.report draws, and five more.

Sizes are those of half a page; colours are told apart by every kind of colour vision; every panel
says n, and every value but a cell of a map has its 95 % interval.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.study import mask_figures, panels, tables
from xsparse import stats
from xsparse.report import figures as drawn
from xsparse.report import load, text
from xsparse.report.findings import BUSY_SHARE, with_losses
from xsparse.rows import MACRO_TASK

MAP_THRESHOLDS = (0.9, 0.8)
NIAH = "niah"
ORACLE = "oracle_topp"


def write(folder: Path, out: Path) -> list[str]:
    """Draw what the tables of `folder` allow into `out` as PNG and SVG; says what, in lines."""
    rows, samples = tables.rows(folder), tables.samples(folder)
    parts: dict[str, Callable[[], panels.Named]] = {
        "pareto_mask_density": lambda: pareto(rows, "mask_density"),
        "pareto_prefill_speedup": lambda: pareto(rows, "prefill_speedup"),
        "tolerance": lambda: tolerance(rows),
        "niah": lambda: niah(samples),
        "heads": lambda: mask_figures.heads(tables.read(folder, "heads")),
        "mass": lambda: mass(rows, samples),
        "traffic": lambda: mask_figures.traffic(tables.read(folder, "traffic")),
    }
    lines = []
    out.mkdir(parents=True, exist_ok=True)
    for part, draw in parts.items():
        try:
            made = draw()
        except ValueError as error:
            lines.append(f"{part}: left out, {error}")
            continue
        for name, figure in made.items():
            drawn.save(figure, out / name)
            lines.append(f"{part}: {out / name}.png, .svg")
    return lines


def pareto(rows: pd.DataFrame, x: str) -> panels.Named:
    """Accuracy against mask density or measured speed-up, a panel per length.

    Raises ValueError where no sparse point has `x`, and for times of a machine that was busy.
    """
    shown = tables.as_selected(rows)
    sparse = load.primary(load.split_dense(shown)[0])
    if not sparse[x].notna().any():
        raise ValueError(f"no sparse row of rows.parquet has {x}")
    share = shown["cpu_share"].min()
    if x == "prefill_speedup" and share < BUSY_SHARE:
        raise ValueError(f"the machine was busy (cpu_share {share:.2f}), its times say nothing")
    return {f"pareto_{x}": drawn.pareto(shown, x)}


@panels.styled
def tolerance(rows: pd.DataFrame) -> panels.Named:
    """Per length: accuracy minus dense against mask density, a panel per task.

    A filled marker is a detected loss, by the rule of the report (interval or Holm's p), with the
    points of its panel as the family.
    """
    sparse = load.split_dense(tables.as_selected(rows))[0]
    sparse = load.without_repeats(sparse[sparse["p_value"].notna()])
    if not len(sparse):
        raise ValueError("rows.parquet has no point with a dense baseline")
    colours, markers = panels.looks(sparse["selector"])
    made = {}
    for length in sorted(sparse["length"].unique()):
        groups = load.panels(sparse[sparse["length"] == length])
        figure, axes = panels.grid(len(groups), columns=4)
        for ax, ((task, n_tasks, _), group) in zip(axes, groups, strict=True):
            ax.axhline(0, color=drawn.DENSE_COLOUR, linewidth=1.0, linestyle="--")
            for row in load.records(with_losses(group)):
                colour = colours[row["selector"]]
                panels.point(
                    ax,
                    100 * row["mask_density"],
                    [100 * row[c] for c in ("delta", "delta_low", "delta_high")],
                    color=colour,
                    marker=markers[row["selector"]],
                    markerfacecolor=colour if row["lost"] else "white",
                )
            ax.set_title(f"{text.task_name(task, n_tasks)}\nn = {panels.span(group['n'])}")
            ax.set_xlim(0, 103)
        panels.edges(axes, "mask density (%)", "points against dense")
        handles = panels.keys(colours, markers)
        handles += [
            panels.dot("white", "no loss detected"),
            panels.dot("#333333", "loss detected"),
            Line2D([], [], color=drawn.DENSE_COLOUR, linestyle="--", label="dense"),
        ]
        panels.finish(figure, handles, f"{text.tokens(length)}; bars: paired 95 % interval")
        made[f"tolerance_{int(length)}"] = figure
    return made


@panels.styled
def differences(pairs: pd.DataFrame, names: tuple[str, str]) -> Figure:
    """`tables.paired` drawn: the second point minus the first by task, a panel per length."""
    lengths = sorted(pairs["length"].unique())
    figure, axes = panels.grid(len(lengths), columns=2, height_in=2.2)
    for ax, length in zip(axes, lengths, strict=True):
        own = pairs[pairs["length"] == length]
        ax.axhline(0, color=drawn.DENSE_COLOUR, linewidth=1.0, linestyle="--")
        for at, row in enumerate(load.records(own)):
            bounds = [100 * row[column] for column in ("delta", "low", "high")]
            panels.point(ax, at, bounds, color=drawn.COLOURS[0], marker="o")
        labels = [f"{task}\nn = {n}" for task, n in zip(own["task"], own["n"], strict=True)]
        ax.set_xticks(range(len(own)), labels, rotation=0 if len(own) < 4 else 90)
        ax.set_xlim(-0.6, len(own) - 0.4)
        ax.set_title(text.tokens(length))
        ax.set_ylabel("points")
    figure.suptitle(f"{names[1]} minus {names[0]}; bars: paired 95 % interval")
    return figure


@panels.styled
def niah(samples: pd.DataFrame) -> panels.Named:
    """Score by length and depth: dense beside the thresholds of `MAP_THRESHOLDS`."""
    found = samples[(samples["task"] == NIAH) & samples["depth"].notna()]
    maps = {"dense": found[found["selector"] == load.DENSE]}
    own = tables.where(tables.unreduced(found), {"selector": "xattention"})
    for threshold in MAP_THRESHOLDS:
        maps[f"xattention {threshold:g}"] = tables.where(own, {"threshold": threshold})
    maps = {name: _one_each(lines) for name, lines in maps.items() if len(lines)}
    if not maps:
        raise ValueError(f"samples.parquet has no {NIAH} prompts of dense or these thresholds")
    figure = Figure(figsize=(panels.WIDE_IN, 3.2), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False, sharey=True)[0]
    for ax, (name, lines) in zip(axes, maps.items(), strict=True):
        mean, low, high = (100 * x for x in stats.mean_ci(lines["score"].tolist()))
        title = f"{name}\n{mean:.1f} % [{low:.1f}, {high:.1f}]"
        image = drawn.draw_heat(ax, lines, title, written=len(maps) == 1)
        ax.set_title(ax.get_title(loc="left"))
        ax.tick_params(axis="x", rotation=45)
    figure.supxlabel("context length (tokens)")
    axes[0].set_ylabel("depth of the needle (%)")
    figure.colorbar(image, ax=list(axes), label="mean score", pad=0.01)
    return {"niah": figure}


@panels.styled
def mass(rows: pd.DataFrame, samples: pd.DataFrame) -> panels.Named:
    """Share of the true attention mass that the mask holds, against its density.

    The oracle, which ranks blocks by that mass, is the bound; other points lie on it or below.
    """
    sparse = load.split_dense(rows)[0]
    measured = sparse[sparse["mass_recall"].notna()]
    if not len(measured):
        raise ValueError("no row of rows.parquet has mass_recall (mass_recall=true)")
    shown = load.primary(tables.as_selected(measured))
    every, markers = panels.looks(sparse["selector"])  # as in the other figures
    colours = {name: every[name] for name in sorted(shown["selector"].unique())}
    groups = load.panels(shown)
    figure, axes = panels.grid(len(groups), columns=2, height_in=2.4)
    for ax, (key, group) in zip(axes, groups, strict=True):
        task, n_tasks, length = key
        found = []
        for row in load.records(group):
            point = {column: row[column] for column in (*tables.POINT, "length")}
            own = tables.where(samples[samples["mass_recall"].notna()], point)
            own = own if task == MACRO_TASK else own[own["task"] == task]
            # The mass of a prompt is one per query, layer and head: in all it goes with its tokens.
            tokens = own["prompt_tokens"].astype(float)
            interval = stats.ratio_ci((own["mass_recall"] * tokens).tolist(), tokens.tolist())
            bounds = panels.percent((row["mass_recall"], *interval[1:]))
            found.append((100 * row["mask_density"], bounds, row["selector"]))
        bound = sorted((x, y[0]) for x, y, selector in found if selector == ORACLE)
        if bound:
            ax.plot(*zip(*bound, strict=True), color=colours[ORACLE], linewidth=1.1)
        for x, y, selector in found:
            panels.point(ax, x, y, color=colours[selector], marker=markers[selector])
        n = panels.span(group["n"])
        ax.set_title(f"{text.task_name(task, n_tasks)}\n{text.tokens(length)}, n = {n}")
        ax.set_xlim(0, 103)
    panels.edges(axes, "mask density (%)", "true mass kept (%)")
    panels.finish(
        figure,
        panels.keys(colours, markers),
        "bars: 95 % interval over prompts; line: oracle, the bound",
    )
    return {"mass_recall": figure}


def _one_each(samples: pd.DataFrame) -> pd.DataFrame:
    """Every prompt once, from the run with the most prompts."""
    size = samples.groupby("run_id")["score"].transform("size")
    order = samples.assign(size=-size).sort_values(["size", "run_id"], kind="stable").index
    return samples.loc[order].drop_duplicates(["task", "length", "index"]).sort_index()

"""From a stored sweep to its report folder: page, figures, and all rows as csv and parquet."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from xsparse.report import figures, load, page, tables, text
from xsparse.report.findings import DENSE_FLOOR, findings, tolerances
from xsparse.rows import COLUMNS
from xsparse.store import RunFolder

NIAH = "niah"
MAX_HEATMAPS = 24

TOLERANCE_RULE = (
    "Per task and length, the sparsest point without a detected loss. A loss counts as detected if "
    "the paired 95 % interval lies below 0, or p < 0.05 after Holm over the points. Not detected "
    "is not the same as absent: the last column says what these prompts could have shown (80 % "
    "power)."
)


def make(
    sweep_dir: Path | str,
    *,
    out: Path | str | None = None,
    runs: Path | str | None = None,
    floor: float = DENSE_FLOOR,
) -> Path:
    """Make the report of a sweep from what is stored; returns the path of report.html.

    sweep_dir: see `load.read`, which raises ValueError where there is nothing to report on.
    out: the report's folder, <sweep>/report by default; files already there are replaced.
    floor: dense accuracy (0..1) below which no conclusion is drawn.
    """
    return write(load.read(sweep_dir, runs), Path(out) if out else None, floor)


def write(sweep: load.Sweep, out: Path | None = None, floor: float = DENSE_FLOOR) -> Path:
    """`make` for a sweep that has been read already."""
    if not 0 <= floor <= 1:
        raise ValueError(f"floor={floor} must lie in 0..1")
    out = out or sweep.folder / "report"
    # Made beside and moved into place, so that an interrupt leaves the old report or none.
    made = out.with_name(f".{out.name}-{os.getpid()}")
    try:
        made.mkdir(parents=True, exist_ok=True)
        write_rows(sweep, made)
        drawn = [_save(drawing, made) for drawing in _drawings(sweep)]
        needles = [_save(drawing, made) for drawing in _heatmaps(sweep)]
        (made / "report.html").write_text(_page(sweep, drawn, needles, floor), encoding="utf-8")
        out.mkdir(exist_ok=True)
        for file in made.iterdir():
            os.replace(file, out / file.name)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return out / "report.html"


def write_rows(sweep: load.Sweep, out: Path) -> None:
    """results.csv and results.parquet: all sparse and dense rows as stored, made rows left out."""
    stored = sweep.dense[sweep.dense["run_id"].notna()]
    rows = pd.concat([sweep.rows, stored.assign(state=load.DONE)], ignore_index=True)
    load.write(rows[[*COLUMNS, "label", "state"]], out / "results")


@dataclass(frozen=True)
class _Drawing:
    name: str
    figure: Figure
    alt: str
    caption: str


def _drawings(sweep: load.Sweep) -> list[_Drawing]:
    both = pd.concat([sweep.rows, sweep.dense], ignore_index=True)
    shown = load.primary(sweep.rows)
    made = []
    bars = "Bars are 95 % intervals; faded points are dominated; the band is dense's interval."
    if shown["mask_density"].notna().any():
        made.append(
            _Drawing(
                "pareto_mask_density",
                figures.pareto(both, "mask_density"),
                "Accuracy against mask density",
                f"Accuracy against the share of causal blocks that the mask keeps. {bars}",
            )
        )
    if shown["prefill_speedup"].notna().any():
        made.append(
            _Drawing(
                "pareto_prefill_speedup",
                figures.pareto(both, "prefill_speedup"),
                "Accuracy against prefill speed-up over dense",
                "Accuracy against prefill speed-up; left of the dotted line sparse is slower "
                f"than dense. {bars}",
            )
        )
    if shown["transfer_ratio"].notna().any():
        made.append(
            _Drawing(
                "densities",
                figures.densities(both),
                "Page density and transfer ratio against mask density",
                "What the mask costs to move. Above the dotted line more is moved than the mask "
                "keeps.",
            )
        )
    if both["attend_s"].notna().any():
        made.append(
            _Drawing(
                "stages",
                figures.stage_bars(both),
                "Seconds per prompt by stage, sparse beside dense",
                "Prefill seconds per prompt by stage, mean over n prompts. Stages may overlap, so "
                "they need not add up to the tick: the median time to first token.",
            )
        )
    return made


def _heatmaps(sweep: load.Sweep) -> list[_Drawing]:
    """One per run with NIAH samples, dense first, the sparse ones sparsest last."""
    runs: dict[str, str] = {}
    for rows in (sweep.dense, sweep.rows.sort_values("mask_density", ascending=False)):
        of_niah = rows[(rows["task"] == NIAH) & rows["run_id"].isin(list(sweep.folders))]
        for run_id, label in zip(of_niah["run_id"], of_niah["label"], strict=True):
            # A baseline is one run per length: its heat map is drawn over all of them.
            key = label if label == load.DENSE_LABEL else run_id
            runs.setdefault(key, label)
    made = []
    for key, label in list(runs.items())[:MAX_HEATMAPS]:
        ids = [key]
        if key == load.DENSE_LABEL:
            ids = list(sweep.dense.loc[sweep.dense["task"] == NIAH, "run_id"].unique())
        samples = [
            sample
            for run_id in ids
            if run_id in sweep.folders
            for sample in RunFolder(sweep.folders[run_id]).samples()
            if sample["task"] == NIAH and (sample.get("meta") or {}).get("depth") is not None
        ]
        if samples:
            made.append(
                _Drawing(
                    f"niah_{_file_name(label)}",
                    figures.heatmap(samples, title=label),
                    f"NIAH score by length and needle depth, {label}",
                    f"NIAH, {label}: mean score by context length and depth of the needle.",
                )
            )
    return made


def _save(drawing: _Drawing, out: Path) -> page.Picture:
    _, svg = figures.save(drawing.figure, out / drawing.name)
    return page.Picture(figures.data_uri(svg), drawing.alt, drawing.caption)


def _page(
    sweep: load.Sweep, drawn: list[page.Picture], needles: list[page.Picture], floor: float
) -> str:
    rows, dense = load.without_repeats(sweep.rows), load.without_repeats(sweep.dense)
    # A folder of baselines alone is reported as such.
    shown = load.primary(sweep.rows if len(rows) else sweep.dense)
    done = len(sweep.points) - len(sweep.unfinished)
    models = ", ".join(rows["model"].dropna().unique())
    devices = ", ".join(rows["device"].dropna().unique())
    # Where the headline rows are means over tasks, the tasks' own rows are folded away below them.
    by_task = rows[rows["task"] != load.MACRO_TASK] if len(shown) < len(rows) else rows.iloc[:0]
    sections = [
        page.header(
            f"Sparse attention sweep {sweep.name}",
            [
                " · ".join(part for part in (models, devices, sweep.started) if part),
                f"{done} of {text.plural(len(sweep.points), 'point')} finished",
            ],
            sweep.command,
        ),
        page.finding_list(findings(sweep, floor)),
    ]
    if len(rows):
        sections.append(
            page.section(
                "How sparse without a detectable loss",
                page.paragraph(TOLERANCE_RULE),
                page.table(tables.tolerance(tolerances(shown, floor)), "Tolerated sparsity"),
                _folded(tables.tolerance(tolerances(by_task, floor)), "Tolerated sparsity"),
            )
        )
    if drawn:
        drawings = page.pictures(drawn, flowing=True)
        sections.append(page.section("Accuracy, density and time", drawings))
    if needles:
        sections.append(page.section("Needle in a haystack", page.pictures(needles)))
    if len(rows) or len(dense):
        sections.append(
            page.section(
                "All points",
                page.table(
                    tables.summary(shown, dense if len(rows) else dense.iloc[:0]), "All points"
                ),
                _folded(tables.summary(by_task, dense), "All points"),
            )
        )
    if sweep.unfinished:
        listed = page.table(tables.unfinished(sweep.unfinished), "Unfinished points")
        sections.append(page.section("Points that did not finish", listed))
    if len(rows) or len(dense):
        measured = page.table(tables.measurement(rows, dense), "Measurement")
        sections.append(page.section("How it was measured", measured, page.definitions()))
    return page.document(f"xsparse: {sweep.name}", sections)


def _folded(by_task: tables.Table, name: str) -> str:
    if not by_task.rows:
        return ""
    count = text.plural(len(by_task.rows), "row")
    return page.folded(f"Per task ({count})", page.table(by_task, f"{name} per task"))


def _file_name(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", label.replace("τ ", "")).strip("_")

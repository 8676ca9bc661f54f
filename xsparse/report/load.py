"""What is stored of a sweep, as frames: points with their rows, dense rows, samples.

Nothing is dropped in silence: a point without rows stays in `Sweep.points` with its state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from xsparse import stats
from xsparse.report import text
from xsparse.rows import COLUMNS, MACRO_TASK, STAGES
from xsparse.store import RunFolder

DENSE = "full"  # the selector that keeps everything
DENSE_LABEL = "dense"
DONE = "done"

_TEXT = """
run_id dense_run_id model weights_sha256 dtype tokenizer_hash prompt_hash task selector
reduce_heads reduce_queries reduce_sub_blocks attend engine transfer digest digest_format
decode_selector cuda_graph ops_backend dense_kernel device host versions git_commit command options
"""
TEXT_COLUMNS = frozenset(_TEXT.split())

# What may distinguish two points of a sweep, with the word that stands before the value.
PARAMETERS = {
    "model": "",
    "dtype": "",
    "threshold": "τ",
    "options": "",
    "stride": "stride",
    "block_size": "block",
    "block_size_ratio": "ratio",
    "chunk_size": "chunk",
    "reduce_heads": "heads",
    "reduce_queries": "queries",
    "reduce_sub_blocks": "sub-blocks",
    "attend": "attend",
    "engine": "",
    "transfer": "",
    "ring_slots": "slots",
    "digest": "",
    "digest_format": "",
    "decode_selector": "decode",
    "decode_budget_tokens": "budget",
    "decode_cache_gb": "cache GB",
    "cuda_graph": "graph",
    "ops_backend": "",
    "device": "",
    "seed": "seed",
}

# Rows with these in common answer one question and share a panel, a front and a family of tests.
PANEL = ["task", "tasks", "length"]


@dataclass(frozen=True)
class Point:
    """One sweep point, finished or not; `error` is one line or empty."""

    run_id: str
    overrides: str
    state: str
    error: str


@dataclass(frozen=True)
class Sweep:
    """rows: of the sparse points, with `label` and `state`; dense: dense rows, macro rows made.

    folders: run_id -> the folder that holds its samples.
    """

    name: str
    folder: Path
    command: str
    started: str
    points: list[Point]
    rows: pd.DataFrame
    dense: pd.DataFrame
    folders: dict[str, Path]

    @property
    def unfinished(self) -> list[Point]:
        return [point for point in self.points if point.state != DONE]


def read(path: Path | str, runs: Path | str | None = None) -> Sweep:
    """A sweep folder (index.json), any folder with run folders below it, or a file of rows.

    runs: where the run folders of a sweep are; <sweep>/../../runs by default.
    Raises ValueError where there is nothing to report on.
    """
    path = Path(path)
    if path.is_file():
        return _of_rows_file(path)
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder; give a sweep folder or a file of rows")
    if (path / "index.json").is_file():
        return _of_index(path, Path(runs) if runs else path.resolve().parent.parent / "runs")
    return _of_folder(path)


def frame(rows: pd.DataFrame | Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a typed frame with every column of docs/results.md, options and labels added.

    Numbers are float64 (null is NaN), text is str or None. A threshold that is not a number
    everywhere (a file of per-head values) makes that column text.
    """
    data = rows.copy() if isinstance(rows, pd.DataFrame) else pd.DataFrame.from_records(list(rows))
    extra = [column for column in data.columns if column not in COLUMNS]
    data = data.reindex(columns=list(dict.fromkeys([*COLUMNS, *extra, "options"])))
    for column in (*COLUMNS, "options"):
        if column in TEXT_COLUMNS:
            data[column] = [_as_text(value) for value in data[column]]
        elif column != "threshold":
            data[column] = pd.to_numeric(data[column], errors="coerce").astype("float64")
    data["threshold"] = thresholds(data["threshold"])
    if "label" not in data:
        data["label"], data["short_label"] = _labels(data)
    return data.reset_index(drop=True)


def thresholds(values: pd.Series) -> pd.Series:
    """Rounded, because a range in a sweep gives 0.7999999999999999; text where one is a file."""
    numbers = pd.to_numeric(values, errors="coerce").astype("float64").round(6)
    if (numbers.isna() == values.isna()).all():
        return numbers
    named = [
        _as_text(value) if pd.isna(number) else f"{number:g}"
        for value, number in zip(values, numbers, strict=True)
    ]
    return pd.Series(named, index=values.index, dtype=object)


def write(rows: pd.DataFrame, stem: Path) -> None:
    """Rows of `frame` as <stem>.csv and typed <stem>.parquet."""
    rows = rows.copy()
    rows.to_csv(stem.with_name(f"{stem.name}.csv"), index=False)
    for column in (TEXT_COLUMNS | {"label", "state"}) & set(rows.columns):
        rows[column] = rows[column].astype("string")
    if rows["threshold"].dtype == object:
        rows["threshold"] = rows["threshold"].astype("string")
    rows.to_parquet(stem.with_name(f"{stem.name}.parquet"), index=False)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Stored rows, with the selector's own options (not a column of rows) in `options`."""
    folder = RunFolder(run)
    selector = folder.config().get("selector") or {}
    options = selector if isinstance(selector, dict) else {}
    named = " ".join(f"{k} {v}" for k, v in options.items() if k != "name")
    return [{**row, "options": named or None} for row in folder.rows()]


def is_dense(data: pd.DataFrame) -> pd.Series:
    """Whether a row is dense attention: `full` in prefill and, where it is named, in decode."""
    decode = data["decode_selector"]
    return (data["selector"] == DENSE) & (decode.isna() | (decode == DENSE))


def split_dense(data: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(sparse rows, dense rows)."""
    dense = is_dense(data)
    return data[~dense].reset_index(drop=True), data[dense].reset_index(drop=True)


def records(data: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as dicts."""
    return [dict(zip(data.columns, row, strict=True)) for row in data.itertuples(index=False)]


def primary(data: pd.DataFrame) -> pd.DataFrame:
    """The rows a figure shows: macro rows, or the task's own where there is one task only."""
    macro = data[(data["task"] == MACRO_TASK) & (data["tasks"] > 1)]
    return macro if len(macro) else data[data["task"] != MACRO_TASK]


def without_repeats(data: pd.DataFrame) -> pd.DataFrame:
    """All rows but the macro rows of a single task, which repeat that task's row."""
    return data[(data["task"] != MACRO_TASK) | (data["tasks"] > 1)]


def panels(data: pd.DataFrame) -> list[tuple[tuple[str, float, float], pd.DataFrame]]:
    """Rows by (task, tasks, length): macro rows first, lengths ascending."""
    groups: list[Any] = list(data.groupby(PANEL, dropna=False, sort=False))
    return sorted(groups, key=lambda item: (item[0][0] != MACRO_TASK, item[0][0], item[0][2]))


def _of_index(folder: Path, runs: Path) -> Sweep:
    index = _read_json(folder / "index.json")
    points: dict[str, Point] = {}
    rows: list[dict[str, Any]] = []
    folders: dict[str, Path] = {}
    for entry in index.get("points", []):
        run_id = entry.get("run_id") or ""
        overrides = entry.get("overrides") or ""
        overrides = overrides if isinstance(overrides, str) else " ".join(map(str, overrides))
        key = run_id or overrides
        if key in points:  # the same configuration twice: computed once, shown once
            continue
        run = runs / run_id if run_id else None
        points[key] = _point(run_id, overrides, run, entry)
        if run is not None:
            folders[run_id] = run
            rows += rows_of(run)
    dense_ids = {row["dense_run_id"] for row in rows if row.get("dense_run_id")} - set(folders)
    for run_id in sorted(dense_ids):
        folders[run_id] = runs / run_id
        rows += rows_of(runs / run_id)
    return _sweep(
        folder.resolve().name,
        folder,
        str(index.get("command") or ""),
        str(index.get("started") or ""),
        list(points.values()),
        rows,
        folders,
    )


def _of_folder(folder: Path) -> Sweep:
    found = {file.parent for name in ("rows.json", "status.json") for file in folder.rglob(name)}
    if not found:
        raise ValueError(f"{folder}: holds no index.json, rows.json or status.json")
    points, rows, folders = [], [], {}
    for run in sorted(found):
        of_run = rows_of(run)
        run_id = str(of_run[0].get("run_id") or run.name) if of_run else run.name
        folders[run_id] = run
        rows += of_run
        point = _point(run_id, "", run, {})
        dense = bool(of_run) and is_dense(frame(of_run)).all()
        if not dense or point.state != DONE:
            points.append(point)
    return _sweep(folder.resolve().name, folder, "", "", points, rows, folders)


def _of_rows_file(file: Path) -> Sweep:
    if file.suffix == ".parquet":
        rows = records(pd.read_parquet(file))
    elif file.suffix == ".csv":
        rows = records(pd.read_csv(file))
    elif file.suffix == ".json":
        rows = _read_json(file)
    else:
        raise ValueError(f"{file}: rows are read from .json, .csv or .parquet, got {file.suffix}")
    if not rows:
        raise ValueError(f"{file}: holds no rows")
    made_here = {"label", "short_label", "state"}
    rows = [{k: v for k, v in row.items() if k not in made_here} for row in rows]
    run_ids = dict.fromkeys(split_dense(frame(rows))[0]["run_id"])
    points = [Point(run_id, "", DONE, "") for run_id in run_ids]
    return _sweep(file.stem, file.parent, "", "", points, rows, {})


def _sweep(
    name: str,
    folder: Path,
    command: str,
    started: str,
    points: list[Point],
    rows: Sequence[Mapping[str, Any]],
    folders: dict[str, Path],
) -> Sweep:
    sparse, dense = split_dense(frame(rows))
    # The labels name what differs between sparse points; dense runs must not add to that.
    sparse["label"], sparse["short_label"] = _labels(sparse)
    states = {point.run_id: point.state for point in points}
    sparse["state"] = [states.get(run_id, DONE) for run_id in sparse["run_id"]]
    return Sweep(
        name, folder, command, started, points, sparse, dense_reference(dense, sparse), folders
    )


def dense_reference(dense: pd.DataFrame, sparse: pd.DataFrame) -> pd.DataFrame:
    """Dense task rows plus a macro row for every set of tasks that sparse macro rows average.

    A baseline is a run per (task, length), so its own macro rows never cover the sweep's tasks.
    """
    setting = ["model", "dtype", "engine", "chunk_size", "device", "host", "length"]
    tasks = dense[dense["task"] != MACRO_TASK].sort_values("n", ascending=False, kind="stable")
    # A point with selector=full holds the prompts of the baselines once more.
    tasks = tasks.drop_duplicates([*setting, "task"]).sort_index()
    made = [tasks]
    macro_lengths = set(primary(sparse).query("task == @MACRO_TASK")["length"])
    covered = set(sparse["task"]) or set(dense["task"])
    for _, group in tasks.groupby(setting, dropna=False, sort=False):
        group = group[group["task"].isin(covered)]
        if len(group) < 2 or (len(sparse) and group["length"].iloc[0] not in macro_lengths):
            continue
        row = group.iloc[:1].copy()
        estimates = group[["accuracy", "accuracy_low", "accuracy_high"]].itertuples(index=False)
        mean, low, high = stats.combine([tuple(estimate) for estimate in estimates])
        row["task"], row["tasks"], row["n"] = MACRO_TASK, float(len(group)), group["n"].sum()
        row["accuracy"], row["accuracy_low"], row["accuracy_high"] = mean, low, high
        weights = group["n"] / group["n"].sum()
        for column in [f"{stage}_s" for stage in STAGES] + ["rest_s", "ttft_s", "tpot_s"]:
            row[column] = (group[column] * weights).sum(min_count=len(group))
        row["prefill_tok_s"] = row["decode_tok_s"] = row["run_id"] = None
        made.append(row)
    return pd.concat(made, ignore_index=True) if len(tasks) else tasks


def _point(run_id: str, overrides: str, run: Path | None, entry: Mapping[str, Any]) -> Point:
    """A failure that the sweep noted stands; else the run's own record, which a dying job, unlike
    the index, cannot fail to leave."""
    status = RunFolder(run).status() if run and run.is_dir() else {}
    state = str(status.get("state") or entry.get("state") or "missing")
    if entry.get("state") == "failed":
        state = "failed"
    elif state == DONE and (run is None or not (run / "rows.json").is_file()):
        state = "missing"
    reasons = {
        "pending": "it never started",
        "running": "it is still running",
        "interrupted": "it was stopped or killed",
        "missing": "no stored result was found",
    }
    error = str(entry.get("error") or status.get("error") or reasons.get(state, "")).strip()
    first_line = error.splitlines()[0] if error else ""
    return Point(run_id, overrides, state, first_line if state != DONE else "")


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error


def _as_text(value: Any) -> str | None:
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return None if text.is_null(value) or value is pd.NA else str(value)


def _labels(data: pd.DataFrame) -> tuple[list[str], list[str]]:
    """(label, short label) per row: selector and whatever differs between the sparse points."""
    sparse = split_dense(data)[0]
    # A selector's own options distinguish its points, not one selector from another.
    own = sparse.groupby("selector")["options"].nunique(dropna=False)
    varying = {c for c in PARAMETERS if sparse[c].nunique(dropna=False) > 1} - {"options"}
    long, short = [], []
    for row, dense in zip(records(data), is_dense(data), strict=True):
        selector = str(row["selector"])
        parts = [
            f"{PARAMETERS[column]} {_value(row[column])}".strip()
            for column in PARAMETERS
            if not text.is_null(row[column])
            and (
                column in varying
                or column == "threshold"
                or (column == "options" and own.get(selector, 1) > 1)
            )
        ]
        long.append(DENSE_LABEL if dense else ", ".join([selector, *parts]))
        short.append("" if dense else " ".join(p.removeprefix("τ ") for p in parts))
    owners: dict[str, set[Any]] = {}
    for label, run_id in zip(long, data["run_id"], strict=True):
        owners.setdefault(label, set()).add(run_id)
    # Two runs may differ in what is not a parameter, such as the versions of libraries.
    long = [
        f"{label} ({str(run_id)[:6]})" if len(owners[label]) > 1 and label != DENSE_LABEL else label
        for label, run_id in zip(long, data["run_id"], strict=True)
    ]
    return long, short


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

"""The tables of a study, read back, and what is asked of them: which points, which pairs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from xsparse import stats
from xsparse.report import load
from xsparse.report.tables import Table
from xsparse.rows import MACRO_TASK

# What makes two rows the same point: all that may differ in a study but tasks and lengths.
POINT = ["selector", *(column for column in load.PARAMETERS if column != "ops_backend")]
_PROMPT = ["selector", "threshold", "stride", "task", "length", "index"]
_TRAFFIC = """
block_size_ratio reduce_heads reduce_queries reduce_sub_blocks transfer pages_moved pages_history
bytes_moved bytes_history executed mask_causal
"""
COLUMNS = {
    "rows": ["run_id", "task", "length", "selector", "accuracy"],
    "samples": [*_PROMPT, "run_id", "prompt_hash", "score", "dense_score"],
    "heads": [*_PROMPT, "layer", "head", "mask_kept", "mask_causal"],
    "traffic": [*_PROMPT, *_TRAFFIC.split()],
}
# With these the kernel computes the mask as it was selected.
AS_SELECTED = {
    "reduce_heads": "any",
    "reduce_queries": "any",
    "reduce_sub_blocks": "any",
    "attend": "mask",
}


def read(folder: Path | str, name: str) -> pd.DataFrame:
    """The table <folder>/<name>.parquet; ValueError where it is not there or lacks a column."""
    file = Path(folder) / f"{name}.parquet"
    if not file.is_file():
        raise ValueError(f"{file}: no such table; experiments/study/README.md says what makes it")
    table = pd.read_parquet(file)
    missing = [column for column in COLUMNS[name] if column not in table]
    if missing:
        raise ValueError(f"{file}: lacks {', '.join(missing)}")
    return table


def rows(folder: Path | str) -> pd.DataFrame:
    """All rows, dense ones included, labelled for figures (`xsparse.report.load.frame`)."""
    return load.frame(read(folder, "rows"))


def samples(folder: Path | str) -> pd.DataFrame:
    """One line per prompt, with text columns as text; parameters that the table is older than are
    those of the run's rows."""
    table = read(folder, "samples")
    text = table.select_dtypes("category").columns
    table = table.astype(dict.fromkeys(text, object))
    if newer := [column for column in POINT if column not in table]:
        of_run = rows(folder).drop_duplicates("run_id").set_index("run_id")[newer]
        table = table.join(of_run, on="run_id")
    return table


def shown(table: Table) -> pd.DataFrame:
    """A table of `xsparse.report.tables` as a frame, units in the column names."""
    columns = [f"{title} ({unit})" if unit else title for title, unit in table.columns]
    return pd.DataFrame(table.rows, columns=columns)


def where(table: pd.DataFrame, key: Mapping[str, Any]) -> pd.DataFrame:
    """The lines that have these values; null is a value, too.

    A threshold may be a number also where the column is text, for the sake of @file.json.
    """
    mask = pd.Series(True, table.index)
    for column, value in key.items():
        if isinstance(value, float) and pd.notna(value) and not is_numeric_dtype(table[column]):
            value = f"{value:g}"
        mask &= table[column].isna() if pd.isna(value) else table[column] == value
    return table[mask]


def as_selected(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of dense, and of points whose mask ran as selected, each (task, length) once.

    A point that was also run with mass_recall=true, which slows it, counts without.
    """
    best = best_cells(unreduced(table)).drop(columns=["label", "short_label"], errors="ignore")
    # A label must not name the runs that a point is spread over.
    labelled = load.frame(best.assign(run_id=None))
    return labelled.assign(run_id=best["run_id"].to_numpy())


def unreduced(table: pd.DataFrame) -> pd.DataFrame:
    """Lines of rows or samples whose mask, if they have one, ran as selected."""
    kept = pd.Series(True, table.index)
    for column, value in AS_SELECTED.items():
        kept &= table[column].isna() | (table[column] == value)
    return table[kept]


def best_cells(table: pd.DataFrame) -> pd.DataFrame:
    """Of several rows of one point, task and length the one without mass_recall, of most tasks and
    prompts."""
    order = pd.DataFrame(
        {
            "slow": table["mass_recall"].notna(),
            "tasks": -table["tasks"],
            "n": -table["n"],
            "run_id": table["run_id"].astype("string"),
        }
    ).sort_values(["slow", "tasks", "n", "run_id"], kind="stable")
    best = table.loc[order.index].drop_duplicates([*POINT, "task", "length"])
    return best.sort_index()


def paired(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """B minus A on the prompts that both answered, by task and length, and their mean per length.

    a, b: lines of samples.parquet of one point each. Columns: task length n a b delta low high p
    p_adjusted (Holm over the table); for task="mean" every task counts alike.
    Raises ValueError where no prompt is shared or one was answered twice.
    """
    key = ["task", "length", "index", "prompt_hash"]
    for name, side in (("a", a), ("b", b)):
        if side.duplicated(key).any():
            raise ValueError(f"{name} holds a prompt twice; allowed are samples of one point")
    both = a.merge(b, on=key, suffixes=("_a", "_b"))
    if not len(both):
        raise ValueError("the two points share no prompt")
    lines: list[dict[str, Any]] = []
    for length, at_length in both.groupby("length"):
        by_task = dict(list(at_length.groupby("task")))
        groups = [(task, [group]) for task, group in by_task.items()]
        if len(groups) > 1:
            groups.append((MACRO_TASK, list(by_task.values())))
        for task, cells in groups:
            pairs = [(cell["score_b"].tolist(), cell["score_a"].tolist()) for cell in cells]
            delta, low, high, p = stats.macro_delta(pairs)
            lines.append(
                {
                    "task": task,
                    "length": length,
                    "n": sum(map(len, cells)),
                    "a": stats.macro_ci([scores for _, scores in pairs])[0],
                    "b": stats.macro_ci([scores for scores, _ in pairs])[0],
                    "delta": delta,
                    "low": low,
                    "high": high,
                    "p": p,
                }
            )
    made = pd.DataFrame(lines)
    return made.assign(p_adjusted=stats.holm(made["p"].tolist()))

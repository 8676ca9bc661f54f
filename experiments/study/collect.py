"""A results folder as two tables: rows (docs/results.md) and one line per prompt.

Predictions, references and stage times stay in the results folder; what is left of a study of
hundreds of runs is small enough to commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.study.tables import POINT, best_cells
from xsparse.report import load
from xsparse.rows import CONFIG_COLUMNS, DENSITIES, MACRO_TASK, build_rows, ratio_of_sums
from xsparse.store import RunFolder, list_runs

# Of a line of samples.parquet: what its run is, as in the run's rows.
OF_RUN = ["run_id", *POINT]
DENSITY_COLUMNS = ("mask_density", "page_density", "executed_density", "mass_recall")
CATEGORIES = ("task", "prompt_hash", *(column for column in OF_RUN if column in load.TEXT_COLUMNS))
FLOATS = ("depth", "prefill_s", "decode_s", "dense_prefill_s", *DENSITY_COLUMNS)
INTEGERS = ("length", "index", "prompt_tokens", "new_tokens")
HASH_DIGITS = 12  # of a prompt's hash: enough to tell the prompts of a study apart


def write(results: Path, out: Path) -> list[str]:
    """rows.parquet, rows.csv and samples.parquet into `out`; says what was read, in lines.

    Raises ValueError for a folder without a done run, and for a sparse prompt that differs from
    the dense one.
    """
    runs, skipped = done_runs(results)
    rows, samples = row_table(runs), sample_table(runs)
    out.mkdir(parents=True, exist_ok=True)
    load.write(rows, out / "rows")
    samples.to_parquet(out / "samples.parquet", index=False, compression="zstd")
    states = ", ".join(f"{count} {state}" for state, count in sorted(skipped.items()))
    total = len(runs) + skipped.total()
    return [
        f"{len(runs)} of {total} runs are done; skipped: {states or 'none'}",
        f"{out / 'rows.parquet'}, rows.csv: {len(rows)} rows",
        f"{out / 'samples.parquet'}: {len(samples)} prompts",
    ]


def done_runs(results: Path) -> tuple[dict[str, RunFolder], Counter[str]]:
    """Done runs by id, and how many are in each other state."""
    found = list_runs(results)
    if not found:
        raise ValueError(f"{results}: no runs; allowed is a folder with runs/<run_id> below it")
    states = {run.run_id: run.state for run in found}
    done = {run.run_id: run for run in found if states[run.run_id] == load.DONE and run.rows()}
    skipped = Counter(
        states[run.run_id] if states[run.run_id] != load.DONE else "without rows"
        for run in found
        if run.run_id not in done
    )
    if not done:
        listed = ", ".join(f"{count} {state}" for state, count in sorted(skipped.items()))
        raise ValueError(f"{results}: no run is done ({listed})")
    return dict(sorted(done.items())), skipped


def row_table(runs: dict[str, RunFolder]) -> pd.DataFrame:
    """The rows as stored, `options` of the selector added, and the macro rows of `joined`."""
    stored = [row for run in runs.values() for row in load.rows_of(run.path)]
    rows = load.frame([*stored, *joined(load.frame(stored), runs)])
    rows = rows.drop(columns=["label", "short_label"])  # they depend on what is shown beside
    return rows.sort_values([*POINT, "length", "task", "run_id"], key=_sortable, kind="stable")


def joined(rows: pd.DataFrame, runs: dict[str, RunFolder]) -> list[dict[str, Any]]:
    """Macro rows of points whose tasks of one length are spread over several runs.

    A sweep over tasks makes a run of each; what such a point scores on average stands in none of
    them. These rows have no run_id.
    """
    sparse = load.split_dense(best_cells(rows))[0]
    cells = sparse[sparse["task"] != MACRO_TASK]
    made = []
    for _, group in cells.groupby([*POINT, "length"], dropna=False, sort=False):
        if group["run_id"].nunique() < 2 or group["dense_run_id"].isna().any():
            continue
        own, dense, dense_ids = [], [], {}
        for row in load.records(group):
            cell = row["task"], int(row["length"])
            dense_ids[cell] = row["dense_run_id"]
            own += _samples(runs, row["run_id"], cell)
            dense += _samples(runs, row["dense_run_id"], cell)
        if not dense:  # the baselines were not kept
            continue
        first = load.rows_of(runs[group["run_id"].iloc[0]].path)[0]
        identity = {column: first[column] for column in CONFIG_COLUMNS}
        both = build_rows(
            {**identity, "run_id": None, "dense_run_id": None},
            own,
            dense,
            dense_comparable=bool(group["prefill_speedup"].notna().all()),
            dense_run_ids=dense_ids,
        )
        options = group["options"].iloc[0]
        made += [{**row, "options": options} for row in both if row["task"] == MACRO_TASK]
    return made


def sample_table(runs: dict[str, RunFolder]) -> pd.DataFrame:
    """One line per stored prompt; a point with selector=full repeats its baselines and is left out.

    `dense_score` and `dense_prefill_s` are those of dense attention on the same prompt, null for
    dense itself and where its run is not there. Times are comparable only where the run's row has a
    speed-up.
    """
    lines = []
    for run in runs.values():
        rows = load.frame(load.rows_of(run.path))
        own = rows[rows["task"] != MACRO_TASK]
        dense_ids = {(r["task"], int(r["length"])): r["dense_run_id"] for r in load.records(own)}
        if load.is_dense(own).all() and set(dense_ids.values()) <= set(runs):
            continue
        identity = {column: own.iloc[0][column] for column in OF_RUN}
        lines += [{**identity, **line} for line in _lines(run, runs, dense_ids)]
    table = pd.DataFrame(lines)
    for column in FLOATS:
        table[column] = table[column].astype("float32")
    for column in INTEGERS:
        table[column] = table[column].astype("int32")
    for column in CATEGORIES:
        table[column] = table[column].astype("category")
    table["threshold"] = load.thresholds(table["threshold"])
    if table["threshold"].dtype == object:
        table["threshold"] = table["threshold"].astype("string")
    order = ["run_id", "task", "length", "index"]
    return table.sort_values(order, kind="stable", ignore_index=True)


def _lines(
    run: RunFolder, runs: dict[str, RunFolder], dense_ids: dict[tuple[str, int], str | None]
) -> Iterator[dict[str, Any]]:
    twins = {
        (*cell, sample["index"]): sample
        for cell, run_id in dense_ids.items()
        for sample in _samples(runs, run_id, cell)
    }
    for sample in run.samples():
        twin = twins.get((sample["task"], sample["length"], sample["index"]), {})
        if twin and twin["prompt_hash"] != sample["prompt_hash"]:
            raise ValueError(
                f"run {run.run_id}: prompt {sample['index']} of {sample['task']} at "
                f"{sample['length']} tokens is not the one of dense"
            )
        counters = sample["counters"]
        densities = {
            column: ratio_of_sums([tuple(counters.get(name) for name in DENSITIES[column])])
            for column in DENSITY_COLUMNS
        }
        yield {
            "task": sample["task"],
            "length": sample["length"],
            "index": sample["index"],
            "depth": (sample.get("meta") or {}).get("depth"),
            "prompt_hash": sample["prompt_hash"][:HASH_DIGITS],
            "prompt_tokens": sample["prompt_tokens"],
            "new_tokens": sample["new_tokens"],
            "score": float(sample["score"]),
            "dense_score": twin.get("score"),
            "prefill_s": sample["prefill_s"],
            "decode_s": sample["decode_s"],
            "dense_prefill_s": twin.get("prefill_s"),
            **densities,
            "bytes_moved": counters.get("bytes_h2d"),
        }


def _samples(
    runs: dict[str, RunFolder], run_id: str | None, cell: tuple[str, int]
) -> list[dict[str, Any]]:
    if run_id not in runs:
        return []
    return [s for s in runs[run_id].samples() if (s["task"], s["length"]) == cell]


def _sortable(column: pd.Series) -> pd.Series:
    return column if column.dtype == "float64" else column.astype("string")

"""Two sweeps compared: rows of one configuration side by side, paired on prompts if possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from xsparse import stats
from xsparse.report import load, page, text
from xsparse.report.tables import Table
from xsparse.rows import MACRO_TASK
from xsparse.store import RunFolder

# What makes two rows the same configuration, beside task and length.
KEY = ["selector", *load.PARAMETERS, "weights_sha256", "host"]

_COLUMNS = """
label task tasks length n accuracy_a accuracy_b delta delta_low delta_high p_value p_adjusted
paired mask_density_a mask_density_b prefill_tok_s_a prefill_tok_s_b speedup speedup_low
speedup_high run_id_a run_id_b
"""
COLUMNS = _COLUMNS.split()


def compare(
    a: Path | str,
    b: Path | str,
    *,
    out: Path | str | None = None,
    runs: Path | str | None = None,
) -> Path:
    """Write compare-<B>.html and .csv beside A's report (or in `out`); returns the page's path.

    Raises ValueError where the sweeps have no configuration in common.
    """
    first, second = load.read(a, runs), load.read(b, runs)
    pairs, differs, alone = match(first, second)
    folder = Path(out) if out else first.folder / "report"
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"compare-{second.name}"
    pairs.to_csv(stem.with_name(f"{stem.name}.csv"), index=False)
    file = stem.with_name(f"{stem.name}.html")
    file.write_text(_page(first, second, pairs, differs, alone), encoding="utf-8")
    return file


def match(
    a: load.Sweep, b: load.Sweep
) -> tuple[pd.DataFrame, dict[str, tuple[str, str]], list[str]]:
    """(pairs, what differs between the sweeps, rows without a partner).

    A parameter with one value in A and another one in B is what the two sweeps differ in; it is
    left out of the match. pairs: `COLUMNS`, differences are B minus A.
    """
    rows_a, rows_b = load.without_repeats(a.rows), load.without_repeats(b.rows)
    differs = {c: pair for c in KEY if (pair := _constants(rows_a[c], rows_b[c])) is not None}
    key = [c for c in KEY if c not in differs] + ["task", "tasks", "length"]
    by_key = {_key_of(row, key): row for row in load.records(rows_b)}
    samples = _Samples()
    pairs, alone = [], []
    for row in load.records(rows_a):
        partner = by_key.pop(_key_of(row, key), None)
        if partner is None:
            alone.append(f"{_name(row)} only in {a.name}")
        else:
            pairs.append(_pair(row, partner, samples.of(a, row), samples.of(b, partner)))
    alone += [f"{_name(row)} only in {b.name}" for row in by_key.values()]
    if not pairs:
        raise ValueError(
            f"{a.name} and {b.name} share no configuration; rows are matched on {', '.join(key)}"
        )
    made = pd.DataFrame(pairs, columns=COLUMNS)
    tested = made["p_value"].notna()
    made["p_adjusted"] = made["p_adjusted"].astype("float64")
    made.loc[tested, "p_adjusted"] = stats.holm(made.loc[tested, "p_value"].tolist())
    return made, differs, alone


class _Samples:
    """Samples by run, each file read once."""

    def __init__(self) -> None:
        self._read: dict[Path, list[dict[str, Any]]] = {}

    def of(self, sweep: load.Sweep, row: dict[str, Any]) -> list[dict[str, Any]]:
        folder = sweep.folders.get(row["run_id"])
        if folder is None:
            return []
        if folder not in self._read:
            self._read[folder] = RunFolder(folder).samples()
        return [
            s
            for s in self._read[folder]
            if s["length"] == row["length"] and row["task"] in (s["task"], MACRO_TASK)
        ]


def _pair(
    a: dict[str, Any],
    b: dict[str, Any],
    samples_a: list[dict[str, Any]],
    samples_b: list[dict[str, Any]],
) -> dict[str, Any]:
    made = {column: a[column] for column in ("label", "task", "tasks", "length")}
    for column in ("accuracy", "mask_density", "prefill_tok_s", "run_id"):
        made[f"{column}_a"], made[f"{column}_b"] = a[column], b[column]
    twins = _twins(samples_a, samples_b)
    made["paired"] = bool(twins)
    if not twins:
        # Independent samples: the distances of both intervals add in quadrature, twice the mean.
        half, low, high = stats.combine(
            [
                (b["accuracy"], b["accuracy_low"], b["accuracy_high"]),
                (-a["accuracy"], -a["accuracy_high"], -a["accuracy_low"]),
            ]
        )
        made.update(n=min(a["n"], b["n"]), delta=2 * half, delta_low=2 * low, delta_high=2 * high)
        return made
    by_task: dict[str, list[tuple[float, float]]] = {}
    for one, two in twins:
        by_task.setdefault(one["task"], []).append((two["score"], one["score"]))
    # Means over the prompts that both have, which may be fewer than either row's n.
    scores = [tuple(zip(*pairs, strict=True)) for pairs in by_task.values()]
    delta, low, high, p = stats.macro_delta([(second, first) for second, first in scores])
    made.update(n=len(twins), delta=delta, delta_low=low, delta_high=high, p_value=p)
    made["accuracy_b"] = stats.macro_ci([second for second, _ in scores])[0]
    made["accuracy_a"] = stats.macro_ci([first for _, first in scores])[0]
    if (a["host"], a["device"]) == (b["host"], b["device"]):
        times = stats.speedup(
            [one["prefill_s"] for one, _ in twins], [two["prefill_s"] for _, two in twins]
        )
        made["speedup"], made["speedup_low"], made["speedup_high"] = times
    return made


def _twins(
    a: list[dict[str, Any]], b: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Samples of one prompt in both, by task and prompt hash."""
    by_hash = {(s["task"], s["prompt_hash"]): s for s in b}
    keys = [(s, (s["task"], s["prompt_hash"])) for s in a]
    return [(s, by_hash[key]) for s, key in keys if key in by_hash]


def _constants(a: pd.Series, b: pd.Series) -> tuple[str, str] | None:
    """The two values, if each side has exactly one and they differ."""
    one, two = a.unique(), b.unique()
    if len(one) != 1 or len(two) != 1:
        return None
    first, second = _plain(one[0]), _plain(two[0])
    return (first, second) if first != second else None


def _key_of(row: dict[str, Any], key: list[str]) -> tuple[str, ...]:
    return tuple(_plain(row[column]) for column in key)


def _plain(value: Any) -> str:
    if text.is_null(value):
        return text.NULL
    return f"{value:g}" if isinstance(value, float) else str(value)


def _name(row: dict[str, Any]) -> str:
    task = text.task_name(row["task"], row["tasks"])
    return f"{row['label']} on {task} at {text.tokens(row['length'])}"


def _table(pairs: pd.DataFrame) -> Table:
    columns = [
        ("point", "label in A"),
        ("task", ""),
        ("length", "tokens"),
        ("n", "prompts"),
        ("accuracy A", "%"),
        ("accuracy B", "%"),
        ("B − A", "points [95 % CI]"),
        ("p", "Holm"),
        ("mask density A", "%"),
        ("mask density B", "%"),
        ("prefill A", "tok/s"),
        ("prefill B", "tok/s"),
        ("speed-up of B", "× [95 % CI]"),
        ("same prompts", ""),
    ]
    rows = [
        [
            str(row["label"]),
            text.task_name(row["task"], row["tasks"]),
            f"{int(row['length']):,}",
            str(int(row["n"])),
            text.percent(row["accuracy_a"]),
            text.percent(row["accuracy_b"]),
            text.with_interval(row["delta"], row["delta_low"], row["delta_high"], sign=True),
            text.p_value(row["p_adjusted"]),
            text.percent(row["mask_density_a"]),
            text.percent(row["mask_density_b"]),
            text.number(row["prefill_tok_s_a"], 0),
            text.number(row["prefill_tok_s_b"], 0),
            text.with_interval(row["speedup"], row["speedup_low"], row["speedup_high"], 2, scale=1),
            "yes" if row["paired"] else "no",
        ]
        for row in load.records(pairs)
    ]
    return Table(columns, rows, text_columns=frozenset({0, 1}))


def _page(
    a: load.Sweep,
    b: load.Sweep,
    pairs: pd.DataFrame,
    differs: dict[str, tuple[str, str]],
    alone: list[str],
) -> str:
    changed = "; ".join(f"{c}: {one} in A, {two} in B" for c, (one, two) in differs.items())
    paired = int(pairs["paired"].sum())
    sections = [
        page.header(
            "Two sweeps compared",
            [
                f"A: {a.name}",
                f"B: {b.name}",
                f"What differs between them: {changed or 'no parameter'}",
                f"{text.plural(len(pairs), 'pair')}, {paired} of them on the same prompts. "
                "Speed-ups only where both ran on one host and device.",
            ],
            "",
        ),
        page.section("Pairs", page.table(_table(pairs), "Pairs")),
    ]
    if alone:
        items = "".join(page.paragraph(line) for line in alone)
        sections.append(page.section(f"Without a partner ({len(alone)})", items))
    unfinished = [f"{p.overrides or p.run_id} ({p.state})" for p in (*a.unfinished, *b.unfinished)]
    if unfinished:
        lines = "".join(page.paragraph(line) for line in unfinished)
        sections.append(page.section("Points that did not finish", lines))
    return page.document(f"xsparse: {a.name} and {b.name}", sections)

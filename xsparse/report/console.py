"""The result of a point as a table for the terminal, at most 120 columns wide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from xsparse.report import text
from xsparse.rows import MACRO_TASK

# (title, unit, alignment)
HEADERS: tuple[tuple[str, str, Any], ...] = (
    ("selector", "", "left"),
    ("τ", "", "right"),
    ("task", "", "left"),
    ("length", "tok", "right"),
    ("n", "", "right"),
    ("accuracy", "% \\[95 % CI]", "right"),
    ("dense", "%", "right"),
    ("delta", "points", "right"),
    ("mask/page", "density %", "right"),
    ("prefill", "tok/s", "right"),
    ("speed-up", "× \\[95 % CI]", "right"),
)


# Columns whose cells may break over lines, and how narrow they get; a number is never cut.
FOLDING = {"selector": 9, "τ": 4, "task": 9}


def table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """One line per row; the macro row of a single task is left out, it repeats that task."""
    shown = [row for row in rows if row["task"] != MACRO_TASK or row.get("tasks") != 1]
    cells = [_cells(row) for row in shown]
    made = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for i, (title, unit, justify) in enumerate(HEADERS):
        widest = max((len(line[i]) for line in cells), default=0)
        made.add_column(
            f"{title}\n[dim]{unit}[/dim]",
            justify=justify,
            overflow="fold",
            no_wrap=title not in FOLDING,
            min_width=FOLDING.get(title, max(widest, len(title), len(unit))),
        )
    for row, line in zip(shown, cells, strict=True):
        # Cells are data: a bracket in them is not markup.
        made.add_row(*map(Text, line), style="bold" if row["task"] == MACRO_TASK else None)
    return made


def _selector(row: Mapping[str, Any]) -> str:
    dense = row["selector"] == "full" and row["decode_selector"] in (None, "full")
    return "dense" if dense else str(row["selector"])


def _cells(row: Mapping[str, Any]) -> list[str]:
    threshold = row["threshold"]
    return [
        _selector(row),
        f"{threshold:g}" if isinstance(threshold, int | float) else str(threshold or text.NULL),
        text.task_name(row["task"], row.get("tasks")),
        f"{int(row['length'])}",
        str(int(row["n"])),
        text.with_interval(row["accuracy"], row["accuracy_low"], row["accuracy_high"], 0),
        text.percent(row["dense_accuracy"], 0),
        text.number(row["delta"], 1, scale=100, sign=True),
        f"{text.percent(row['mask_density'], 0)}/{text.percent(row['page_density'], 0)}",
        text.number(row["prefill_tok_s"], 0),
        text.with_interval(
            row["prefill_speedup"],
            row["prefill_speedup_low"],
            row["prefill_speedup_high"],
            2,
            scale=1,
        ),
    ]

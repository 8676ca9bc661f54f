"""The result of a point as a table for the terminal, at most 120 columns wide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from xsparse.report import load, text
from xsparse.rows import MACRO_TASK

# (title, unit, alignment)
HEADERS: tuple[tuple[str, str, Any], ...] = (
    ("point", "", "left"),
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


MOVED = ("moved", "% of KV", "right")  # only where an engine moves anything

# Columns whose cells may break over lines, and how narrow they get; a number is never cut.
FOLDING = {"point": 11, "task": 9}


def table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """One line per row; the macro row of a single task is left out, it repeats that task.

    A point is called what the report calls it: its selector and whatever differs between points.
    """
    data = load.frame(list(rows))
    shown = load.records(data[(data["task"] != MACRO_TASK) | (data["tasks"] != 1)])
    moves = any(not text.is_null(row["transfer_ratio"]) for row in shown)
    headers = [*HEADERS, *([MOVED] if moves else [])]
    cells = [_cells(row)[: len(headers)] for row in shown]
    made = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for i, (title, unit, justify) in enumerate(headers):
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


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["label"],
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
        text.percent(row["transfer_ratio"], 0),
    ]

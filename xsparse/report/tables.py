"""Tables of the page: each a title, columns with their unit, and cells as text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from xsparse.report import load, text
from xsparse.report.findings import Tolerance

GIB = 2**30


@dataclass(frozen=True)
class Table:
    """columns: (title, unit); rows: cells as text; `text_columns` are left-aligned.

    wrapping: columns of sentences, which may break; a number never does.
    """

    columns: list[tuple[str, str]]
    rows: list[list[str]]
    text_columns: frozenset[int] = frozenset({0})
    wrapping: frozenset[int] = frozenset()
    emphasised: frozenset[int] = field(default_factory=frozenset)


SUMMARY_COLUMNS = [
    ("point", ""),
    ("task", ""),
    ("length", "tokens"),
    ("n", "prompts"),
    ("accuracy", "% [95 % CI]"),
    ("dense", "%"),
    ("delta", "points [95 % CI]"),
    ("p", "paired"),
    ("mask density", "%"),
    ("executed", "%"),
    ("page density", "%"),
    ("transfer", "% of history"),
    ("mass recall", "%"),
    ("prefill", "tok/s"),
    ("dense prefill", "tok/s"),
    ("prefill speed-up", "× [95 % CI]"),
    ("decode", "tok/s"),
    ("decode speed-up", "× [95 % CI]"),
    ("first token", "s, median"),
    ("per token", "s, median"),
    ("host to device", "GiB per prompt"),
    ("peak GPU", "GB"),
]


def summary(rows: pd.DataFrame, dense: pd.DataFrame) -> Table:
    """The given points, dense first within each (task, length)."""
    cells, emphasised = [], set()
    shown = dense.merge(rows[load.PANEL].drop_duplicates(), on=load.PANEL)
    for _, group in load.panels(pd.concat([shown, rows], ignore_index=True)):
        for row in load.records(group):
            if row["label"] == load.DENSE_LABEL:
                emphasised.add(len(cells))
            cells.append(_summary_cells(row))
    return Table(
        SUMMARY_COLUMNS, cells, text_columns=frozenset({0, 1}), emphasised=frozenset(emphasised)
    )


def _summary_cells(row: dict[str, Any]) -> list[str]:
    is_dense = row["label"] == load.DENSE_LABEL
    state = row.get("state")
    unfinished = f" ({state})" if isinstance(state, str) and state != load.DONE else ""

    def speed(phase: str) -> str:
        value, low, high = (row[f"{phase}_speedup{end}"] for end in ("", "_low", "_high"))
        return text.with_interval(value, low, high, 2, scale=1)

    return [
        f"{row['label']}{unfinished}",
        text.task_name(row["task"], row["tasks"]),
        f"{int(row['length']):,}",
        str(int(row["n"])),
        text.with_interval(row["accuracy"], row["accuracy_low"], row["accuracy_high"]),
        text.percent(row["accuracy"] if is_dense else row["dense_accuracy"]),
        text.with_interval(row["delta"], row["delta_low"], row["delta_high"], sign=True),
        text.p_value(row["p_value"]),
        text.percent(row["mask_density"]),
        text.percent(row["executed_density"]),
        text.percent(row["page_density"]),
        text.percent(row["transfer_ratio"]),
        text.percent(row["mass_recall"]),
        text.number(row["prefill_tok_s"], 0),
        text.number(row["prefill_tok_s" if is_dense else "dense_prefill_tok_s"], 0),
        speed("prefill"),
        text.number(row["decode_tok_s"], 1),
        speed("decode"),
        text.seconds(row["ttft_s"]),
        text.seconds(row["tpot_s"]),
        text.number(row["bytes_h2d"], 2, scale=1 / GIB),
        text.number(row["peak_gpu_gb"], 1),
    ]


def tolerance(found: list[Tolerance]) -> Table:
    columns = [
        ("task", ""),
        ("length", "tokens"),
        ("largest sparsity", "% of blocks dropped"),
        ("point", ""),
        ("n", "prompts"),
        ("delta", "points [95 % CI]"),
        ("p", "Holm"),
        ("points tested", ""),
        ("what the data say", ""),
    ]
    rows = [
        [
            t.task,
            f"{t.length:,}",
            text.percent(t.sparsity),
            t.label or text.NULL,
            str(t.n),
            text.with_interval(t.delta, t.delta_low, t.delta_high, sign=True),
            text.p_value(t.p_adjusted),
            str(t.points),
            t.verdict,
        ]
        for t in found
    ]
    return Table(columns, rows, text_columns=frozenset({0, 3, 8}), wrapping=frozenset({8}))


def unfinished(points: list[load.Point]) -> Table:
    columns = [("point", ""), ("state", ""), ("why", ""), ("run", "")]
    rows = [[p.overrides or p.run_id, p.state, p.error or text.NULL, p.run_id] for p in points]
    return Table(columns, rows, text_columns=frozenset(range(4)), wrapping=frozenset({0, 2}))


def measurement(rows: pd.DataFrame, dense: pd.DataFrame) -> Table:
    """How the numbers were measured: what all rows have in common, or all values where not."""
    named = {
        "model": "model",
        "weights_sha256": "weights (sha256)",
        "dtype": "dtype",
        "device": "device",
        "host": "host",
        "engine": "engine",
        "transfer": "transfer",
        "chunk_size": "chunk (tokens)",
        "block_size": "block (tokens)",
        "block_size_ratio": "blocks per page",
        "ops_backend": "operators",
        "dense_kernel": "dense kernel",
        "decode_selector": "decode selector",
        "warmup_tokens": "warm-up (tokens, not counted)",
        "repeats": "repeats",
        "seed": "seed",
        "versions": "versions",
        "git_commit": "commit",
    }
    both = pd.concat([rows, dense], ignore_index=True)
    made = []
    for column, title in named.items():
        values = dict.fromkeys(both[column].dropna())
        if values:
            made.append([title, "; ".join(_plain(value) for value in values)])
    return Table([("what", ""), ("value", "")], made, frozenset({0, 1}), frozenset({1}))


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if str(value).startswith("{"):  # versions, kept as JSON in a frame
        return ", ".join(f"{name} {version}" for name, version in json.loads(value).items())
    return str(value)

"""What a reader must know before believing a number, and what the numbers allow to conclude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from xsparse import stats
from xsparse.report import load, text

DENSE_FLOOR = 0.8
# A claim of "no loss" that could hide more than this deserves a warning.
COARSE_LOSS = 0.10
# A speed-up is only measured between runs that agree in these.
SPEED_COLUMNS = ("host", "device", "engine", "chunk_size")
# Prefill of one process alone keeps its threads busier than this.
BUSY_SHARE = 0.7
SHOWN_PER_WARNING = 6


@dataclass(frozen=True)
class Finding:
    """level: `problem` (a conclusion is refused), `warning` (read with care) or `note`."""

    level: Literal["problem", "warning", "note"]
    title: str
    detail: str


@dataclass(frozen=True)
class Tolerance:
    """The sparsest point of a (task, length) whose loss was not detected.

    sparsity: 1 - mask density; None where no such point exists or a conclusion is refused.
    visible: smallest loss that n prompts could show; None where they could show none.
    """

    task: str
    length: int
    points: int
    n: int
    dense_accuracy: float | None
    label: str
    sparsity: float | None
    delta: float | None
    delta_low: float | None
    delta_high: float | None
    p_adjusted: float | None
    visible: float | None
    verdict: str


def tolerances(rows: pd.DataFrame, floor: float = DENSE_FLOOR) -> list[Tolerance]:
    """One answer per (task, length)."""
    return [
        _tolerance(text.task_name(key[0], key[1]), int(key[2]), group, floor)
        for key, group in load.panels(load.without_repeats(rows))
    ]


def with_losses(group: pd.DataFrame) -> pd.DataFrame:
    """The points of one (task, length), all with a p, with `p_adjusted` (Holm) and `lost`.

    A loss is detected where delta < 0 and either Holm's p < 0.05 or the interval excludes 0. The
    second condition is needed because Holm guards against false alarms: alone it would let a
    point pass the more easily, the more points are tested.
    """
    adjusted = pd.Series(stats.holm(group["p_value"].tolist()), group.index, dtype="float64")
    significant = (adjusted < stats.ALPHA) | (group["delta_high"] < 0)
    return group.assign(p_adjusted=adjusted, lost=(group["delta"] < 0) & significant)


def _tolerance(task: str, length: int, group: pd.DataFrame, floor: float) -> Tolerance:
    tested = with_losses(group[group["p_value"].notna() & group["mask_density"].notna()])
    dense = tested["dense_accuracy"].min() if len(tested) else float("nan")
    kept = tested[~tested["lost"]].sort_values("mask_density", kind="stable")

    best = kept.iloc[0] if len(kept) else None
    n = int(best["n"] if best is not None else group["n"].max())
    visible = stats.smallest_visible_loss(n)
    label, delta = "", (None, None, None, None)
    if not len(tested):
        best, verdict = None, "not compared: no dense baseline on these prompts"
    elif dense < floor:
        best = None
        verdict = (
            f"refused: dense itself scores {text.percent(dense)} %, "
            f"below the floor of {text.percent(floor, 0)} %"
        )
    elif best is None:
        verdict = f"every point lost accuracy detectably (n = {n})"
    else:
        label = str(best["label"])
        delta = tuple(float(best[c]) for c in ("delta", "delta_low", "delta_high", "p_adjusted"))
        verdict = f"no detectable loss at n = {n} ({_blindness(visible)})"
    return Tolerance(
        task=task,
        length=length,
        points=len(group),
        n=n,
        dense_accuracy=None if pd.isna(dense) else float(dense),
        label=label,
        sparsity=None if best is None else 1 - float(best["mask_density"]),
        delta=delta[0],
        delta_low=delta[1],
        delta_high=delta[2],
        p_adjusted=delta[3],
        visible=visible,
        verdict=verdict,
    )


def _blindness(visible: float | None) -> str:
    if visible is None:
        return "too few prompts to see a loss of any size"
    return f"a loss under {text.number(visible, 0, scale=100)} points would not be seen"


def findings(sweep: load.Sweep, floor: float = DENSE_FLOOR) -> list[Finding]:
    """Everything to be said above the figures, problems first."""
    rows = load.without_repeats(sweep.rows)
    found = [
        _unfinished(sweep),
        _weak_dense(rows, sweep.dense, floor),
        _sparse_wins(rows),
        _too_few(rows, floor),
        _no_baseline(rows),
        *_no_speed(rows, sweep.dense),
        _wide_speed(rows),
        _busy(rows, sweep.dense),
        _moves_more(rows),
        _mixed(rows),
        _kernel(rows, sweep.dense),
    ]
    order = ("problem", "warning", "note")
    return sorted((f for f in found if f is not None), key=lambda f: order.index(f.level))


def _unfinished(sweep: load.Sweep) -> Finding | None:
    missing = sweep.unfinished
    if not missing:
        return None
    listed = [
        f"{p.overrides or p.run_id} ({p.state}{': ' if p.error else ''}{p.error})" for p in missing
    ]
    return Finding(
        "problem",
        f"{len(missing)} of {text.plural(len(sweep.points), 'point')} did not finish",
        f"{_list(listed)}. Running the same command again computes only what is missing.",
    )


def _weak_dense(rows: pd.DataFrame, dense: pd.DataFrame, floor: float) -> Finding | None:
    own = dense.assign(dense_accuracy=dense["accuracy"])
    known = pd.concat([rows, own]) if len(own) else rows
    weak = known[known["dense_accuracy"] < floor]
    if not len(weak):
        return None
    cells = [
        f"{_where(key)} {text.percent(group['dense_accuracy'].min())} % "
        f"(n = {int(group['n'].max())})"
        for key, group in load.panels(weak)
    ]
    return Finding(
        "problem",
        f"Dense attention itself is below {text.percent(floor, 0)} %: no conclusion is drawn there",
        f"{_list(cells)}. Where dense fails, a sparse run cannot show a loss.",
    )


def _sparse_wins(rows: pd.DataFrame) -> Finding | None:
    wins = rows[rows["delta_low"] > 0]
    if not len(wins):
        return None
    cells = [
        f"{row['label']} on {_where_row(row)}: "
        f"{text.with_interval(row['delta'], row['delta_low'], row['delta_high'], sign=True)} "
        f"points (n = {int(row['n'])})"
        for row in load.records(wins)
    ]
    return Finding(
        "warning",
        "Sparse beats dense beyond the 95 % interval",
        f"{_list(cells)}. Dropping attention should not add accuracy: look for a defect in prompts "
        "or scoring before believing it.",
    )


def _too_few(rows: pd.DataFrame, floor: float) -> Finding | None:
    blind: dict[int, list[str]] = {}
    for t in tolerances(rows, floor):
        if t.sparsity is not None and (t.visible is None or t.visible > COARSE_LOSS):
            blind.setdefault(t.n, []).append(f"{t.task} at {text.tokens(t.length)}")
    if not blind:
        return None
    cells = [
        f"n = {n}: {_blindness(stats.smallest_visible_loss(n))} ({_list(where)})"
        for n, where in blind.items()
    ]
    return Finding(
        "warning",
        "Too few prompts for a claim of no loss",
        f"{_list(cells)}. Raise samples= to extend the stored runs.",
    )


def _no_baseline(rows: pd.DataFrame) -> Finding | None:
    alone = rows[rows["dense_accuracy"].isna()]
    if not len(alone):
        return None
    cells = [f"{row['label']} on {_where_row(row)}" for row in load.records(alone)]
    return Finding("warning", "No dense baseline", f"{_list(cells)}.")


def _no_speed(rows: pd.DataFrame, dense: pd.DataFrame) -> list[Finding]:
    """One finding per reason why a speed-up is null."""
    reasons: dict[str, list[str]] = {}
    by_run = {row["run_id"]: row for row in load.records(dense[dense["run_id"].notna()])}
    for row in load.records(rows[rows["prefill_speedup"].isna()]):
        reason = _why_no_speed(row, by_run.get(row["dense_run_id"]))
        reasons.setdefault(reason, []).append(f"{row['label']} on {_where_row(row)}")
    return [
        Finding("warning", f"No speed-up: {reason}", f"{_list(cells)}.")
        for reason, cells in reasons.items()
    ]


def _why_no_speed(row: dict[str, Any], dense: dict[str, Any] | None) -> str:
    if text.is_null(row["dense_accuracy"]):
        return "no dense run on these prompts"
    if not text.is_null(row["mass_recall"]):
        return "mass recall was measured, and that takes time in the sparse run"
    if dense is not None:
        differing = [
            f"{column} {row[column]} against {dense[column]}"
            for column in SPEED_COLUMNS
            if not text.is_null(row[column]) and row[column] != dense[column]
        ]
        if differing:
            return f"dense ran with another setting ({', '.join(differing)})"
    return f"dense did not run on the same {', '.join(SPEED_COLUMNS[:-1])} and {SPEED_COLUMNS[-1]}"


def _wide_speed(rows: pd.DataFrame) -> Finding | None:
    bare = rows[rows["prefill_speedup"].notna() & rows["prefill_speedup_low"].isna()]
    if not len(bare):
        return None
    return Finding(
        "warning",
        f"Speed-ups without an interval: fewer than {stats.MIN_BOOTSTRAP_N} paired prompts",
        f"{text.plural(len(bare), 'row')} of {len(rows)}. A ratio alone hides its spread.",
    )


def _busy(rows: pd.DataFrame, dense: pd.DataFrame) -> Finding | None:
    """Times of a process that did not get the cores it asked for."""
    shares = pd.concat([rows, dense])["cpu_share"].dropna().astype(float)
    if not len(shares) or shares.min() >= BUSY_SHARE:
        return None
    return Finding(
        "warning",
        "The machine was busy: times and speed-ups are not to be trusted",
        f"In {text.plural(int((shares < BUSY_SHARE).sum()), 'row')} of {len(shares)} prefill got "
        f"less than {text.percent(BUSY_SHARE, 0)} % of its CPU threads, in the worst "
        f"{text.percent(shares.min(), 0)} %. Accuracy and densities are not affected.",
    )


def _moves_more(rows: pd.DataFrame) -> Finding | None:
    """Points that read more over the link in prefill than all of K and V once."""
    more = rows[rows["transfer_ratio"] > 1]
    if not len(more):
        return None
    cells = [
        f"{row['label']} on {_where_row(row)}: {text.number(row['transfer_ratio'])}"
        for row in load.records(more)
    ]
    return Finding(
        "warning",
        "More bytes were moved than dense attention moves",
        f"{_list(cells)} of the K and V of history. digest=streamed reads K twice for its "
        "estimate before anything is selected; digest=resident_k and quantised_k read none.",
    )


def _mixed(rows: pd.DataFrame) -> Finding | None:
    mixed = [
        f"{column}: {', '.join(sorted(values))}"
        for column in ("model", "dtype", "device", "host", "ops_backend", "git_commit", "versions")
        if len(values := set(rows[column].dropna().astype(str))) > 1
    ]
    if not mixed:
        return None
    return Finding(
        "warning", "Points were not measured alike", f"{'; '.join(mixed)}. Compare with care."
    )


def _kernel(rows: pd.DataFrame, dense: pd.DataFrame) -> Finding | None:
    """`dense_kernel` names the kernel of the baseline, in sparse and in dense rows."""
    kernels = sorted(set(rows["dense_kernel"].dropna()) | set(dense["dense_kernel"].dropna()))
    timed = rows["prefill_speedup"].notna().any()
    if not kernels or not timed:
        return None
    return Finding(
        "note",
        f"Speed-ups are over dense attention by {', '.join(kernels)}",
        "Selection, estimation and transfer are counted as time of the sparse run; warm-up is not.",
    )


def _where(key: Sequence[Any]) -> str:
    return f"{text.task_name(key[0], key[1])} at {text.tokens(key[2])}"


def _where_row(row: dict[str, Any]) -> str:
    return _where([row[column] for column in load.PANEL])


def _list(items: list[str]) -> str:
    shown = "; ".join(items[:SHOWN_PER_WARNING])
    more = len(items) - SHOWN_PER_WARNING
    return f"{shown}; and {more} more" if more > 0 else shown

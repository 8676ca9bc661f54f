"""How numbers are written in tables: one place, so that a unit never changes between two of them.

Null is an en dash. Shares, accuracies and losses are given in percent or points (0..100).
"""

from __future__ import annotations

import math
from typing import Any

NULL = "–"


def is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def number(value: Any, digits: int = 2, *, scale: float = 1.0, sign: bool = False) -> str:
    """`value * scale` with thousands separators; a number that rounds to zero has no sign."""
    if is_null(value):
        return NULL
    rounded = round(float(value) * scale, digits)
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{rounded + 0.0:{'+' if sign and rounded else ''},.{digits}f}".replace("-", "−")


def percent(value: Any, digits: int = 1) -> str:
    return number(value, digits, scale=100)


def interval(
    low: Any, high: Any, digits: int = 1, *, scale: float = 100, sign: bool = False
) -> str:
    if is_null(low) or is_null(high):
        return ""
    bounds = (number(bound, digits, scale=scale, sign=sign) for bound in (low, high))
    return "[{}, {}]".format(*bounds)


def with_interval(
    value: Any, low: Any, high: Any, digits: int = 1, *, scale: float = 100, sign: bool = False
) -> str:
    point = number(value, digits, scale=scale, sign=sign)
    return f"{point} {interval(low, high, digits, scale=scale, sign=sign)}".strip()


def p_value(value: Any) -> str:
    if is_null(value):
        return NULL
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def seconds(value: Any) -> str:
    """Three significant digits, also for microseconds per token."""
    return NULL if is_null(value) else f"{float(value):.3g}"


def tokens(length: Any) -> str:
    return f"{int(length):,} tokens"


def task_name(task: str, tasks: Any) -> str:
    if task != "mean":
        return task
    return f"mean of {int(tasks)} tasks" if not is_null(tasks) else "mean"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

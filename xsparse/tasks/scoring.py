"""RULER's scores: case-blind containment of the reference answers in the prediction."""

from __future__ import annotations

import re
from collections.abc import Sequence

METRICS = ("all", "part")


def score(metric: str, prediction: str, references: Sequence[str]) -> float:
    """0..1. `all`: share of references that are contained; `part`: 1 if any of them is."""
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: allowed are {', '.join(METRICS)}")
    if not references:
        raise ValueError("references=[]: a sample without a reference cannot be scored")
    text = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()
    found = [reference.lower() in text for reference in references]
    return float(any(found)) if metric == "part" else sum(found) / len(found)

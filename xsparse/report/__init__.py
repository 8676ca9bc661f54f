"""The report of a sweep: Pareto figures, NIAH heat maps, tables and one self-contained page.

    python -m xsparse.report DIR          a sweep folder, a folder of runs, or a file of rows
    python -m xsparse.report A B          two sweeps compared pair by pair

Everything is made from what is stored, so a report can be made again at any time. This package
imports nothing heavy; pandas and matplotlib load when something is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsparse.report.build import make
    from xsparse.report.figures import densities, heatmap, pareto, stage_bars
    from xsparse.report.pairs import compare

__all__ = ["compare", "densities", "heatmap", "make", "pareto", "stage_bars"]

_HOMES = {
    "compare": "pairs",
    "densities": "figures",
    "heatmap": "figures",
    "make": "build",
    "pareto": "figures",
    "stage_bars": "figures",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

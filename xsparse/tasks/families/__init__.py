"""Task families: each module of this folder lists its tasks in `TASKS` and is found by itself."""

from __future__ import annotations

import pkgutil
from functools import lru_cache
from importlib import import_module

from xsparse.tasks.draft import Spec


@lru_cache(maxsize=1)
def specs() -> dict[str, Spec]:
    """All tasks by name, RULER's in RULER's order, then the others."""
    found: dict[str, Spec] = {}
    for module in pkgutil.iter_modules(__path__):
        for spec in import_module(f"{__name__}.{module.name}").TASKS:
            if spec.name in found:
                raise ValueError(f"two tasks are named {spec.name}")
            found[spec.name] = spec
    first = {name: found[name] for name in RULER}
    return first | found


RULER = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)

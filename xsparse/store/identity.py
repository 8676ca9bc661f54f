"""The name of a run: a hash of everything that can change one of its numbers."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xsparse.store.files import plain

PACKAGE = Path(__file__).parents[1]

# What of the package can change a number; the rest only stores, shows or starts.
SOURCE_PARTS = (
    "ops",
    "kv",
    "selectors",
    "models",
    "tasks",
    "attention.py",
    "build.py",
    "fit.py",
    "graph_pair.py",
    "step_graph.py",
    "steps.py",
    "hf.py",
    "measure.py",
    "settings.py",
    "runner.py",
    "counters.py",
)


def identity(payload: Mapping[str, Any]) -> str:
    """The run id, 12 hex digits, of `payload` (nested dicts, lists, numbers, strings).

    Order of keys does not count, nor tuple against list, 1.0 against 1, or the digits of a float
    beyond the tenth: a threshold of 0.7999999999999999, as a range yields it, is 0.8.
    Raises ValueError for NaN and infinities, TypeError for values that are not data.
    """
    canonical = json.dumps(plain(payload, _canonical), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def _canonical(number: float) -> float | int:
    if not math.isfinite(number):
        raise ValueError(f"a run cannot be identified by {number}: only finite numbers are allowed")
    rounded = float(f"{number:.10g}")
    return int(rounded) if rounded.is_integer() else rounded


def source_hash(root: str | Path = PACKAGE) -> str:
    """sha256 of the files of `SOURCE_PARTS` under the package folder `root`.

    Names and contents count, dates do not. Byte code, hidden files and Markdown are left out.
    Raises ValueError if there is no such file.
    """
    root = Path(root)
    digest = hashlib.sha256()
    files = sorted(_source_files(root), key=lambda path: path.relative_to(root).as_posix())
    if not files:
        raise ValueError(f"root={root}: no package source here, expected {', '.join(SOURCE_PARTS)}")
    for path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def _source_files(root: Path) -> Iterable[Path]:
    for part in SOURCE_PARTS:
        top = root / part
        for path in top.rglob("*") if top.is_dir() else [top]:
            names = path.relative_to(root).parts
            hidden = any(name.startswith(".") or name == "__pycache__" for name in names)
            counts = path.suffix not in {".pyc", ".md"} and path.name != "__main__.py"
            counts &= names[:2] != ("models", "adapters")  # by the sha256 of what is loaded
            if path.is_file() and not hidden and counts:
                yield path

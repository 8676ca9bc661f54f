"""The task config node, be it a dict, an OmegaConf node or a dataclass, as a checked value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

HAYSTACKS = ("essay", "noise")


@dataclass(frozen=True)
class Options:
    """Keys of conf/task/*.yaml. None or empty means: the task's own default."""

    name: str
    tasks: tuple[str, ...] = ()
    ruler_data: Path | None = None
    qa_data: Path | None = None
    depths: tuple[float, ...] | None = None
    rounds: int = 1
    haystack: str | None = None

    def __post_init__(self) -> None:
        if self.haystack is not None and self.haystack not in HAYSTACKS:
            raise ValueError(f"task.haystack={self.haystack!r}: allowed are {', '.join(HAYSTACKS)}")
        if self.rounds < 1:
            raise ValueError(f"task.rounds={self.rounds}: must be at least 1")
        if self.depths is not None:
            if not self.depths:
                raise ValueError("task.depths=[]: needs at least one depth in percent")
            for depth in self.depths:
                if not 0 <= depth <= 100:
                    raise ValueError(f"task.depths has {depth}: a depth is a percentage, 0 to 100")
        for key in ("ruler_data", "qa_data"):
            folder = getattr(self, key)
            if folder is not None and not folder.is_dir():
                raise ValueError(f"task.{key}={folder}: no such folder")

    @classmethod
    def of(cls, node: Any) -> Options:
        def read(key: str) -> Any:
            return node.get(key) if isinstance(node, Mapping) else getattr(node, key, None)

        if isinstance(node, Options):
            return node
        given = {f.name: read(f.name) for f in fields(cls) if read(f.name) is not None}
        if "name" not in given:
            raise ValueError("task.name is missing")
        for key in ("ruler_data", "qa_data"):
            if key in given:
                given[key] = Path(given[key]).expanduser()
        if "tasks" in given:
            given["tasks"] = tuple(given["tasks"])
        if "depths" in given:
            given["depths"] = tuple(float(depth) for depth in given["depths"])
        return cls(**given)

"""Which runs a point needs and what identifies each, worked out without loading a model.

A point is one run of its own plus one dense run per (task, length), which every other point with
the same model, prompts, engine and chunking shares.
"""

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xsparse import models, store, tasks
from xsparse.config import Config
from xsparse.device import Device, dtype_name, find
from xsparse.settings import ConfigError, Settings

Cell = tuple[str, int]  # (task, length)


@dataclass(frozen=True)
class Plan:
    """cells in the order they run; dense: the run id of each cell's baseline."""

    config: Config
    settings: Settings
    files: models.ModelFiles
    device: Device
    dtype: str
    env: dict[str, Any]
    cells: list[Cell]
    run_id: str
    dense: dict[Cell, str]

    @property
    def is_dense(self) -> bool:
        return self.settings.is_dense

    def missing(self, run_id: str, cells: list[Cell]) -> list[tuple[str, int, int]]:
        """(task, length, index) of the prompts of a run that are not stored."""
        run = store.RunFolder(Path(self.config.results) / "runs" / run_id)
        return [
            (task, length, index)
            for task, length in cells
            for index in run.missing(task, length, self._samples(task, length))
        ]

    def _samples(self, task: str, length: int) -> int:
        """Prompts of a cell: a NIAH grid and a data file have a number of their own."""
        return tasks.sample_count(task, length, self.config.task, self.config.samples)

    @property
    def complete(self) -> bool:
        """Every prompt of every run of this point is stored and the runs are closed."""
        runs = {self.run_id: self.cells, **{r: [cell] for cell, r in self.dense.items()}}
        root = Path(self.config.results) / "runs"
        return all(
            self.finished(store.RunFolder(root / run_id), cells) for run_id, cells in runs.items()
        )

    def finished(self, run: store.RunFolder, cells: list[Cell]) -> bool:
        """Whether a run is closed with its rows and holds every prompt of `cells`."""
        return run.state == "done" and bool(run.rows()) and not self.missing(run.run_id, cells)

    def resolved(self) -> dict[str, Any]:
        """The configuration as stored beside the run."""
        return {**asdict(self.config), "device": self.device.kind, "dtype": self.dtype}


def make(config: Config, progress: Any = None) -> Plan:
    """The plan of a point. Fetches the model's files if they are not there.

    Raises ConfigError where the model cannot hold the length, ModelError where it cannot be had,
    ValueError for a device that is not there.
    """
    env = store.environment()
    device = find(config.device, env)
    files = models.fetch(config.model, progress)
    longest = max(config.length)
    if longest > files.max_length:
        raise ConfigError(
            f"length={longest}: allowed is <= {files.max_length}, what model={files.name} holds"
        )
    dtype = dtype_name(config.dtype, device)
    cells = [(task, length) for length in config.length for task in config.tasks]
    settings = config.settings()
    backend = "torch" if config.ops_backend == "auto" and not device.is_cuda else None
    shared = {
        "weights": files.weights_sha256,
        "tokenizer": files.tokenizer_hash,
        "template": config.model.chat_template_kwargs,
        "dtype": dtype,
        "device": device.label,
        "threads": None if device.is_cuda else _threads(env),
        "versions": env["versions"],
        "source": store.source_hash(),
        "seed": config.seed,
    }

    def run_id(of: Settings, of_cells: list[Cell]) -> str:
        own = of.concerns() | ({"ops_backend": backend} if backend else {})
        if isinstance(own.get("threshold"), str):
            own["threshold"] = _file_hash(Path(own["threshold"][1:]))
        return store.identity(
            {**shared, **own, "cells": of_cells, "task": _task_identity(config, of_cells)}
        )

    dense = {cell: run_id(settings.dense(), [cell]) for cell in cells}
    return Plan(config, settings, files, device, dtype, env, cells, run_id(settings, cells), dense)


def _threads(env: dict[str, Any]) -> dict[str, Any]:
    """What decides how many CPU threads torch uses."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "OMP_NUM_THREADS": env["variables"]["OMP_NUM_THREADS"],
    }


def _task_identity(config: Config, cells: list[Cell]) -> dict[str, Any]:
    """What shapes prompts beside task, length and seed; data files by content."""
    node = asdict(config.task)
    for key in ("name", "tasks", "rounds", "ruler_data", "qa_data"):
        del node[key]
    paths = {p for task, length in cells for p in tasks.data_paths(task, length, config.task)}
    return {**node, "data": [_file_hash(path) for path in sorted(paths)]}


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Where a training stands, on disk: replaced in one step, in files small enough to be moved about.

A checkpoint is a folder `checkpoint-<step>` with parts of one `torch.save` and `checkpoint.json`,
which is written last. Training goes on from the newest complete one.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import torch

PART_BYTES = 15 * 2**20
_INDEX = "checkpoint.json"


def save(folder: Path, step: int, state: dict[str, Any], identity: str, **about: Any) -> Path:
    """Write a checkpoint and remove the older ones. about: JSON for whoever exports it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getbuffer()
    temporary, final = folder / f".checkpoint-{step}", folder / f"checkpoint-{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    parts = range(0, len(content), PART_BYTES)
    for i, start in enumerate(parts):
        (temporary / f"part-{i}").write_bytes(content[start : start + PART_BYTES])
    index = {
        "step": step,
        "parts": len(parts),
        "sha256": hashlib.sha256(content).hexdigest(),
        "identity": identity,
        **about,
    }
    (temporary / _INDEX).write_text(json.dumps(index, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    temporary.replace(final)
    for older in folder.glob("checkpoint-*"):
        if older != final:
            shutil.rmtree(older)
    return final


def newest(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{_INDEX}")]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def about(path: Path) -> dict[str, Any]:
    """What `save` was told of the training, its step and its identity."""
    return json.loads((path / _INDEX).read_text())


def check(path: Path, **expected: str) -> None:
    """ValueError if a checkpoint is of another training: says other things than `expected`."""
    index = about(path)
    for key, own in expected.items():
        if index[key] != own:
            raise ValueError(
                f"folder={path.parent}: its checkpoint is of another training ({key} {index[key]}, "
                f"this is {own}); choose another folder"
            )


def load(path: Path, device: Any) -> dict[str, Any]:
    """The state. ValueError if it is damaged."""
    index = about(path)
    content = b"".join((path / f"part-{i}").read_bytes() for i in range(index["parts"]))
    if hashlib.sha256(content).hexdigest() != index["sha256"]:
        raise ValueError(f"folder={path.parent}: {path.name} is damaged, remove it")
    return torch.load(io.BytesIO(content), map_location=device, weights_only=True)

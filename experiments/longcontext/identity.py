"""What identifies a training: its keys and its base; and the source that makes its data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from experiments.longcontext.settings import TrainConfig

HERE = Path(__file__).parent
_DATA_SOURCE = ("packs.py", "prompts.py", "material.py", "wordings.py", "data/*.txt")


def training_identity(config: TrainConfig, base_sha256: str) -> str:
    """12 hex digits of the keys and the base: what a checkpoint must agree with."""
    text = json.dumps({"config": config.what_is_trained(), "base": base_sha256}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def recipe(config: TrainConfig, base_sha256: str) -> str:
    """What an adapter says of its making: the training's identity and that of its data's source."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _DATA_SOURCE for path in HERE.glob(pattern)):
        digest.update(path.read_bytes())
    return f"{training_identity(config, base_sha256)}-{digest.hexdigest()[:12]}"

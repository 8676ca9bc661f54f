"""A model folder as transformers saves it: which files it must have and what identifies it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xsparse.models.files import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_CONFIG_FILES = ("config.json", "generation_config.json")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"cannot read {path}: not a JSON object")
    return value


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files the folder must hold."""
    if (folder / INDEX).is_file():
        return sorted({*read_json(folder / INDEX).get("weight_map", {}).values()})
    return [WEIGHTS]


def missing_tokenizer_files(folder: Path) -> list[str]:
    def has(*names: str) -> bool:
        return all((folder / name).is_file() for name in names)

    missing = []
    if not (has("tokenizer.json") or has("tokenizer.model") or has("vocab.json", "merges.txt")):
        missing.append("tokenizer.json")
    template = has("chat_template.jinja") or has("chat_template.json")
    if not template and has("tokenizer_config.json"):
        template = bool(read_json(folder / "tokenizer_config.json").get("chat_template"))
    if not template:
        missing.append("a chat template (chat_template.jinja)")
    return missing


def missing_files(folder: Path) -> list[str]:
    """What a complete model folder would have and this one has not."""
    needed = ["config.json", *weight_files(folder)]
    absent = [name for name in needed if not (folder / name).is_file()]
    return absent + missing_tokenizer_files(folder)


def identifying_weights(folder: Path) -> list[str]:
    """Existing weights and configs: the files whose bytes decide a forward pass."""
    names = [*_CONFIG_FILES, INDEX]
    return [name for name in names if (folder / name).is_file()] + weight_files(folder)


def identifying_tokenizer(folder: Path) -> list[str]:
    """Existing files whose bytes decide which ids a prompt becomes."""
    return [name for name in _TOKENIZER_FILES if (folder / name).is_file()]

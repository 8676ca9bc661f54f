"""The size of a model from its config alone: for refusals and estimates before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xsparse.models.files import ModelError


@dataclass(frozen=True)
class ModelShape:
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    params: int
    """Exact for llama, mistral, qwen2 and qwen3; close for other dense decoders."""
    max_length: int

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token over all layers, at 2 bytes a number."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


def from_config(config: Mapping[str, Any], max_length: int) -> ModelShape:
    """From the fields of a config.json (of its text part, for a model of several)."""

    def need(name: str) -> int:
        if not isinstance(config.get(name), int):
            raise ModelError(f"the model's config has {name}={config.get(name)!r}: need an integer")
        return config[name]

    hidden, q_heads = need("hidden_size"), need("num_attention_heads")
    head_dim = config.get("head_dim") or hidden // q_heads
    shape = {
        "layers": need("num_hidden_layers"),
        "q_heads": q_heads,
        "kv_heads": config.get("num_key_value_heads") or q_heads,
        "head_dim": head_dim,
        "hidden": hidden,
        "vocab": need("vocab_size"),
    }
    params = _count(config, intermediate=need("intermediate_size"), **shape)
    return ModelShape(**shape, params=params, max_length=max_length)


def _count(
    config: Mapping[str, Any],
    *,
    intermediate: int,
    layers: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    vocab: int,
) -> int:
    family = config.get("model_type")
    q_width, kv_width = q_heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * q_width + 2 * hidden * kv_width
    if family == "qwen2":  # biases on q, k, v always
        attention += q_width + 2 * kv_width
    elif config.get("attention_bias"):
        attention += q_width + 2 * kv_width + hidden
    if family == "qwen3":  # norms over each head's q and k
        attention += 2 * head_dim
    mlp = 3 * hidden * intermediate
    if config.get("mlp_bias"):
        mlp += 2 * intermediate + hidden
    norms = 2 * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return embeddings + layers * (attention + mlp + norms) + hidden

"""Which decoders xsparse computes correctly: full causal attention behind transformers' interface.

A model whose attention does more (a window, soft-capping, another cache) would run and give wrong
numbers, so it is refused before its weights are read.
"""

from __future__ import annotations

from typing import Any

from xsparse.models.files import ModelError

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_supported(config: Any, model_class: type | None = None) -> None:
    """Raise a one-line ValueError naming the first thing in a transformers config that is not
    handled; with `model_class`, also when its attention cannot be replaced."""
    reason = _reason(config.get_text_config())
    if model_class is not None and not getattr(model_class, "_supports_attention_backend", False):
        reason = reason or f"{model_class.__name__} has no exchangeable attention"
    if reason:
        raise ModelError(
            f"model type {config.model_type!r} is not supported: {reason} "
            "(llama, mistral, qwen2, qwen3 without a sliding window are)"
        )


def _reason(config: Any) -> str | None:
    def value(name: str) -> Any:
        return getattr(config, name, None)

    if value("is_encoder_decoder"):
        return "it is an encoder-decoder"
    layer_types = value("layer_types")
    other = sorted(set(layer_types or ()) - {"full_attention"})
    if other:
        return f"its config has layers of type {', '.join(other)}"
    # Where layer types are given they decide, and the window's size alone means nothing.
    if layer_types is None and value("sliding_window") is not None:
        return f"its config has sliding_window={value('sliding_window')}"
    for name in ("attn_logit_softcapping", "attention_chunk_size"):
        if value(name):
            return f"its config has {name}={value(name)}"
    if value("v_head_dim") not in (None, value("head_dim")):
        return f"its values have v_head_dim={value('v_head_dim')}, other than its keys"
    rope = value("rope_parameters") or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        # Keys of an early chunk would keep other frequencies than one long forward gives them.
        return f"its rotary embedding ({rope['rope_type']}) changes with the prompt's length"
    return None

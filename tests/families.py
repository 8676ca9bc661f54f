"""Tiny random models of every supported family."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 8}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}


def tiny(family: str, attention: str = "eager", **changes):
    """The same weights at every call."""
    config_class, model_class, extra = FAMILIES[family]
    config = config_class(**{**SIZES, **extra, **changes}, attn_implementation=attention)
    torch.manual_seed(0)
    # Larger weights than usual: with flat attention any mask would look right.
    model = model_class(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            weight.mul_(8)
    return model


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ids [1, tokens] without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (1, tokens), generator=generator)

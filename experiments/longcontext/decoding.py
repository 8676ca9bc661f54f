"""Greedy answers to many prompts of different lengths: prefill one by one, decode together.

No padding enters attention. Each row keeps its own length; its new keys and values are written
behind its own prompt and a row attends to exactly its own tokens, so that a batch gives what each
prompt gives alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from experiments.longcontext.attention import causal

NAME = "longcontext_ragged"


class Ragged:
    """K and V of a batch: [rows, kv_heads, capacity, d] per layer, row i filled to lengths[i].

    `row` is the row that is prefilled; None while all rows take one token each.
    """

    def __init__(self, model: Any, rows: int, capacity: int):
        config: Any = model.config
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.layers = [
            tuple(
                torch.zeros(rows, heads, capacity, width, dtype=model.dtype, device=model.device)
                for _ in "kv"
            )
            for _ in range(config.num_hidden_layers)
        ]
        self.lengths = torch.zeros(rows, dtype=torch.long, device=model.device)
        self.row: int | None = None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """query: [b, q_heads, n, d] -> [b, n, q_heads, d]; b is 1 in prefill, n is 1 in decode."""
        keys, values = self.layers[module.layer_idx]  # type: ignore[index]
        if self.row is not None:
            keys[self.row, :, : key.shape[2]] = key[0]
            values[self.row, :, : key.shape[2]] = value[0]
            return causal(query, key, value, scaling).transpose(1, 2), None
        rows, kv_heads, capacity, width = keys.shape
        every = torch.arange(rows, device=keys.device)
        keys[every, :, self.lengths] = key[:, :, 0]
        values[every, :, self.lengths] = value[:, :, 0]
        used = int(self.lengths.max()) + 1 if keys.device.type == "cpu" else capacity
        grouped = query.view(rows, kv_heads, -1, width)  # the query heads of a KV head
        scale = scaling if scaling is not None else width**-0.5
        scores = (grouped @ keys[:, :, :used].transpose(2, 3)).float() * scale
        beyond = torch.arange(used, device=keys.device) > self.lengths[:, None]
        weights = scores.masked_fill(beyond[:, None, None], -torch.inf).softmax(-1)
        out = weights.to(values.dtype) @ values[:, :, :used]
        return out.view(rows, 1, -1, width), None


@contextmanager
def _bound(model: Any, ragged: Ragged) -> Iterator[None]:
    AttentionInterface.register(NAME, ragged.attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


@torch.inference_mode()
def answers(
    model: Any, prompts: Sequence[Sequence[int]], *, new_tokens: int, eos_ids: Sequence[int]
) -> list[list[int]]:
    """The new ids of each prompt, without what ends it."""
    device, rows = model.device, len(prompts)
    capacity = max(len(ids) for ids in prompts) + new_tokens
    ragged = Ragged(model, rows, capacity)
    ends = torch.tensor(sorted(eos_ids), device=device)
    with _bound(model, ragged):
        first = []
        for row, ids in enumerate(prompts):
            ragged.row = row
            hidden = model.model(
                input_ids=torch.tensor([ids], device=device), use_cache=False
            ).last_hidden_state[:, -1]
            first.append(model.lm_head(hidden).argmax(-1))
            ragged.lengths[row] = len(ids)
        ragged.row = None
        tokens = torch.cat(first)
        produced, done = [tokens], torch.isin(tokens, ends)
        for count in range(1, new_tokens):
            if count % 8 == 1 and bool(done.all()):  # to look costs a wait for the device
                break
            hidden = model.model(
                input_ids=tokens[:, None], position_ids=ragged.lengths[:, None], use_cache=False
            ).last_hidden_state[:, -1]
            ragged.lengths += 1
            tokens = model.lm_head(hidden).argmax(-1)
            produced.append(tokens)
            done |= torch.isin(tokens, ends)
    found = []
    for row in torch.stack(produced, dim=1).tolist():
        end = next((i for i, token in enumerate(row) if token in eos_ids), len(row))
        found.append(row[:end])
    return found

"""Training: LoRA on packed documents, the loss on answers, interrupted and gone on with at will.

One step: merged weights into the model, `accumulate` packs forward and backward, gradients from the
weights to the factors, AdamW in fp32. Logits are computed where something is learned and nowhere
else: at 49,152 words of vocabulary those of a whole pack would be larger than the model's memory.

Memory of a pack without checkpointing, in bf16, per layer and token: about 5 x 576 numbers around
attention, 3 x 576 of norms and residuals, 4 x 1,536 of the MLP, so 22 KB; 30 layers x 65,536 tokens
is 43 GB compiled, and up to twice that where nothing is fused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recomputed

from experiments.longcontext import checkpoint
from experiments.longcontext.attention import PackedAttention, packed, positions
from experiments.longcontext.identity import data_source, training_identity
from experiments.longcontext.lora import Lora
from experiments.longcontext.packs import TEXT, Pack, Packs
from experiments.longcontext.settings import TrainConfig
from xsparse.models import adapter, fetch, load

log = logging.getLogger(__name__)

LOGIT_ROWS = 4096  # at once: 0.8 GB of fp32 logits
_CLOSING_S = 15  # time kept for the last checkpoint


class Trainer:
    """A model, its adapter and the optimizer. `step` takes the packs of one optimizer step."""

    def __init__(self, model: Any, attention: PackedAttention, config: TrainConfig):
        self.model, self.attention, self.config = model, attention, config
        self.lora = Lora(model, rank=config.rank, alpha=config.alpha, seed=config.seed)
        self.device = model.device
        if self.device.type == "cuda":  # the base stays in fp32 inside Lora
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        model.train()
        if config.checkpointing:
            renamed = hasattr(model, "activation_checkpointing_enable")  # in transformers 5.24
            name = f"{'activation' if renamed else 'gradient'}_checkpointing_enable"
            getattr(model, name)({"use_reentrant": False})
        if config.compile:
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        self.optimizer = torch.optim.AdamW(
            self.lora.parameters,
            lr=config.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )

    def step(self, packs: Sequence[Pack], learning_rate: float) -> dict[str, Any]:
        """One optimizer step; returns its losses and, by family, what was right."""
        self.lora.merge()
        answers = sum(int(_is_answer(pack).sum()) for pack in packs)
        texts = sum(int(pack.learned.sum()) for pack in packs) - answers
        seen = [self._accumulate(pack, answers, texts) for pack in packs]
        self.lora.pull_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.lora.parameters, self.config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return {"gradient_norm": round(float(norm), 4), **_summary(packs, seen)}

    def _accumulate(self, pack: Pack, answers: int, texts: int) -> Tensor:
        """Gradients of one pack; returns [2, learned tokens]: loss, whether right."""
        where = np.flatnonzero(pack.learned)
        weight = np.where(
            _is_answer(pack)[where], 1 / max(1, answers), self.config.text_weight / max(1, texts)
        )
        ids = torch.from_numpy(pack.ids).long().to(self.device)
        target = torch.from_numpy(where).to(self.device)
        weights = torch.from_numpy(weight.astype(np.float32)).to(self.device)
        self.attention.lengths = pack.lengths
        hidden = self.model.model(
            input_ids=ids[None],
            position_ids=positions(pack.lengths, self.device),
            use_cache=False,
        ).last_hidden_state[0]
        total, seen = hidden.new_zeros((), dtype=torch.float32), []
        pieces = (t.split(LOGIT_ROWS) for t in (hidden[target - 1], ids[target], weights))
        for states, tokens, weight_piece in zip(*pieces, strict=True):
            loss, details = recomputed(
                self._loss, states, tokens, weight_piece, use_reentrant=False
            )
            total = total + loss
            seen.append(details)
        total.backward()
        return torch.cat(seen, dim=1)

    def _loss(self, states: Tensor, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.lm_head(states).float()
        losses = F.cross_entropy(logits, tokens, reduction="none")
        right = (logits.argmax(-1) == tokens).float()
        return (losses * weights).sum(), torch.stack([losses.detach(), right])

    def state(self, step: int) -> dict[str, Any]:
        return {"step": step, "lora": self.lora.state(), "optimizer": self.optimizer.state_dict()}

    def begin_from(self, name: str) -> list[dict[str, Any]]:
        """Take an adapter's factors; returns its stages. ValueError if it is of another shape."""
        path = adapter.find(name)
        found, config = adapter.read(path), self.config
        if not found.stages:  # it would be published as if this had begun from the base
            raise ValueError(f"model.adapter={name}: its header does not say how it was trained")
        given = {"rank": found.rank, "alpha": found.alpha, **found.config}
        for key in ("rank", "alpha", *adapter.CONFIG_KEYS):
            if given.get(key) != (own := getattr(config, key)):
                raise ValueError(f"{key}={own}: model.adapter={name} allows {given.get(key)} alone")
        if missing := sorted(set(self.lora.targets) ^ set(found.targets)):
            raise ValueError(f"model.adapter={name}: {missing[0]} is not in both it and the model")
        self.lora.load_state(adapter.read_factors(path, found, str(self.device)))
        return found.stages

    def load_state(self, state: dict[str, Any]) -> None:
        self.lora.load_state(state["lora"])
        self.optimizer.load_state_dict(state["optimizer"])


def train(config: TrainConfig, started: float) -> Path:
    """Train to the end or to the limit; returns the last checkpoint.

    started: `time.monotonic()` of the command's start. Raises ValueError for a checkpoint of
    another training.
    """
    recipe, folder = config.recipe(), Path(config.folder)
    files = fetch(config.model)
    identity, data = training_identity(config, files.weights_sha256), data_source()
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    packs = Packs(
        recipe,
        str(files.tokenizer_folder),
        accumulate=config.accumulate,
        workers=config.workers,
    )
    model = load_base(config, device)
    with contextlib.closing(packs), packed(model) as attention:
        trainer = Trainer(model, attention, config)
        stages = trainer.begin_from(config.model.adapter) if config.model.adapter else []
        step = first = 0
        if found := checkpoint.newest(folder):
            checkpoint.check(found, identity=identity, data=data)
            state = checkpoint.load(found, model.device)
            trainer.load_state(state)
            step = first = state["step"]
            log.info("going on from %s", found)

        def save(step: int) -> Path:
            return checkpoint.save(
                folder,
                step,
                trainer.state(step),
                identity,
                data=data,
                config=asdict(config),
                stages=stages,
            )

        journal = Journal(folder / "log.jsonl", first)
        saved = before = time.monotonic()
        log.info("ready after %.0f s: steps %d to %d", before - started, first, recipe.steps)
        for batch in packs.steps(first):
            rate = learning_rate(config, step, recipe.steps)
            row = trainer.step(batch, rate)
            step += 1
            now = time.monotonic()
            phase = recipe.phase(step - 1)
            journal.add(
                {
                    "step": step,
                    "longest": phase.longest,
                    "learning_rate": rate,
                    "step_s": round(now - before, 3),
                    "tokens_s": round(recipe.pack_tokens * config.accumulate / (now - before)),
                    "peak_gb": _peak_gb(),
                    **row,
                }
            )
            duration, before = now - before, now
            out_of_time = config.limit_s is not None and (
                now - started + 1.5 * duration + _CLOSING_S > config.limit_s
            )
            if out_of_time or (config.steps is not None and step - first >= config.steps):
                break
            if now - saved > config.checkpoint_s:
                save(step)
                saved = time.monotonic()
        path = save(step)
    log.info("%d of %d steps are done: %s", step, recipe.steps, path)
    return path


def load_base(config: TrainConfig, device: str) -> Any:
    """The base in fp32, with the rotary base and positions of the adapter to be."""
    path = Path(config.folder) / "start.safetensors"
    adapter.write(path, describe(config, fetch(config.model).base_sha256, [], []), {})
    return load(replace(config.model, adapter=str(path)), dtype=torch.float32, device=device).model


def describe(
    config: TrainConfig, base: str, targets: list[str], stages: list[dict[str, Any]]
) -> adapter.Adapter:
    """The header of an adapter. stages: see export.py"""
    return adapter.Adapter(
        format_version=adapter.FORMAT_VERSION,
        base=base,
        rank=config.rank,
        alpha=config.alpha,
        targets=targets,
        config={
            "rope_theta": config.rope_theta,
            "max_position_embeddings": config.max_position_embeddings,
        },
        recipe="+".join(stage["recipe"] for stage in stages),
        stages=stages,
    )


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to `final_share` of the peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    share = config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * share


class Journal:
    """log.jsonl, one row a step; rows past the checkpoint that one goes on from are dropped."""

    def __init__(self, path: Path, first: int):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.is_file() else []
        kept = [line for line in lines if json.loads(line)["step"] <= first]
        path.write_text("".join(f"{line}\n" for line in kept))

    def add(self, row: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if row["step"] <= 5 or row["step"] % 10 == 0:
            exact = " ".join(
                f"{name.removeprefix('niah_')}={right}/{count}"
                for name, (right, count, _, _) in row["families"].items()
            )
            log.info(
                "step %d (to %d tokens) loss %.4f text %.3f norm %.2f lr %.1e %d tokens/s "
                "%.0f GB | %s",
                *(row[key] for key in ("step", "longest", "loss", "text_loss", "gradient_norm")),
                *(row[key] for key in ("learning_rate", "tokens_s", "peak_gb")),
                exact,
            )


def _is_answer(pack: Pack) -> np.ndarray:
    """[pack_tokens]: whether a token is part of an answer."""
    text = np.repeat([family == TEXT for family in pack.families], pack.lengths)
    return pack.learned & ~text


def _summary(packs: Sequence[Pack], seen: Sequence[Tensor]) -> dict[str, Any]:
    """Mean losses; by family [documents all right, documents, tokens right, tokens]."""
    losses: dict[bool, list[np.ndarray]] = {False: [], True: []}
    families: dict[str, list[int]] = {}
    for pack, tensor in zip(packs, seen, strict=True):
        loss, right = tensor.cpu().numpy()
        document = np.repeat(np.arange(len(pack.lengths)), pack.lengths)[pack.learned]
        for i, family in enumerate(pack.families):
            own = document == i
            losses[family == TEXT].append(loss[own])
            if family != TEXT:
                counts = families.setdefault(family, [0, 0, 0, 0])
                new = (bool(right[own].all()), 1, right[own].sum(), own.sum())
                families[family] = [int(a + b) for a, b in zip(counts, new, strict=True)]

    def mean(parts: list[np.ndarray]) -> float:
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return round(float(joined.mean()), 5) if joined.size else 0.0

    return {
        "loss": mean(losses[False]),
        "text_loss": mean(losses[True]),
        "families": dict(sorted(families.items())),
    }


def _peak_gb() -> float:
    return round(torch.cuda.max_memory_allocated() / 1e9, 1) if torch.cuda.is_available() else 0.0

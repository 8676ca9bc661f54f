"""One layer of a real model on one prompt: estimated scores, the mask made of them, the true mass;
and the thresholds per head that calibration makes of such masses.

Runs the default model with dense attention, so that score and mass of a block come from the same
queries and keys (as `xsparse.calibrate` sees them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from experiments.study.panels import STYLE, WIDE_IN
from xsparse import models, tasks
from xsparse.calibrate.observe import observed
from xsparse.cli import compose, name_model
from xsparse.config import register
from xsparse.ops.selection.fast import select_blocks
from xsparse.report.figures import WIDTH_IN

NEEDLE_COLOUR = "#D55E00"
SMALLEST_SHARE = 1e-3  # shares below it look alike


@dataclass(frozen=True)
class Layer:
    """What one layer saw of a prompt.

    scores, mass: fp32 [q_heads, blocks, blocks], zero above the diagonal; scores are xattention's,
    mass is the sum of attention probabilities; needle_block, question_block: None if the task
    does not say where they are
    """

    prompt: str
    tokens: int
    layer: int
    block_size: int
    scores: Tensor
    mass: Tensor
    needle_block: int | None
    question_block: int | None

    def mask(self, threshold: float) -> Tensor:
        """What xattention keeps at this threshold: bool like scores."""
        return select_blocks(self.scores, threshold, q_block_start=0)

    def density(self, threshold: float) -> Tensor:
        """Kept of the causal blocks, by head."""
        blocks = self.scores.shape[-1]
        return self.mask(threshold).sum((1, 2)) / (blocks * (blocks + 1) / 2)

    def recall(self, threshold: float) -> Tensor:
        """True mass kept, by head."""
        return (self.mass * self.mask(threshold)).sum((1, 2)) / self.mass.sum((1, 2))


def observe(
    layer: int,
    *,
    task: str = "niah_single_2",
    length: int = 1024,
    index: int = 0,
    block_size: int = 32,
    stride: int = 8,
    model: str = "smollm2-135m-lc",
) -> Layer:
    """Prefill one prompt of a task on the CPU and keep what `layer` saw.

    Raises ValueError for a layer that the model does not have, and as run.py for other values.
    """
    register()
    sizes = [f"block_size={block_size}", f"stride={stride}"]
    config = compose([*name_model(f"model={model}"), *sizes])
    layers = models.shape(config.model).layers
    if not 0 <= layer < layers:
        raise ValueError(f"layer={layer}: allowed is 0 to {layers - 1}, what {model} has")
    loaded = models.load(config.model, dtype="float32", device="cpu")
    built = tasks.build(task, loaded.tokenizer, length=length, seed=config.seed, node=config.task)
    sample = built.sample(index)
    blocks = -(-len(sample.input_ids) // block_size)
    chunks: list[tuple[Tensor, Tensor]] = []

    def watch(at: int, first_block: int, mass: Tensor, scores: Tensor) -> None:
        if at == layer:
            later = (0, blocks - mass.shape[-1])  # blocks that come after the chunk
            pad = torch.nn.functional.pad
            chunks.append((pad(scores.float(), later), pad(mass.float(), later)))

    chunk = config.chunk_size
    with observed(loaded, stride=stride, block_size=block_size, chunk_size=chunk) as prefill:
        prefill(sample.input_ids, watch)
    scores, mass = (torch.cat(parts, 1) for parts in zip(*chunks, strict=True))
    return Layer(
        prompt=f"{task}, prompt {index}",
        tokens=len(sample.input_ids),
        layer=layer,
        block_size=block_size,
        scores=scores,
        mass=mass,
        needle_block=_block(sample.meta, "needle_token", block_size),
        question_block=_block(sample.meta, "question_token", block_size),
    )


@matplotlib.rc_context(STYLE)
def draw(layer: Layer, head: int, threshold: float) -> Figure:
    """Score shares, mask and true mass of one head, with the needle's column and the question's
    row."""
    share = layer.scores[head] / layer.scores[head].sum(-1, keepdim=True)
    mass = layer.mass[head] / layer.mass[head].sum(-1, keepdim=True)
    mask = layer.mask(threshold)[head]
    density, recall = (x[head] for x in (layer.density(threshold), layer.recall(threshold)))
    panels = {
        "estimated share of a row": share,
        f"mask at {threshold:g}: density {density:.0%}": mask,
        f"true mass: {recall:.0%} is kept": mass,
    }
    shares = LogNorm(vmin=SMALLEST_SHARE, vmax=1, clip=True)
    figure = Figure(figsize=(WIDE_IN, 3.2), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    later = torch.ones_like(mask).triu(1)
    for ax, (title, values) in zip(axes, panels.items(), strict=True):
        is_mask = values is mask
        shown = np.ma.array(values.float().numpy(), mask=later.numpy())
        look = (
            {"cmap": "Greys", "vmin": 0, "vmax": 1.4}
            if is_mask
            else {"cmap": "cividis", "norm": shares}
        )
        ax.imshow(shown, **look)
        ax.grid(visible=False)
        ax.set_title(title)
        ax.set_xlabel(f"key block ({layer.block_size} tokens)")
        if layer.needle_block is not None:
            ax.axvline(layer.needle_block, color=NEEDLE_COLOUR, linewidth=1.2, linestyle=":")
        if layer.question_block is not None:
            ax.axhline(layer.question_block, color=NEEDLE_COLOUR, linewidth=1.0, linestyle="--")
    axes[0].set_ylabel("query block")
    scale = ScalarMappable(norm=shares, cmap="cividis")
    figure.colorbar(scale, ax=list(axes), label="share of the row", pad=0.01)
    figure.suptitle(
        f"{layer.prompt} ({layer.tokens:,} tokens, n = 1), layer {layer.layer}, head {head}; "
        "dotted: needle, dashed: question"
    )
    return figure


@matplotlib.rc_context(STYLE)
def draw_thresholds(content: Mapping[str, Any]) -> Figure:
    """The table of a file of `xsparse.calibrate`, by layer and query head."""
    figure = Figure(figsize=(WIDTH_IN, 3.6), layout="constrained")
    ax = figure.subplots()
    image = ax.imshow(content["table"], cmap="cividis", vmin=0, vmax=1, aspect="auto")
    ax.grid(visible=False)
    ax.set_xlabel("query head")
    ax.set_ylabel("layer")
    ax.set_title(
        f"{content['model']}: rows keep {content['coverage']:g} of the true mass\n"
        f"n = {content['rows_per_head']} rows a head, {len(content['prompt_hashes'])} prompts"
    )
    figure.colorbar(image, ax=ax, label="threshold", pad=0.01)
    return figure


def _block(meta: Mapping[str, Any], name: str, block_size: int) -> int | None:
    token = meta.get(name)
    return None if token is None else int(token) // block_size

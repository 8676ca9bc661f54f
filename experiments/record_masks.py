"""Record the masks that XAttention makes on a real model, for the kernel benchmark to replay.

    python -m experiments.record_masks [--out FILE]

Prefills two RULER prompts of 8k tokens on the default model (a CPU takes a few minutes) and keeps
the masks of every fourth layer as packed bits. Random masks spread evenly over K and differ from
head to head; real ones share sinks and a diagonal, so tiles are read again sooner.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data" / "masks-8k.npz"
TASKS = ("niah_multikey_1", "vt")
LENGTH = 8192
LAYER_STEP = 4


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.record_masks", description=__doc__)
    parser.add_argument("--out", type=Path, default=DATA)
    out = parser.parse_args(argv).out
    masks, about = record()
    out.parent.mkdir(parents=True, exist_ok=True)
    save(out, masks, about)
    print(f"{out}: {masks.shape}, kept {about['mask_density']}, {out.stat().st_size / 1e3:.0f} kB")
    return 0


def save(path: Path, masks: np.ndarray, about: dict[str, Any]) -> None:
    """masks: bool [..., blocks, blocks]"""
    np.savez_compressed(
        path, bits=np.packbits(masks, axis=-1), shape=masks.shape, about=json.dumps(about)
    )


def load(path: Path = DATA) -> tuple[np.ndarray, dict[str, Any]]:
    """bool [prompts, layers, q_heads, blocks, blocks], and how they were made."""
    with np.load(path) as file:
        shape = tuple(file["shape"])
        masks = np.unpackbits(file["bits"], axis=-1, count=shape[-1]).astype(bool).reshape(shape)
        return masks, json.loads(str(file["about"]))


def record() -> tuple[np.ndarray, dict[str, Any]]:
    import torch

    from xsparse import models, tasks
    from xsparse.build import build
    from xsparse.cli import compose
    from xsparse.config import register
    from xsparse.hf import bound, cache_argument
    from xsparse.settings import Settings

    register()
    config = compose([])
    loaded = models.load(config.model, dtype="float32", device="cpu")
    settings = Settings(selector="xattention", threshold=0.9, stride=8, block_size=128)
    session = build(loaded.model, settings)
    select, made = session.selector.select, []

    def recorded(q, keys, site):
        selection = select(q, keys, site)
        if site.layer % LAYER_STEP == 0:
            made.append((site.layer, selection.mask))
        return selection

    session.selector.select = recorded
    prompts, hashes = [], {}
    for task in TASKS:
        built = tasks.build(
            task, loaded.tokenizer, length=LENGTH, seed=config.seed, node=config.task
        )
        sample = built.sample(0)
        hashes[task] = {"prompt_hash": sample.prompt_hash, "tokens": len(sample.input_ids)}
        made.clear()
        with torch.inference_mode(), bound(loaded.model, session) as cache:
            session.phase = "prefill"
            for piece in torch.tensor([sample.input_ids]).split(settings.chunk_size, dim=1):
                kept = {cache_argument(loaded.model): cache}
                loaded.model(input_ids=piece, logits_to_keep=1, **kept)
            session.reset()
        prompts.append(np.stack([_whole(made, i) for i in sorted({i for i, _ in made})]))
    # Prompts differ by a block or two. The part of a causal mask up to a block is a mask itself.
    blocks = min(p.shape[-1] for p in prompts)
    masks = np.stack([p[..., :blocks, :blocks] for p in prompts])
    shape = session.engine.shape
    causal = masks.shape[0] * masks.shape[1] * masks.shape[2] * blocks * (blocks + 1) / 2
    about = {
        "made_by": "python -m experiments.record_masks",
        "model": loaded.files.name,
        "weights_sha256": loaded.files.weights_sha256,
        "heads": [shape.q_heads, shape.kv_heads, shape.head_dim],
        "selector": "xattention",
        "threshold": settings.threshold,
        "stride": settings.stride,
        "block_size": settings.block_size,
        "layers": sorted({i for i, _ in made}),
        "prompts": hashes,
        "mask_density": round(float(masks.sum() / causal), 4),
    }
    return masks, about


def _whole(made: list[tuple[int, Any]], layer: int) -> np.ndarray:
    """The chunks of one layer, [q_heads, q_blocks, k_blocks so far] each, as one mask."""
    chunks = [mask.numpy() for at, mask in made if at == layer]
    blocks = chunks[-1].shape[-1]
    wide = [np.pad(c, ((0, 0), (0, 0), (0, blocks - c.shape[-1]))) for c in chunks]
    return np.concatenate(wide, axis=1)


if __name__ == "__main__":
    raise SystemExit(main())

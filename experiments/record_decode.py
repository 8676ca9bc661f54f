"""Record which blocks decode reads on a real model, to replay where only speed is measured.

    python -m experiments.record_decode [--out experiments/data/decode-8k.npz]

The default model on prompts of two tasks at 8k, prefilled with full attention, then decoded
greedily for STEPS tokens, past the end of the answer, with `decode_selector=minmax` and a budget of
2048 tokens per KV head. Stored: kept [prompts x steps, layers, kv_heads, blocks], bool, of the
complete blocks; and how it was made. Runs on a CPU in about two minutes.
"""

import argparse
import json
from pathlib import Path

import numpy as np

TASKS = ("niah_multivalue", "niah_single_3")
LENGTH, STEPS, BUDGET, BLOCK = 8192, 64, 2048, 128
OUT = Path(__file__).parent / "data" / "decode-8k.npz"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.record_decode")
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out

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
    settings = Settings(selector="full", decode_selector="minmax", decode_budget_tokens=BUDGET)
    session = build(loaded.model, settings)
    assert session.steps is not None
    choose, chosen = session.steps.ops.choose_tiles, []

    def recorded(scores, position, state, made, **kwargs):
        choose(scores, position, state, made, **kwargs)
        kept = torch.zeros(scores.shape, dtype=torch.bool)
        for head, row in enumerate(made.blocks):
            kept[head, row[(row >= 0) & (row < position // BLOCK)].long()] = True
        chosen.append(kept[:, : LENGTH // BLOCK - 2])

    session.steps.ops.choose_tiles = recorded
    about = {"tasks": TASKS, "length": LENGTH, "steps": STEPS, "budget_tokens": BUDGET}
    about |= {"model": config.model.name, "weights_sha256": loaded.files.weights_sha256}
    hashes = {}
    with torch.inference_mode(), bound(loaded.model, session) as cache:
        kept_cache = {cache_argument(loaded.model): cache}
        for task in TASKS:
            built = tasks.build(
                task, loaded.tokenizer, length=LENGTH, seed=config.seed, node=config.task
            )
            sample = built.sample(0)
            hashes[task] = {"prompt_hash": sample.prompt_hash, "tokens": len(sample.input_ids)}
            session.reset()
            session.phase = "prefill"
            logits = None
            for piece in torch.tensor([sample.input_ids]).split(4096, dim=1):
                logits = loaded.model(input_ids=piece, logits_to_keep=1, **kept_cache).logits
            assert logits is not None
            session.phase = "auto"
            token = logits[0, -1].argmax()
            for _ in range(STEPS):
                token = (
                    loaded.model(input_ids=token.view(1, 1), **kept_cache).logits[0, -1].argmax()
                )
    shape = session.engine.shape
    kept = torch.stack(chosen).view(-1, shape.layers, *chosen[0].shape).numpy()
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, kept=kept, about=json.dumps(about | {"prompts": hashes}))
    print(f"{out}: {kept.shape}, {kept.mean():.3f} of the blocks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A stored sweep made up for tests, in the formats of docs/results.md.

Scores, times and counters follow from simple formulas, so that a test knows what must come out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xsparse.rows import build_rows

IDENTITY: dict[str, Any] = {
    "model": "SmolLM2-135M-Instruct",
    "weights_sha256": "5f1c0ffee",
    "dtype": "float32",
    "tokenizer_hash": "a1b2",
    "seed": 0,
    "stride": 8,
    "block_size": 128,
    "block_size_ratio": 8,
    "chunk_size": 2048,
    "reduce_heads": "any",
    "reduce_queries": "any",
    "reduce_sub_blocks": "any",
    "attend": "mask",
    "engine": "offload",
    "transfer": "gather",
    "ring_slots": 8,
    "digest": "resident_k",
    "decode_selector": "full",
    "decode_budget_tokens": 2048,
    "ops_backend": "torch",
    "dense_kernel": "sdpa-flash",
    "device": "NVIDIA H200",
    "host": "node-1",
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "git_commit": "0123abc",
    "command": "python run.py -m threshold=0.7,0.9",
    "warmup_tokens": 2048,
    "repeats": 1,
}


@dataclass(frozen=True)
class Setting:
    """One sweep point: accuracy lost (0..1) and density kept against dense."""

    selector: str
    threshold: float
    density: float
    lost: float
    speed: float = 1.0

    @property
    def run_id(self) -> str:
        return f"{self.selector}-{100 * self.threshold:.0f}"


SETTINGS = (
    Setting("xattention", 0.7, 0.22, 0.35, 2.6),
    Setting("xattention", 0.8, 0.33, 0.12, 2.0),
    Setting("xattention", 0.9, 0.48, 0.02, 1.5),
    Setting("minmax", 0.8, 0.30, 0.45, 2.1),
    Setting("minmax", 0.95, 0.60, 0.05, 1.2),
)


def make_samples(
    task: str,
    length: int,
    n: int,
    setting: Setting | None,
    *,
    dense_accuracy: float = 1.0,
    offload: bool = True,
) -> list[dict[str, Any]]:
    """Samples of one (task, length); a setting of None is dense attention on the same prompts."""
    rng = np.random.default_rng([length, *map(ord, task)])
    right = rng.permutation(n) < round(dense_accuracy * n)
    order = rng.permutation(n)
    samples = []
    for i in range(n):
        lost = setting is not None and order[i] < round(setting.lost * n)
        kept = 1.0 if setting is None else setting.density
        prefill_s = (
            length / 4000 * (1 + 0.03 * rng.standard_normal()) / (setting.speed if setting else 1.0)
        )
        causal = (length // 128) ** 2
        history = length * 1000 if offload else 0
        samples.append(
            {
                "task": task,
                "length": length,
                "index": i,
                "prompt_hash": hashlib.sha256(f"{task} {length} {i}".encode()).hexdigest()[:12],
                "prompt_tokens": length - 30 - i,
                "new_tokens": 9,
                "prediction": "",
                "references": ["1234567"],
                "score": float(right[i] and not lost),
                "ttft_s": prefill_s + 0.01,
                "prefill_s": prefill_s,
                "decode_s": 0.4 if setting is None else 0.3,
                "tpot_s": 0.05,
                "stages_s": {
                    "estimate": 0.0 if setting is None else 0.08 * prefill_s,
                    "select": 0.0 if setting is None else 0.03 * prefill_s,
                    "transfer": 0.2 * prefill_s,
                    "attend": 0.5 * prefill_s,
                    "sync": 0.02 * prefill_s,
                },
                "counters": {
                    "mask_kept": int(kept * causal * 1000),
                    "mask_causal": causal * 1000,
                    "executed": int(min(1.0, kept * 1.08) * causal * 1000),
                    "pages_moved": int(min(1.0, kept * 1.7) * 1000),
                    "pages_history": 1000,
                    "bytes_h2d": int(history * min(1.0, kept * 1.3)),
                    "bytes_d2h": history,
                    "bytes_history": history,
                    "decode_tiles_kept": 80,
                    "decode_tiles": 80,
                    "decode_bytes_h2d": 0,
                    "mass_kept": None,
                    "mass_total": None,
                },
                "digest_bytes": 0,
                "peak_gpu_gb": 3.2,
                "peak_host_gb": 1.2,
                "cpu_share": 0.95,
                "meta": {"depth": (i % 5) / 4, "haystack": "noise"} if task == "niah" else {},
            }
        )
    return samples


def write_run(
    folder: Path, rows: list[dict[str, Any]], samples: list[dict[str, Any]], state: str = "done"
) -> None:
    folder.mkdir(parents=True)
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    (folder / "status.json").write_text(json.dumps({"state": state, "error": None}))
    (folder / "config.yaml").write_text("task: niah\n")


def make_sweep(
    root: Path,
    *,
    name: str = "20260101-120000",
    tasks: Sequence[str] = ("niah",),
    lengths: Sequence[int] = (2048, 4096),
    n: int = 20,
    settings: Sequence[Setting] = SETTINGS,
    dense_accuracy: float = 1.0,
    comparable: bool = True,
    offload: bool = True,
    failed: Sequence[str] = (),
    **identity: Any,
) -> Path:
    """Write runs and a sweep below `root`/results; returns the sweep folder.

    failed: overrides of points that raised. identity: columns to change in every row.
    """
    common = {**IDENTITY, **({} if offload else {"engine": "resident"}), **identity}
    runs = root / "results" / "runs"
    dense: dict[tuple[str, int], list[dict[str, Any]]] = {}
    dense_ids = {}
    for task in tasks:
        for length in lengths:
            key = task, length
            dense[key] = make_samples(
                task, length, n, None, dense_accuracy=dense_accuracy, offload=offload
            )
            dense_ids[key] = f"dense-{task}-{length}-{common['host']}"
            of_dense = {**common, "run_id": dense_ids[key], "selector": "full"}
            if not (runs / dense_ids[key]).exists():
                write_run(runs / dense_ids[key], build_rows(of_dense, dense[key], None), dense[key])
    points = []
    for setting in settings:
        samples = [
            sample
            for task, length in dense
            for sample in make_samples(
                task, length, n, setting, dense_accuracy=dense_accuracy, offload=offload
            )
        ]
        run_id = f"{name}-{setting.run_id}"
        own = {
            **common,
            "run_id": run_id,
            "selector": setting.selector,
            "threshold": setting.threshold,
        }
        rows = build_rows(
            own,
            samples,
            [sample for cell in dense.values() for sample in cell],
            dense_comparable=comparable,
            dense_run_ids=dense_ids,
        )
        write_run(runs / run_id, rows, samples)
        overrides = f"selector={setting.selector} threshold={setting.threshold:g}"
        points.append({"run_id": run_id, "overrides": overrides, "state": "done", "error": None})
    for overrides in failed:
        run_id = f"{name}-failed-{len(points)}"
        (runs / run_id).mkdir(parents=True)
        status = {"state": "failed", "error": "ValueError: threshold=7 must lie in 0..1\nmore"}
        (runs / run_id / "status.json").write_text(json.dumps(status))
        points.append({"run_id": run_id, "overrides": overrides, "state": "running"})
    sweep = root / "results" / "sweeps" / name
    sweep.mkdir(parents=True)
    index = {"command": common["command"], "started": "2026-01-01T12:00:00", "points": points}
    (sweep / "index.json").write_text(json.dumps(index))
    return sweep

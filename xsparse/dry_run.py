"""What a command would do: its points, and an estimate of time and memory. Loads no weights.

Time is operations over an assumed rate, for dense attention: a guide, not a measurement.
"""

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from xsparse import models, plan, runner
from xsparse.config import Config
from xsparse.device import Device

# Sustained operations per second that the estimate assumes: fp32 per CPU core, bf16 per GPU.
CPU_CORE_FLOPS = 50e9
GPU_FLOPS = 300e12
# Answers of the tasks are short; a decode step reads all weights once.
NEW_TOKENS = 16
SLOT_BYTES = 128 << 20  # of the ring, at most (kv/ring.py)
CPU_BYTES_PER_S, GPU_BYTES_PER_S = 10e9, 3e12


def show(points: list[list[str]], configs: list[Config]) -> None:
    """Print a table with one line per point. Raises ConfigError for one that cannot run here."""
    table = Table(title="dry run: nothing was computed")
    table.add_column("point")
    for name in ("run", "prompts", "time", "GPU GB", "host GB"):
        table.add_column(name, no_wrap=True)
    counted: set[str] = set()
    total_s = 0.0
    for number, (overrides, config) in enumerate(zip(points, configs, strict=True)):
        made = plan.make(config)
        left = made.missing(made.run_id, made.cells) if not made.is_dense else []
        for cell, run_id in made.dense.items():
            if run_id not in counted:  # points of a sweep share their baselines
                counted.add(run_id)
                left += made.missing(run_id, [cell])
        shape = models.shape(config.model)
        if left or config.force:
            runner.check(made, shape)
        seconds = sum(_prompt_s(shape, length, made.device) for _, length, _ in left)
        total_s += seconds
        gpu, host = _memory_gb(shape, config, made.device, made.dtype)
        wanted = [o for o in overrides if not o.startswith("dry_run=")]
        table.add_row(
            f"{number} {' '.join(wanted) or '(defaults)'}",
            made.run_id,
            str(len(left)),
            _time(seconds),
            f"{gpu:.1f}" if made.device.is_cuda else "-",
            f"{host:.1f}",
        )
    console = Console()
    console.print(table)
    where = Path(configs[0].results) / "runs"
    console.print(
        f"about {_time(total_s)} in all on {made.device.label}, from operations at an assumed rate "
        f"for dense attention, not measured; finished runs are found in {where}",
        highlight=False,
    )


def _prompt_s(shape: models.ModelShape, tokens: int, device: Device) -> float:
    body = shape.params - shape.vocab * shape.hidden
    attention = 2 * shape.layers * shape.q_heads * shape.head_dim * tokens * tokens
    rate = GPU_FLOPS if device.is_cuda else CPU_CORE_FLOPS * (os.cpu_count() or 1)
    number_bytes, bandwidth = (2, GPU_BYTES_PER_S) if device.is_cuda else (4, CPU_BYTES_PER_S)
    prefill_s = (2 * body * tokens + attention) / rate
    return prefill_s + NEW_TOKENS * shape.params * number_bytes / bandwidth


def _memory_gb(
    shape: models.ModelShape, config: Config, device: Device, dtype: str
) -> tuple[float, float]:
    """(GPU, host): weights, KV cache with its buffers, and the activations of one chunk."""
    number = 4 if dtype == "float32" else 2
    kv_token = shape.kv_token_bytes * number / 2
    cache = max(config.length) * kv_token
    weights = shape.params * number
    activations = config.chunk_size * shape.hidden * 24 * number
    if config.engine.name == "resident":
        on_device, on_host = weights + cache + activations, 0.0
    else:
        layer = cache / shape.layers
        chunk = kv_token / shape.layers * (config.chunk_size + 2 * config.page_size)
        settings = config.settings()
        resident_k = settings.digest == "resident_k"  # then V alone is on the host
        digest = cache / 2 if resident_k else 0.0
        ring = config.ring_slots if settings.reads_through_ring else 0
        slots = ring * min(SLOT_BYTES, layer)
        on_device = weights + slots + 2 * chunk + digest + activations
        on_host = cache - digest
    if device.is_cuda:
        return on_device / 1e9, on_host / 1e9
    return 0.0, (on_device + on_host) / 1e9


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

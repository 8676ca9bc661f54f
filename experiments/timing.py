"""Timing of GPU work: CUDA events, warm-up apart, median, buffers that rotate."""

import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call; `first_s` is the first call of all, compilation included."""

    median_ms: float
    min_ms: float
    max_ms: float
    repeats: int
    first_s: float


WARM_UP_S = 0.1
"""Long enough for clocks to settle after whatever ran before."""
SPAN_S = 0.1
"""Short calls are repeated until they took this long together."""
MOST_REPEATS = 50


def measure(
    runs: Sequence[Callable[[], object]], *, device: torch.device, repeats: int = 10
) -> Times:
    """Time calls that take turns, each on buffers of its own so that no cache is timed."""
    start = time.perf_counter()
    runs[0]()
    synchronize(device)
    first_s = time.perf_counter() - start
    rounds, start = 0, time.perf_counter()
    while rounds < 2 or (device.type == "cuda" and time.perf_counter() - start < WARM_UP_S):
        for run in runs:
            run()
        synchronize(device)
        rounds += 1
    call_s = (time.perf_counter() - start) / (rounds * len(runs))
    if device.type == "cuda":
        repeats = max(repeats, min(MOST_REPEATS, int(SPAN_S / call_s)))
    if device.type != "cuda":
        spans = [_wall_ms(runs[i % len(runs)]) for i in range(repeats)]
    else:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for i, (begin, end) in enumerate(marks):
            begin.record()
            runs[i % len(runs)]()
            end.record()
        torch.cuda.synchronize()
        spans = [begin.elapsed_time(end) for begin, end in marks]
    return Times(statistics.median(spans), min(spans), max(spans), repeats, first_s)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def copies(bytes_per_set: int, device: torch.device, *, at_most: int = 4) -> int:
    """How many sets of buffers it takes to spill over a 60 MB L2 cache twice."""
    if device.type != "cuda":
        return 1
    return min(at_most, max(1, -(-(128 << 20) // bytes_per_set)))


def clocks_under_load(device: torch.device) -> str:
    """`clocks` while the GPU multiplies matrices."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(2000):  # about 3 s of work, queued
        torch.mm(a, a)
    said = clocks()
    torch.cuda.synchronize()
    return said


def clocks() -> str:
    """What the driver says of clocks, power and temperature now (read only)."""
    return _ask("clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu")


def driver() -> str:
    return _ask("driver_version")


def _ask(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    return f"{query}: {done.stdout.strip()}"


def _wall_ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3

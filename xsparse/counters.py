"""What is counted while a prompt runs: densities, bytes, stage times.

The four densities, each a ratio of sums over layers, heads and chunks (and samples), prefill only:

mask_density      kept / causal (query head, query block, key block) triples
page_density      pages in the reduced set, united over KV heads / pages of history
transfer_ratio    bytes host to device, estimation included / K and V bytes of all history
executed_density  triples the attention kernel computed, padding included / causal triples

Sums stay on the device and are read once per prompt; nothing here waits inside the layer loop.
Decode steps are counted apart (`decode_*`).
"""

import time
from collections import defaultdict
from contextlib import contextmanager

import torch
from torch import Tensor

STAGES = ("estimate", "select", "transfer", "attend", "sync")


class Counters:
    """Sums by name, and seconds by stage."""

    def __init__(self, device: torch.device):
        self.device = device
        self._watched: dict[str, tuple[Tensor, int]] = {}
        self.reset()

    def reset(self) -> None:
        self._host: dict[str, int] = defaultdict(int)
        self._device: dict[str, Tensor] = {}
        self._spans: list[tuple[str, str | None, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._open: list[tuple[str, torch.cuda.Stream | None]] = []
        self.timing = True

    def add(self, name: str, value: Tensor | int) -> None:
        """Add a number known on the host, or a 0-d tensor that stays where it is."""
        if isinstance(value, Tensor):
            value = value.to(torch.float64)
            # Not in place: a sum begun in inference mode may go on outside of it.
            self._device[name] = self._device[name] + value if name in self._device else value
        else:
            self._host[name] += value

    def watch(self, name: str, meter: Tensor, factor: int) -> None:
        """Count what a kernel adds up itself, times `factor`. meter: integer [1]; who owns it
        sets it back for another sequence."""
        self._watched[name] = meter, factor

    @contextmanager
    def stage(self, name: str):
        """Time the body: between two events on CUDA, on the wall clock elsewhere.

        A stage inside another is taken off the outer one, unless it runs on another stream beside
        it. Nothing is timed while `timing` is off.
        """
        if not self.timing:
            yield
            return
        cuda = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device) if cuda else None
        outer = self._open[-1][0] if self._open and self._open[-1][1] == stream else None
        self._open.append((name, stream))
        try:
            if cuda:
                begin = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                begin.record()
                yield
                end.record()
                self._spans.append((name, outer, begin, end))
            else:
                begin_s = time.perf_counter()
                yield
                self._book(name, outer, time.perf_counter() - begin_s)
        finally:
            self._open.pop()

    def _book(self, name: str, outer: str | None, seconds: float) -> None:
        self._seconds[name] += seconds
        if outer:
            self._seconds[outer] -= seconds

    def stages_s(self) -> dict[str, float]:
        """Seconds by stage; waits for the device."""
        if self._spans:
            torch.cuda.synchronize(self.device)
            for name, outer, begin, end in self._spans:
                self._book(name, outer, begin.elapsed_time(end) / 1e3)
            self._spans.clear()
        return dict(self._seconds)

    def read(self) -> dict[str, int | float]:
        """Every sum as a number; waits for the device once."""
        read: dict[str, int | float] = dict(self._host)
        sums = dict(self._device)
        for name, (meter, factor) in self._watched.items():
            sums[name] = sums.get(name, 0) + meter[0].double() * factor
        if sums:
            values = torch.stack(list(sums.values())).tolist()
            for name, value in zip(sums, values, strict=True):
                read[name] = read.get(name, 0) + (int(value) if value.is_integer() else value)
        return read


def density(kept: float | None, of: float | None) -> float | None:
    """kept / of; None where there is nothing to divide by."""
    return kept / of if kept is not None and of else None


def causal_triples(q_heads: int, q_start: int, q_tokens: int, block_size: int) -> int:
    """(query head, query block, key block) triples on or below the diagonal for a chunk."""
    first = q_start // block_size
    last = (q_start + q_tokens - 1) // block_size
    return q_heads * sum(range(first + 1, last + 2))

"""Measurements of experiments.throughput: one prefill or one run of decode steps at a time."""

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import throughput_tables as tables
from experiments.throughput_cases import Case
from xsparse.attention import Session
from xsparse.build import build
from xsparse.cli import compose
from xsparse.config import register
from xsparse.counters import density
from xsparse.hf import bound, cache_argument
from xsparse.kv import host
from xsparse.models.loading import random_model
from xsparse.settings import Settings
from xsparse.step_graph import StepGraph

TRACE = Path(__file__).parent / "data" / "decode-8k.npz"
ROOM = 512  # tokens reserved behind a context that is filled for decode
BASE = {"block_size": 128, "block_size_ratio": 8, "chunk_size": 8192, "ring_slots": 4}
TINY = {"block_size": 16, "block_size_ratio": 4, "chunk_size": 128, "cuda_graph": "none"}
TINY_MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class Bench:
    """The model, and what was measured of the link."""

    def __init__(self, device: str, longest: int):
        register()
        node = compose(["model=random"]).model
        node.config["max_position_embeddings"] = max(131072, 2 * longest)
        if device == "cpu":
            node.config |= TINY_MODEL
        self.device = torch.device(device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = random_model(node, dtype, self.device)
        self.peak_gb_s: float | None = None
        self.warm: set[tuple] = set()

    def row(self, values: dict[str, Any], out: Path) -> None:
        tables.append(out / "throughput.csv", values)
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in values.items()}
        print(" ".join(f"{k}={v}" for k, v in shown.items() if v not in (None, "")), flush=True)

    def link(self) -> dict[str, Any]:
        """GB/s of pinned copies host to device, 1 GiB at once: what a link can do at most."""
        if self.device.type != "cuda":
            return {}
        store = host.HostMemory(1 << 30, True)
        room = torch.empty(1 << 30, dtype=torch.uint8, device=self.device)
        seconds = []
        for _ in range(6):
            seconds.append(_timed(lambda: room.copy_(store.bytes, non_blocking=True)))
        self.peak_gb_s = (1 << 30) / sorted(seconds)[2] / 1e9
        return {"case": "pinned copy of 1 GiB", "link_gb_s": self.peak_gb_s, "n": 6}

    def measure(self, case: Case, length: int) -> dict[str, Any]:
        settings = Settings(**{**BASE, **case.settings, **(TINY if case.tiny else {})})
        session = build(self.model, settings)
        row: dict[str, Any] = {"case": case.name, "context": length, "n": 1}
        names = "engine transfer selector digest chunk_size ring_slots block_size_ratio"
        row |= {name: getattr(settings, name) for name in names.split()}
        row |= {"decode_selector": settings.decode_selector, "cuda_graph": settings.cuda_graph}
        row["decode_cache_gb"] = settings.decode_cache_gb
        try:
            with torch.inference_mode(), bound(self.model, session) as cache:
                self.forward_cache = {cache_argument(self.model): cache}
                begin_s = time.perf_counter()
                session.engine.reserve(length + (ROOM if case.decode else 0))
                row["reserve_s"] = time.perf_counter() - begin_s
                run = self._decode if case.decode else self._prefill
                row |= run(session, settings, case, length)
            memory = session.engine.memory()
            row["engine_gpu_gb"] = sum(memory.device.values()) / 1e9
            row["digest_gb"] = memory.digest / 1e9
            row["host_gb"] = sum(memory.host.values()) / 1e9
        finally:
            session.engine.close()
            del session
            gc.collect()
        return row

    def _forward(self, ids: Tensor, **more: Any) -> Tensor:
        out = self.model(input_ids=ids, logits_to_keep=1, **self.forward_cache, **more)
        return out.logits[0, -1].argmax()

    # Prefill

    def _prefill(self, session: Session, settings: Settings, case: Case, length: int) -> dict:
        ids = torch.arange(length, device=self.device)[None] % 1000
        # Compiles. Dense kernels are planned for each shape, so that needs the whole length once.
        key = (case.name, length)
        whole = settings.selector == "full" and key not in self.warm
        self.warm.add(key)
        self._chunks(session, ids if whole else ids[:, : 3 * settings.chunk_size])
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = _timed(lambda: self._chunks(session, ids))
        counters = session.counters.read()
        stages = session.counters.stages_s()
        h2d, transfer_s = counters["bytes_h2d"], stages["transfer"]
        row = {
            "phase": "prefill",
            "seconds": seconds,
            "tok_s": length / seconds,
            "bytes_h2d": h2d,
            "bytes_d2h": counters["bytes_d2h"],
            "bytes_predicted": self._predicted(session, settings, length),
            "link_gb_s": h2d / transfer_s / 1e9 if h2d and transfer_s else None,
            "transfer_ratio": density(h2d, counters["bytes_history"]) if h2d else None,
            "mask_density": density(counters["mask_kept"], counters["mask_causal"]),
            "executed_density": density(counters["executed"], counters["mask_causal"]),
            "page_density": density(counters.get("pages_moved"), counters.get("pages_history")),
            **{f"{name}_s": value for name, value in stages.items()},
        }
        return row | self._peaks(row)

    def _chunks(self, session: Session, ids: Tensor) -> None:
        session.reset()
        session.phase = "prefill"
        for piece in ids.split(session.engine.shape.chunk_size, dim=1):
            self._forward(piece)

    def _predicted(self, session: Session, settings: Settings, length: int) -> int | None:
        """Bytes that the set of one draw per (KV head, chunk), or of everything, must move, from
        the selector asked again and arithmetic of its own; None for other masks."""
        s = session.engine.shape
        if settings.engine == "resident" or settings.selector not in ("random", "full"):
            return None
        halves = 1 if settings.digest == "resident_k" else 2
        total = 0
        for start in range(0, length, s.chunk_size):
            history = start // s.block_size
            if settings.selector == "full":
                total += s.layers * s.kv_heads * history
                continue
            total += sum(self._drawn(session, settings, n, start) for n in range(s.layers))
        return total * halves * s.tile_bytes

    def _drawn(self, session: Session, settings: Settings, layer: int, start: int) -> int:
        """Tiles of one half that one layer's chunk needs of its history."""
        from xsparse.selectors import Site, TensorKeys

        s = session.engine.shape
        q = torch.empty(s.q_heads, s.chunk_size, 1, device=self.device)
        k = torch.empty(s.kv_heads, start + s.chunk_size, 1, device=self.device)
        site = Site(layer, start, s.block_size, 1.0, None)
        mask = session.selector.select(q, TensorKeys(k), site).mask
        union = mask[:, :, : start // s.block_size].unflatten(0, (s.kv_heads, -1)).any(1).any(1)
        if settings.transfer == "gather":
            return int(union.sum())
        ratio = s.block_size_ratio
        pages = torch.nn.functional.pad(union.any(0), (0, -union.shape[1] % ratio))
        return int(pages.view(-1, ratio).any(1).sum()) * ratio * s.kv_heads

    def _peaks(self, row: dict[str, Any]) -> dict[str, Any]:
        share = row["link_gb_s"] / self.peak_gb_s if row["link_gb_s"] and self.peak_gb_s else None
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
        return {"link_share": share, "peak_gpu_gb": peak}

    # Decode

    def _decode(self, session: Session, settings: Settings, case: Case, length: int) -> dict:
        self._fill(session, length)
        if case.trace:
            self._replay(session, length, case.decode + 8)
        token = torch.ones((), dtype=torch.int64, device=self.device)
        session.phase = "auto"
        graph = None
        if settings.cuda_graph == "step":
            graph = StepGraph(self.model, session, self.forward_cache)

        def run(tokens: int) -> None:
            nonlocal token
            if graph is not None:
                token = graph.run(token, tokens)[-1]
                return
            for _ in range(tokens):
                position = torch.full((1, 1), session.engine.length, device=self.device)
                token = self._forward(token.view(1, 1), position_ids=position)

        run(3)
        before = session.counters.read()
        seconds = _timed(lambda: run(case.decode))
        busy = _busy_share(lambda: run(min(4, case.decode)), self.device)
        after = session.counters.read()
        steps = case.decode + min(4, case.decode)
        name = "decode_bytes_h2d"
        moved = (after.get(name, 0) - before.get(name, 0)) / steps
        row = {
            "phase": "decode",
            "n": case.decode,
            "seconds": seconds,
            "tok_s": case.decode / seconds,
            "bytes_h2d": moved,
            "link_gb_s": None,
            "busy_share": busy,
        }
        if settings.decodes_sparsely and settings.engine == "offload":
            s = session.engine.shape
            halves = 1 if settings.digest == "resident_k" else 2
            budget = settings.decode_budget_tokens // s.block_size - 1
            wanted = s.layers * s.kv_heads * budget * halves * s.tile_bytes
            row |= {"bytes_predicted": wanted, "hit_rate": 1 - moved / wanted}
        return row | self._peaks(row)

    def _fill(self, session: Session, length: int) -> None:
        """Random K and V for a whole context, appended as prefill would."""
        session.reset()
        engine, s = session.engine, session.engine.shape
        generator = torch.Generator(self.device).manual_seed(0)
        for start in range(0, length, s.chunk_size):
            tokens = min(s.chunk_size, length - start)
            size = (2, s.kv_heads, tokens, s.head_dim)
            kv = torch.randn(size, generator=generator, device=self.device).to(s.dtype)
            for layer in range(s.layers):
                engine.append(layer, kv[0], kv[1].roll(layer, 1))

    def _replay(self, session: Session, length: int, steps: int) -> None:
        """Scores that choose as many blocks, and change them from step to step, as a real model
        did: its blocks lie spread over the longer context, its layers and KV heads in turn."""
        s, steps_of = session.engine.shape, session.steps
        assert steps_of is not None
        with np.load(TRACE) as recorded:
            kept = recorded["kept"]  # [steps, layers, kv_heads, blocks]
        blocks = length // s.block_size
        kept = kept[np.arange(steps) % len(kept)]
        kept = kept[:, np.arange(s.layers) % kept.shape[1]]
        kept = kept[:, :, np.arange(s.kv_heads) % kept.shape[2]]
        place = np.arange(kept.shape[3]) * (blocks // kept.shape[3])
        scores = np.zeros((*kept.shape[:3], blocks), np.float32)
        scores[..., place] = kept
        scores[..., 0] = scores[..., -1] = np.inf
        table = torch.from_numpy(scores).to(self.device)
        pad = session.engine.capacity // s.block_size - blocks
        table = torch.nn.functional.pad(table, (0, pad), value=-torch.inf)
        calls = 0

        def replayed(q: Tensor, stats: Tensor, position: Tensor, **kwargs: Any) -> Tensor:
            nonlocal calls
            layer = calls % s.layers
            calls += 1
            return table[:, layer].index_select(0, (position - length).clamp(0, steps - 1))[0]

        steps_of.ops.step_scores = replayed


def _timed(run) -> float:
    """Seconds between two events around the call, host work in between included."""
    if not torch.cuda.is_available():
        begin_s = time.perf_counter()
        run()
        return time.perf_counter() - begin_s
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def _busy_share(run, device: torch.device) -> float | None:
    """Share of the time in which some kernel or copy ran, from the profiler's intervals."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in trace.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return None
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / (end - spans[0][0])

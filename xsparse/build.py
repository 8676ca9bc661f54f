"""A Session for a model from settings: the one place where engine, selector and operators meet.
Used by the runner and by `xsparse.attach`."""

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from xsparse import ops
from xsparse.attention import Rules, Session
from xsparse.graph_pair import GraphPair
from xsparse.hf import cache_shape
from xsparse.kv.engine import Engine
from xsparse.kv.offload import OffloadEngine, window_pages
from xsparse.kv.resident import ResidentEngine
from xsparse.kv.shape import CacheShape
from xsparse.selectors import Selector, thresholds
from xsparse.settings import Settings, refuse
from xsparse.steps import Steps

MOST_SLOTS = 512  # tiles of a KV head that choose_tiles ranks in one program


def make_selector(s: Settings, *, layers: int, q_heads: int, model_name: str | None) -> Selector:
    """The prefill selector. Raises ValueError for a threshold table of another model or shape."""
    return s.method(
        thresholds(
            s.threshold,
            model=model_name,
            stride=s.stride,
            block_size=s.block_size,
            layers=layers,
            q_heads=q_heads,
        )
    )


def build(model: PreTrainedModel, s: Settings, model_name: str | None = None) -> Session:
    """Raises ValueError for settings that do not fit the model or the device."""
    shape = cache_shape(
        model,
        block_size=s.block_size,
        block_size_ratio=s.block_size_ratio,
        chunk_size=s.chunk_size,
    )
    if s.cuda_graph != "none" and shape.device.type != "cuda":
        refuse("cuda_graph", s.cuda_graph, f"none on {shape.device.type}")
    backend: Any = ops.get(s.ops_backend, shape.device)
    selector = make_selector(s, layers=shape.layers, q_heads=shape.q_heads, model_name=model_name)
    engine = make_engine(s, shape, backend)
    if s.cuda_graph == "pair":
        backend = _with_pair(backend, shape, engine)
    steps = None
    if s.decodes_sparsely:
        budget = s.decode_budget_tokens
        steps = partial(Steps, budget_tokens=budget, keep=s.decode_cache_gb > 0)
    elif s.cuda_graph == "step":
        steps = Steps
    return Session(
        engine,
        selector,
        backend,
        rules=Rules(s.reduce_heads, s.reduce_queries, s.reduce_sub_blocks, s.attend, s.transfer),
        steps=steps,
        mass_recall=s.mass_recall,
    )


def make_engine(s: Settings, shape: CacheShape, backend: Any) -> Engine:
    """The engine of settings for a shape; backend: the operators."""
    stats = s.decode_selector if s.decodes_sparsely else None
    if s.engine == "resident":
        return ResidentEngine(shape, stats)
    assert s.digest is not None
    return OffloadEngine(
        shape,
        ops=backend,
        transfer=s.transfer,
        ring_slots=s.ring_slots if s.reads_through_ring else 0,
        digest=s.digest,
        digest_format=s.digest_format,
        stride=s.stride,
        stats=stats,
        step_slots=_step_slots(s, shape) if s.decodes_sparsely else 0,
        limit_bytes=None if s.host_memory_gb is None else int(s.host_memory_gb * 1e9),
    )


def _step_slots(s: Settings, shape: CacheShape) -> int:
    """Tiles per layer and KV head that decode keeps room for: its budget, or what the cache has."""
    least = s.decode_budget_tokens // shape.block_size - 1
    if not s.decode_cache_gb:
        return least
    halves = 1 if s.digest == "resident_k" else 2
    one = shape.layers * shape.kv_heads * halves * shape.tile_bytes
    slots = int(s.decode_cache_gb * 1e9) // one
    if slots < least:
        need = f"0, or >= {least * one / 1e9:.2f} for decode_budget_tokens={s.decode_budget_tokens}"
        refuse("decode_cache_gb", s.decode_cache_gb, need)
    return min(slots, MOST_SLOTS)


def _with_pair(backend: ModuleType, shape: CacheShape, engine: Engine) -> SimpleNamespace:
    """The operators with dense attention replayed as graphs."""
    assert isinstance(engine, OffloadEngine)
    window = window_pages(shape, engine.halves) * shape.page_size
    pair = GraphPair(backend.dense_attention, shape.chunk_size, window)
    names = {name: getattr(backend, name) for name in (*ops.OPERATORS, "name")}
    return SimpleNamespace(**names | {"dense_attention": pair.dense_attention})

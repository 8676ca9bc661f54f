"""A Session for a model from settings: the one place where engine, selector and operators meet.
Used by the runner and by `xsparse.attach`."""

import logging
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from xsparse import fit, ops
from xsparse.attention import Rules, Session
from xsparse.graph_pair import GraphPair
from xsparse.hf import cache_shape
from xsparse.kv.engine import Engine
from xsparse.kv.gigabytes import from_gb
from xsparse.kv.offload import OffloadEngine, window_pages
from xsparse.kv.resident import ResidentEngine
from xsparse.kv.shape import CacheShape
from xsparse.settings import Settings
from xsparse.steps import Steps

log = logging.getLogger(__name__)


def build(model: PreTrainedModel, s: Settings, model_name: str | None = None) -> Session:
    """Raises ValueError for settings that do not fit the model or the device."""
    shape = cache_shape(
        model,
        block_size=s.block_size,
        block_size_ratio=s.block_size_ratio,
        chunk_size=s.chunk_size,
    )
    fit.check_graph(s, shape.device.type)
    backend: Any = ops.get(s.ops_backend, shape.device)
    selector = fit.make_selector(s, shape, model_name)
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
    if said := fit.selects_nothing(s):
        log.warning(said)
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
        step_slots=fit.step_slots(s, shape, shape.dtype.itemsize),
        limit_bytes=None if s.host_memory_gb is None else from_gb(s.host_memory_gb),
    )


def _with_pair(backend: ModuleType, shape: CacheShape, engine: Engine) -> SimpleNamespace:
    """The operators with dense attention replayed as graphs."""
    assert isinstance(engine, OffloadEngine)
    window = window_pages(shape, engine.halves) * shape.page_size
    pair = GraphPair(backend.dense_attention, shape.chunk_size, window)
    names = {name: getattr(backend, name) for name in (*ops.OPERATORS, "name")}
    return SimpleNamespace(**names | {"dense_attention": pair.dense_attention})

"""A Session for a model from settings: the one place where engine, selector and operators meet.
Used by the runner and by `xsparse.attach`."""

from transformers import PreTrainedModel

from xsparse import ops
from xsparse.attention import Rules, Session
from xsparse.hf import cache_shape
from xsparse.kv.engine import Engine
from xsparse.kv.offload import OffloadEngine
from xsparse.kv.resident import ResidentEngine
from xsparse.selectors import MinMaxDecode, Selector, thresholds
from xsparse.settings import Settings


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
    backend = ops.get(s.ops_backend, shape.device)
    selector = make_selector(s, layers=shape.layers, q_heads=shape.q_heads, model_name=model_name)
    engine: Engine = ResidentEngine(shape)
    if s.engine == "offload":
        assert s.digest is not None
        engine = OffloadEngine(
            shape,
            transfer=s.transfer,
            ring_slots=s.ring_slots,
            digest=s.digest,
            stride=s.stride,
            gather=backend.gather_tiles,
            limit_bytes=None if s.host_memory_gb is None else int(s.host_memory_gb * 1e9),
        )
    return Session(
        engine,
        selector,
        backend,
        rules=Rules(s.reduce_heads, s.reduce_queries, s.reduce_sub_blocks, s.attend, s.transfer),
        decode=MinMaxDecode(s.decode_budget_tokens) if s.decode_selector == "minmax" else None,
        mass_recall=s.mass_recall,
    )

"""A Session for a model from plain settings: the one place where engine, selector and operators
are put together. Used by the runner and by `xsparse.attach`."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from xsparse import ops, selectors
from xsparse.attention import Rules, Session
from xsparse.digests import choose_digest
from xsparse.hf import cache_shape
from xsparse.kv.engine import Engine
from xsparse.kv.offload import OffloadEngine
from xsparse.kv.resident import ResidentEngine
from xsparse.selectors import MinMaxDecode, Selector


@dataclass
class Settings:
    """The keys of docs/design.md that decide how one sequence is attended."""

    selector: str = "xattention"
    selector_options: dict[str, Any] = field(default_factory=dict)
    threshold: float | str = 0.9
    stride: int = 8
    seed: int = 0
    block_size: int = 128
    block_size_ratio: int = 8
    chunk_size: int = 4096
    engine: str = "resident"
    transfer: str = "ring"
    ring_slots: int = 4
    digest: str | None = None
    reduce_heads: str = "any"
    reduce_queries: str = "any"
    reduce_sub_blocks: str = "any"
    attend: str = "mask"
    decode_selector: str = "full"
    decode_budget_tokens: int = 2048
    ops_backend: str = "auto"
    mass_recall: bool = False
    host_memory_gb: float | None = None
    model_name: str | None = None


def make_selector(s: Settings, *, layers: int, q_heads: int) -> Selector:
    """The prefill selector. Raises ValueError for parameters that do not fit it or the model."""
    threshold = selectors.thresholds(
        s.threshold,
        model=s.model_name,
        stride=s.stride,
        block_size=s.block_size,
        layers=layers,
        q_heads=q_heads,
    )
    return selectors.build(
        s.selector,
        threshold=threshold,
        stride=s.stride,
        **{"seed": s.seed} | s.selector_options,
    )


def build(model: PreTrainedModel, settings: Settings) -> Session:
    """Raises ValueError for settings that do not fit each other or the model."""
    s = settings
    shape = cache_shape(
        model,
        block_size=s.block_size,
        block_size_ratio=s.block_size_ratio,
        chunk_size=s.chunk_size,
    )
    backend = ops.get(s.ops_backend, shape.device)
    selector = make_selector(s, layers=shape.layers, q_heads=shape.q_heads)
    decode = None
    if s.decode_selector == "minmax":
        decode = MinMaxDecode(s.decode_budget_tokens)
    engine: Engine = ResidentEngine(shape)
    if s.engine == "offload":
        engine = OffloadEngine(
            shape,
            transfer=s.transfer,
            ring_slots=s.ring_slots,
            digest=choose_digest(
                selector, s.digest, decode_selector=s.decode_selector, mass_recall=s.mass_recall
            ),
            stride=s.stride,
            gather=backend.gather_tiles,
            limit_bytes=None if s.host_memory_gb is None else int(s.host_memory_gb * 1e9),
        )
    rules = Rules(s.reduce_heads, s.reduce_queries, s.reduce_sub_blocks, s.attend, s.transfer)
    return Session(engine, selector, backend, rules=rules, decode=decode, mass_recall=s.mass_recall)

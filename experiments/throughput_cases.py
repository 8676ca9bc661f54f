"""What experiments.throughput measures: cases by group."""

from dataclasses import dataclass, field
from typing import Any


def sparse(density: float) -> dict[str, Any]:
    options = {"density": density, "per_kv_head_chunk": True}
    return {"selector": "random", "selector_options": options}


SPARSE = sparse(0.1)
OFFLOAD = {"engine": "offload"}
RING, GATHER = OFFLOAD | {"transfer": "ring"}, OFFLOAD | {"transfer": "gather"}
FULL = {"selector": "full"}
XATTENTION = {"selector": "xattention", "threshold": 0.9, "stride": 16}
MINMAX = FULL | {"decode_selector": "minmax", "decode_budget_tokens": 2048}


@dataclass(frozen=True)
class Case:
    """name: of the row; settings: of xsparse.settings.Settings; decode: tokens to decode behind a
    context that is filled with random K and V, instead of a prefill; trace: decode replays recorded
    choices; tiny: for a CPU"""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    decode: int = 0
    trace: bool = False
    tiny: bool = False


PREFILL = [
    Case("resident full", FULL),
    Case("ring full", FULL | RING | {"digest": "none"}),
    Case("ring full, K resident", FULL | RING | {"digest": "resident_k"}),
    Case("resident sparse", SPARSE),
    Case("gather sparse", SPARSE | GATHER | {"digest": "resident_k"}),
]
MORE = [
    Case("gather half, K off", sparse(0.5) | GATHER | {"digest": "none"}),
    Case("gather sparse, K off", SPARSE | GATHER | {"digest": "none"}),
    Case("ring sparse", SPARSE | RING | {"digest": "resident_k"}),
]
CHUNKS = [
    Case(f"{name}, chunk {chunk}", settings | {"chunk_size": chunk})
    for chunk in (4096, 16384, 32768)
    for name, settings in (
        ("ring full", FULL | RING | {"digest": "none"}),
        ("gather sparse", SPARSE | GATHER | {"digest": "resident_k"}),
        ("gather sparse, K off", SPARSE | GATHER | {"digest": "none"}),
    )
]
SLOTS = [
    Case(f"ring full, {slots} slots", FULL | RING | {"digest": "none", "ring_slots": slots})
    for slots in (2, 3, 8)
]
RATIOS = [
    Case(
        f"ring sparse, ratio {ratio}",
        SPARSE | RING | {"digest": "resident_k", "block_size_ratio": ratio},
    )
    for ratio in (1, 2, 4, 16)
]
DIGESTS = [
    Case(f"xattention, {digest} {form}", XATTENTION | GATHER | {"digest": digest} | more)
    for digest, form, more in (
        ("streamed", "", {}),
        ("resident_k", "", {}),
        ("quantised_k", "int8", {"digest_format": "int8"}),
        ("quantised_k", "int4", {"digest_format": "int4"}),
        ("quantised_k", "fp8", {"digest_format": "fp8"}),
    )
]
STEP = {"cuda_graph": "step"}
DECODE = [
    Case("ring full, eager", FULL | RING | {"digest": "none"}, decode=6),
    Case("ring full, graph pair", FULL | RING | {"digest": "none", "cuda_graph": "pair"}, decode=6),
    Case("resident full, eager", FULL, decode=32),
    Case("resident full, graph", FULL | STEP, decode=64),
    Case("resident 2048, graph", MINMAX | STEP, decode=64),
    Case("gather 2048, eager", MINMAX | GATHER | {"digest": "none"}, decode=32),
    Case("gather 2048, graph", MINMAX | GATHER | STEP | {"digest": "none"}, decode=64),
    Case("gather 2048, K resident, eager", MINMAX | GATHER | {"digest": "resident_k"}, decode=32),
    Case(
        "gather 2048, K resident, graph",
        MINMAX | GATHER | STEP | {"digest": "resident_k"},
        decode=64,
    ),
]
CACHE = [
    Case(
        f"gather 2048, {name}, cache {cache} GB",
        MINMAX | GATHER | STEP | {"digest": digest, "decode_cache_gb": cache},
        decode=64,
        trace=True,
    )
    for name, digest in (("K off", "none"), ("K resident", "resident_k"))
    for cache in (0.0, 0.5, 1.0, 2.0)
]
GROUPS = {
    "prefill": PREFILL,
    "more": MORE,
    "sparse": PREFILL[3:],
    "chunks": CHUNKS,
    "slots": SLOTS,
    "ratios": RATIOS,
    "digests": DIGESTS,
    "decode": DECODE,
    "cache": CACHE,
}

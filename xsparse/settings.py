"""How one sequence is attended: the settings that a sweep point and the library call share.

Every range check of them is here, with which of them concern a given combination (that is what
identifies a run) and which settings the dense baseline has. Imports no torch.
"""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from xsparse import selectors

# No sequence is longer; a number beyond it is a slip, and would only fail later and less clearly.
MOST_TOKENS = 1 << 24
DIGESTS = ("none", "streamed", "resident_k", "quantised_k", "strided_k", "minmax", "block_mean")
CHOICES = {
    "engine": ("resident", "offload"),
    "transfer": ("ring", "gather"),
    "digest_format": ("int8", "int4", "fp8"),
    **dict.fromkeys(
        ("reduce_heads", "reduce_queries", "reduce_sub_blocks"), ("any", "vote", "mean_score")
    ),
    "attend": ("mask", "set"),
    "decode_selector": ("full", "minmax", "block_mean"),
    "cuda_graph": ("none", "pair", "step"),
    "ops_backend": ("auto", "torch", "triton", "flex", "fa4", "naive"),
}
# What the exact-mass diagnostic can read.
MASS_RECALL = ("resident_k", "streamed")


class ConfigError(ValueError):
    """One line: the key, the value and what is allowed."""


def refuse(key: str, value: Any, allowed: str) -> None:
    raise ConfigError(f"{key}={value}: allowed is {allowed}")


def one_of(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        refuse(key, value, " | ".join(allowed))


def at_least(key: str, value: float, low: float) -> None:
    if not value >= low:
        refuse(key, value, f">= {low}")


def between(key: str, value: float, low: float, high: float) -> None:
    at_least(key, value, low)
    if value > high:
        refuse(key, value, f"<= {high}")


TYPES = {"int": "an integer", "str": "a word", "bool": "true or false", "float": "a number"}


def check_type(key: str, value: Any, declared: Any) -> None:
    """Refuse a value that is not of the declared type; a bool is no number here.

    declared: the annotation of a field, a type or its text; others than TYPES are not checked
    """
    declared = declared.__name__ if isinstance(declared, type) else str(declared)
    if declared.endswith("| None"):
        if value is None:
            return
        declared = declared.removesuffix("| None").strip()
    kinds: dict[str, Any] = {"int": int, "str": str, "bool": bool, "float": (int, float)}
    if declared not in kinds:
        return
    wrong = not isinstance(value, kinds[declared])
    if wrong or (isinstance(value, bool) and declared != "bool"):
        refuse(key, value, f"{TYPES[declared]}, not {type(value).__name__}")


@dataclass
class Settings:
    """Raises ConfigError for a value out of range or a combination that cannot be."""

    selector: str = "xattention"
    selector_options: dict[str, Any] = field(default_factory=dict)
    threshold: Any = 0.9
    stride: int = 8
    seed: int = 0
    block_size: int = 128
    block_size_ratio: int = 8
    chunk_size: int = 4096
    engine: str = "resident"
    host_memory_gb: float | None = None
    transfer: str = "ring"
    ring_slots: int = 4
    digest: str | None = None
    digest_format: str = "int8"
    reduce_heads: str = "any"
    reduce_queries: str = "any"
    reduce_sub_blocks: str = "any"
    attend: str = "mask"
    decode_selector: str = "full"
    decode_budget_tokens: int = 2048
    decode_cache_gb: float = 0.0
    cuda_graph: str = "none"
    ops_backend: str = "auto"
    mass_recall: bool = False

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            one_of(name, getattr(self, name), choices)
        for name, spec in self.__dataclass_fields__.items():
            check_type(name, getattr(self, name), spec.type)
        try:
            self.threshold = parse_threshold(self.threshold)
        except TypeError as error:
            raise ConfigError(str(error)) from None
        for key in ("block_size", "block_size_ratio", "chunk_size", "decode_budget_tokens"):
            between(key, getattr(self, key), 1, MOST_TOKENS)
        between("ring_slots", self.ring_slots, 2, 1024)
        at_least("seed", self.seed, 0)
        if self.stride < 1 or self.block_size % self.stride:
            refuse("stride", self.stride, f"a divisor of block_size={self.block_size}")
        if self.chunk_size % self.block_size:
            refuse("chunk_size", self.chunk_size, f"a multiple of block_size={self.block_size}")
        if self.host_memory_gb is not None and not 0 < self.host_memory_gb < math.inf:
            refuse("engine.host_memory_gb", self.host_memory_gb, "> 0, or null for what is free")
        if self.decodes_sparsely and self.decode_budget_tokens < 3 * self.block_size:
            refuse(
                "decode_budget_tokens",
                self.decode_budget_tokens,
                f">= {3 * self.block_size} (three blocks are always kept)",
            )
        self._check_decode()
        if self.digest is not None:
            one_of("digest", self.digest, DIGESTS)
            if self.engine == "resident":
                refuse("digest", self.digest, "null with engine=resident, where K is at hand")
        try:
            method = self.method()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        rules = (self.reduce_heads, self.reduce_queries, self.reduce_sub_blocks)
        if "mean_score" in rules and not isinstance(method, selectors.MassSelector):
            raise ConfigError(
                f"mean_score: selector={self.selector} has no scores with a threshold; "
                "allowed is any | vote"
            )
        self.digest = self._digest(method)

    @property
    def decodes_sparsely(self) -> bool:
        return self.decode_selector != "full"

    def _check_decode(self) -> None:
        offload = self.engine == "offload"
        if not 0 <= self.decode_cache_gb < math.inf:
            refuse("decode_cache_gb", self.decode_cache_gb, ">= 0")
        if self.decode_cache_gb and not (offload and self.decodes_sparsely):
            allowed = "0 unless engine=offload and decode_selector is minmax | block_mean"
            refuse("decode_cache_gb", self.decode_cache_gb, allowed)
        if self.cuda_graph == "step" and offload and not self.decodes_sparsely:
            allowed = "none | pair where everything is read over the link (decode_selector=full)"
            refuse("cuda_graph", self.cuda_graph, allowed)
        if self.cuda_graph == "pair" and not offload:
            refuse("cuda_graph", self.cuda_graph, "none | step with engine=resident")

    def method(self, threshold: Any = None) -> selectors.Selector:
        """The prefill selector; `threshold` replaces its own, as checked against a model."""
        for key in ("threshold", "stride"):
            if key in self.selector_options:
                value = self.selector_options[key]
                refuse(f"selector.{key}", value, f"{key}={value}, a key of its own")
        own: Any = selectors.get(self.selector)
        declared = {spec.name: spec.type for spec in fields(own)}
        for key, value in self.selector_options.items():
            check_type(f"selector.{key}", value, declared.get(key))
        return selectors.build(
            self.selector,
            threshold=self.threshold if threshold is None else threshold,
            stride=self.stride,
            **{"seed": self.seed} | self.selector_options,
        )

    def _digest(self, method: selectors.Selector) -> str | None:
        """The digest asked for, or the first of the selector's that everything here can use."""
        if self.engine == "resident":
            return None
        accepts = {f"selector={method.name}": method.digests}
        if self.mass_recall:
            accepts["mass_recall=true"] = MASS_RECALL
        usable = [d for d in method.digests if all(d in allowed for allowed in accepts.values())]
        wanted = self.digest or (usable or list(method.digests))[0]
        for who, allowed in accepts.items():
            if wanted not in allowed:
                raise ConfigError(f"digest={wanted}: {who} accepts {' | '.join(allowed)}")
        return wanted

    @property
    def is_dense(self) -> bool:
        return self.selector == "full" and self.decode_selector == "full"

    @property
    def reads_through_ring(self) -> bool:
        """Under offload: whether any part of a run reads pages through the ring of slots."""
        dense = "full" in (self.selector, self.decode_selector)
        return dense or self.transfer == "ring" or self.digest == "streamed"

    def dense(self) -> "Settings":
        """The baseline: everything read, K of history in the same place, so that a ratio of times
        is due to the selection and not to where K lies."""
        digest, offload = None, self.engine == "offload"
        if offload:
            digest = "resident_k" if self.digest == "resident_k" else "none"
        return replace(
            self,
            selector="full",
            selector_options={},
            decode_selector="full",
            decode_cache_gb=0.0,
            cuda_graph="none" if offload and self.cuda_graph == "step" else self.cuda_graph,
            digest=digest,
            transfer="ring",
            mass_recall=False,
            **dict.fromkeys(("reduce_heads", "reduce_queries", "reduce_sub_blocks"), "any"),
            attend="mask",
        )

    def concerns(self) -> dict[str, Any]:
        """The settings that can change a number of this combination; the others are left out."""
        offload = self.engine == "offload"
        keys = ["selector", "engine", "chunk_size", "decode_selector", "cuda_graph", "ops_backend"]
        if offload:
            keys += ["block_size", "block_size_ratio", "digest", "transfer"]
            keys += ["ring_slots"] if self.reads_through_ring else []
        if self.digest == "strided_k":
            keys += ["stride"]
        if self.digest == "quantised_k":
            keys += ["digest_format"]
        if not self.is_dense:
            own = selectors.parameters(self.selector)
            keys += [key for key in ("threshold", "stride", "seed") if key in own]
            keys += ["selector_options", "block_size", "block_size_ratio", "transfer", "attend"]
            keys += ["reduce_heads", "reduce_queries", "mass_recall"]
            if self.transfer == "ring":
                keys += ["reduce_sub_blocks"]
        if self.decodes_sparsely:
            keys += ["block_size", "decode_budget_tokens"]
            keys += ["decode_cache_gb"] if offload else []
        return {key: getattr(self, key) for key in dict.fromkeys(keys)}


def parse_threshold(value: Any) -> float | str:
    """A share in [0, 1], rounded to 10 digits, or "@file.json". TypeError for anything else."""
    if isinstance(value, str) and value.startswith("@"):
        if not Path(value[1:]).is_file():
            refuse("threshold", value, "a number in [0, 1] or @ and the path of a table")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"threshold={value}: allowed is a number in [0, 1] or @file.json")
    if math.isnan(value) or not 0 <= value <= 1:
        refuse("threshold", value, "a number in [0, 1] or @file.json")
    return round(float(value), 10)

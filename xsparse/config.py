"""The configuration: names, types, defaults and every range check, in one place.

The dataclasses are Hydra's schema, so unknown keys and wrong types are refused while composing;
values out of range are refused in `__post_init__`. Nothing here imports torch.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf


class ConfigError(ValueError):
    """One line: the key, the value and what is allowed."""


def _refuse(key: str, value: Any, allowed: str) -> None:
    raise ConfigError(f"{key}={value}: allowed is {allowed}")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        _refuse(key, value, " | ".join(allowed))


def _at_least(key: str, value: float, low: float) -> None:
    if not value >= low:
        _refuse(key, value, f">= {low}")


@dataclass
class ModelConfig:
    name: str | None = None
    source: str = "hub"
    id: str | None = None
    revision: str | None = None
    max_length: int | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("model.source", self.source, ("wheel", "hub", "path", "random"))


@dataclass
class TaskConfig:
    name: str = MISSING
    tasks: list[str] = field(default_factory=list)
    ruler_data: str | None = None
    qa_data: str | None = None
    depths: list[float] | None = None
    rounds: int = 1
    haystack: str | None = None


@dataclass
class EngineConfig:
    name: str = "resident"
    host_memory_gb: float | None = None

    def __post_init__(self) -> None:
        _one_of("engine", self.name, ("resident", "offload"))
        if self.host_memory_gb is not None and not self.host_memory_gb > 0:
            _refuse("engine.host_memory_gb", self.host_memory_gb, "> 0, or null for what is free")


@dataclass
class TrackerConfig:
    name: str = "auto"
    project: str = "xsparse"
    entity: str | None = None
    dir: str | None = None

    def __post_init__(self) -> None:
        _one_of("tracker", self.name, ("auto", "online", "offline", "disabled"))


RULES = ("any", "vote", "mean_score")
DIGESTS = ("none", "streamed", "resident_k", "strided_k", "minmax")
BACKENDS = ("auto", "torch", "triton", "flex", "fa4", "naive")


@dataclass
class Config:
    """One point. Defaults suit two CPU cores."""

    model: ModelConfig = field(default_factory=ModelConfig)
    # name and the method's own parameters; the method itself says which and refuses others
    selector: dict[str, Any] = field(default_factory=dict)
    task: TaskConfig = field(default_factory=TaskConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    length: Any = 2048
    samples: int = 4
    seed: int = 0

    threshold: Any = 0.9
    stride: int = 8
    block_size: int = 128
    block_size_ratio: int = 4
    chunk_size: int = 512

    reduce_heads: str = "any"
    reduce_queries: str = "any"
    reduce_sub_blocks: str = "any"
    attend: str = "mask"

    transfer: str = "ring"
    ring_slots: int = 4
    digest: str | None = None

    decode_selector: str = "full"
    decode_budget_tokens: int = 2048

    dtype: str = "auto"
    device: str = "auto"
    ops_backend: str = "auto"
    mass_recall: bool = False

    dry_run: bool = False
    force: bool = False
    results: str = "results"

    def __post_init__(self) -> None:
        try:
            self.length = parse_length(self.length)
            self.threshold = parse_threshold(self.threshold)
        except TypeError as error:
            raise ConfigError(str(error)) from None
        for key in ("samples", "block_size", "block_size_ratio", "chunk_size"):
            _at_least(key, getattr(self, key), 1)
        _at_least("seed", self.seed, 0)
        _at_least("ring_slots", self.ring_slots, 2)
        if self.stride < 1 or self.block_size % self.stride:
            _refuse("stride", self.stride, f"a divisor of block_size={self.block_size}")
        if self.chunk_size % self.block_size:
            _refuse("chunk_size", self.chunk_size, f"a multiple of block_size={self.block_size}")
        for key in ("reduce_heads", "reduce_queries", "reduce_sub_blocks"):
            _one_of(key, getattr(self, key), RULES)
        _one_of("attend", self.attend, ("mask", "set"))
        _one_of("transfer", self.transfer, ("ring", "gather"))
        _one_of("decode_selector", self.decode_selector, ("full", "minmax"))
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("ops_backend", self.ops_backend, BACKENDS)
        if self.device.split(":")[0] not in ("auto", "cpu", "cuda"):
            _refuse("device", self.device, "auto | cpu | cuda | cuda:N")
        if self.digest is not None:
            _one_of("digest", self.digest, DIGESTS)
            if self.engine.name == "resident":
                _refuse("digest", self.digest, "null with engine=resident, where K is at hand")
        if self.decode_selector == "minmax" and self.decode_budget_tokens < 3 * self.block_size:
            _refuse(
                "decode_budget_tokens",
                self.decode_budget_tokens,
                f">= {3 * self.block_size} (three blocks are always kept)",
            )
        try:
            self._check_selector()
            self._check_tasks()
        except ConfigError:
            raise
        except ValueError as error:  # what the parts themselves refuse
            raise ConfigError(str(error)) from None

    def _check_selector(self) -> None:
        from xsparse import selectors
        from xsparse.digests import choose_digest

        options = {str(key): value for key, value in self.selector.items()}
        name = str(options.pop("name", None))
        selector = selectors.build(
            name, threshold=self.threshold, stride=self.stride, **{"seed": self.seed} | options
        )
        rules = (self.reduce_heads, self.reduce_queries, self.reduce_sub_blocks)
        if "mean_score" in rules and not selector.has_scores:
            raise ConfigError(f"mean_score: selector={name} has no scores; allowed is any | vote")
        if self.engine.name == "offload":
            choose_digest(
                selector,
                self.digest,
                decode_selector=self.decode_selector,
                mass_recall=self.mass_recall,
            )

    def _check_tasks(self) -> None:
        from xsparse import tasks

        for length in self.length:
            for name in tasks.names(self.task):
                tasks.check(name, length, self.task)

    @property
    def tasks(self) -> list[str]:
        from xsparse import tasks

        return tasks.names(self.task)

    @property
    def page_size(self) -> int:
        return self.block_size * self.block_size_ratio


def parse_length(value: Any) -> list[int]:
    """An int or a list of ints, as a list. TypeError for anything else, ConfigError for range."""
    items = value if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise TypeError(f"length={value}: allowed is an int or a list of ints")
    if not items:
        _refuse("length", value, "at least one length")
    for item in items:
        _at_least("length", item, 1)
    if len(set(items)) != len(items):
        _refuse("length", value, "each length once")
    return list(items)


def parse_threshold(value: Any) -> float | str:
    """A share in [0, 1], rounded to 10 digits, or "@file.json". TypeError for anything else."""
    if isinstance(value, str) and value.startswith("@"):
        if not Path(value[1:]).is_file():
            _refuse("threshold", value, "a number in [0, 1] or @ and the path of a table")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"threshold={value}: allowed is a number in [0, 1] or @file.json")
    if math.isnan(value) or not 0 <= value <= 1:
        _refuse("threshold", value, "a number in [0, 1] or @file.json")
    return round(float(value), 10)


def from_hydra(node: Any) -> Config:
    """The typed configuration of a composed Hydra node. Raises ConfigError with one line."""
    config = OmegaConf.to_object(node)
    assert isinstance(config, Config)
    return config


def register() -> None:
    """Put the schema where conf/config.yaml finds it."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)

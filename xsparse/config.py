"""The configuration: names, types, defaults and every range check, in one place.

The dataclasses are Hydra's schema, so unknown keys and wrong types are refused while composing;
values out of range are refused in `__post_init__`. Nothing here imports torch.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, OmegaConf

from xsparse.settings import ConfigError, Settings, at_least, between, one_of, refuse


@dataclass
class ModelConfig:
    name: str = MISSING
    source: str = "hub"
    id: str | None = None
    revision: str | None = None
    max_length: int | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("model.source", self.source, ("wheel", "hub", "path", "random"))


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


@dataclass
class TrackerConfig:
    name: str = "auto"
    project: str = "xsparse"
    entity: str | None = None
    dir: str | None = None

    def __post_init__(self) -> None:
        one_of("tracker", self.name, ("auto", "online", "offline", "disabled"))


# Keys of Config that Settings has under the same name.
SHARED = (
    *("threshold", "stride", "seed", "block_size", "block_size_ratio", "chunk_size"),
    *("transfer", "ring_slots", "digest", "digest_format"),
    *("reduce_heads", "reduce_queries", "reduce_sub_blocks", "attend"),
    *("decode_selector", "decode_budget_tokens", "decode_cache_gb", "cuda_graph"),
    *("ops_backend", "mass_recall"),
)


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
    digest_format: str = "int8"

    decode_selector: str = "full"
    decode_budget_tokens: int = 2048
    decode_cache_gb: float = 0.0
    cuda_graph: str = "none"

    dtype: str = "auto"
    device: str = "auto"
    ops_backend: str = "auto"
    mass_recall: bool = False

    workers: int = 0
    dry_run: bool = False
    force: bool = False
    results: str = "results"

    def __post_init__(self) -> None:
        try:
            self.length = parse_length(self.length)
        except TypeError as error:
            raise ConfigError(str(error)) from None
        between("samples", self.samples, 1, 1_000_000)
        between("workers", self.workers, 0, 1024)
        if not self.results.strip():
            refuse("results", self.results, "a folder")
        one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.device.split(":")[0] not in ("auto", "cpu", "cuda"):
            refuse("device", self.device, "auto | cpu | cuda | cuda:N")
        self.threshold = self.settings().threshold
        try:
            self._check_tasks()
        except ConfigError:
            raise
        except ValueError as error:  # what the tasks refuse
            raise ConfigError(str(error)) from None

    def settings(self) -> Settings:
        """How a sequence is attended at this point. Raises ConfigError."""
        options = {str(key): value for key, value in self.selector.items()}
        return Settings(
            selector=str(options.pop("name", None)),
            selector_options=options,
            engine=self.engine.name,
            host_memory_gb=self.engine.host_memory_gb,
            **{key: getattr(self, key) for key in SHARED},
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
        refuse("length", value, "at least one length")
    for item in items:
        at_least("length", item, 1)
    if len(set(items)) != len(items):
        refuse("length", value, "each length once")
    return list(items)


def from_hydra(node: Any) -> Config:
    """The typed configuration of a composed Hydra node. Raises ConfigError with one line."""
    unknown = [key for key in node if key not in Config.__dataclass_fields__]
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such key; see python run.py --help")
    config = OmegaConf.to_object(node)
    assert isinstance(config, Config)
    return config


def register() -> None:
    """Put the schema where conf/config.yaml finds it."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)

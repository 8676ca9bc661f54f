"""The keys of the three commands, as Hydra's schema."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from experiments.longcontext.packs import Phase, Recipe
from xsparse.config import ModelConfig, TaskConfig

CONF = Path(__file__).parent / "conf"
PROJECT_CONF = Path(__file__).parents[2] / "conf"
# Keys that cannot change what is trained.
_MACHINE = ("folder", "limit_s", "device", "compile", "workers", "checkpoint_s", "steps")


@dataclass
class PhaseConfig:
    steps: int = MISSING
    shortest: int = MISSING
    longest: int = MISSING


@dataclass
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    folder: str = MISSING
    limit_s: float | None = None
    seed: int = MISSING
    rank: int = MISSING
    alpha: float = MISSING
    rope_theta: float = MISSING
    max_position_embeddings: int = MISSING
    learning_rate: float = MISSING
    warmup_steps: int = MISSING
    final_share: float = MISSING
    clip: float = MISSING
    text_weight: float = MISSING
    pack_tokens: int = MISSING
    accumulate: int = MISSING
    phases: list[PhaseConfig] = field(default_factory=list)
    mixture: dict[str, float] = field(default_factory=dict)
    device: str = MISSING
    compile: bool = MISSING
    checkpointing: bool = MISSING
    workers: int = MISSING
    checkpoint_s: float = MISSING
    steps: int | None = None

    def __post_init__(self) -> None:
        for key in ("rank", "pack_tokens", "accumulate"):
            _at_least(key, getattr(self, key), 1)
        for key in ("workers", "warmup_steps", "text_weight", "checkpoint_s"):
            _at_least(key, getattr(self, key), 0)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> TrainConfig:
        """From what `asdict` made of one."""
        phases = [PhaseConfig(**phase) for phase in plain["phases"]]
        return cls(**{**plain, "model": ModelConfig(**plain["model"]), "phases": phases})

    def recipe(self) -> Recipe:
        return Recipe(
            seed=self.seed,
            pack_tokens=self.pack_tokens,
            phases=tuple(Phase(p.steps, p.shortest, p.longest) for p in self.phases),
            mixture=self.mixture,
        )

    def what_is_trained(self) -> dict[str, Any]:
        """The keys that decide the adapter; one that it begins from counts by its content."""
        kept = {key: value for key, value in asdict(self).items() if key not in _MACHINE}
        return kept | {"model": kept["model"] | {"adapter": None}}


@dataclass
class EvaluateConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    length: Any = MISSING
    samples: int = MISSING
    seed: int = MISSING
    batch: int = MISSING
    scores: str | None = None
    limit_s: float | None = None
    device: str = MISSING
    dtype: str = MISSING
    workers: int = MISSING

    def __post_init__(self) -> None:
        for key in ("samples", "batch"):
            _at_least(key, getattr(self, key), 1)


@dataclass
class ExportConfig:
    folder: str = MISSING
    name: str = MISSING
    out: str = MISSING
    scores: str | None = None
    machine: str = MISSING


SCHEMAS = {"train": TrainConfig, "evaluate": EvaluateConfig, "export": ExportConfig}


def compose(command: str, overrides: list[str]) -> Any:
    """The typed configuration of a command."""
    import hydra

    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(name=f"schema_{name}", node=schema)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        node = hydra.compose(
            command, overrides=[*overrides, f"hydra.searchpath=[file://{PROJECT_CONF}]"]
        )
    missing = sorted(OmegaConf.missing_keys(node))
    if missing:
        raise ValueError(f"{missing[0]}: needs a value")
    return OmegaConf.to_object(node)


def _at_least(key: str, value: float, low: float) -> None:
    if value < low:
        raise ValueError(f"{key}={value}: allowed is >= {low}")

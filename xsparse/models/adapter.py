"""LoRA adapters (Hu et al. 2021): a small file that turns one base model into another.

A file is safetensors with `<module>.lora_A` [rank, in] and `<module>.lora_B` [out, rank] for every
module in `targets`; its header's metadata hold one entry `adapter`, the JSON of `Adapter`. Loading
merges W + alpha / rank * B A in fp32 and rounds once to the run's dtype, so that nothing is slower
or different at run time. Reading the header needs no torch: 8 bytes of length, then JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsparse.models import files
from xsparse.models.files import ModelError

if TYPE_CHECKING:
    import torch

BUNDLED = Path(__file__).parent / "adapters"
FILE = "adapter.safetensors"  # in a folder
FORMAT_VERSION = 1
CONFIG_KEYS = ("max_position_embeddings", "rope_theta")
_LONGEST_HEADER = 100_000_000  # bytes; what safetensors itself allows


@dataclass(frozen=True)
class Adapter:
    """What the header says. config: fields of the base's config to replace before it is built."""

    format_version: int
    base: str
    """weights_sha256 of the model it was trained on, and the only one it is applied to."""
    rank: int
    alpha: float
    targets: list[str]
    config: dict[str, Any]
    recipe: str
    """Identity of the training: configuration and source."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """A record of each training that it went through, in order; for those who go on from it."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def find(given: str) -> Path:
    """The file of `model.adapter=given`: a file, a folder that holds one, or a bundled name."""
    path = Path(given).expanduser()
    bundled = BUNDLED / f"{given}.safetensors"
    for candidate in (path / FILE, path, bundled):
        if candidate.is_file():
            return candidate.absolute()
    names = ", ".join(sorted(p.stem for p in BUNDLED.glob("*.safetensors"))) or "none"
    raise ModelError(
        f"model.adapter={given}: no such file and no folder with {FILE}; bundled are {names}"
    )


def read(path: Path) -> Adapter:
    """The header of an adapter file, checked. ModelError for anything else."""
    header = _header(path)
    try:
        stored = {"stages": [], **json.loads(header["__metadata__"]["adapter"])}
        adapter = Adapter(**{field.name: stored[field.name] for field in fields(Adapter)})
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"model.adapter={path}: its header does not describe an adapter ({error!r})"
        ) from None
    if adapter.format_version != FORMAT_VERSION:
        raise ModelError(
            f"model.adapter={path}: format_version={adapter.format_version}, "
            f"allowed is {FORMAT_VERSION}"
        )
    if unknown := sorted(set(adapter.config) - set(CONFIG_KEYS)):
        raise ModelError(
            f"model.adapter={path}: replaces config.{unknown[0]}, "
            f"allowed are {', '.join(CONFIG_KEYS)}"
        )
    for target in adapter.targets:
        for name, axis in ((f"{target}.lora_A", 0), (f"{target}.lora_B", 1)):
            shape = header.get(name, {}).get("shape", [])
            if len(shape) != 2 or shape[axis] != adapter.rank:
                raise ModelError(
                    f"model.adapter={path}: {name} has shape {shape}, need rank {adapter.rank}"
                )
    return adapter


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= _LONGEST_HEADER:
                raise ValueError("no safetensors header")
            header = json.loads(file.read(size))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"model.adapter={path}: not a safetensors file ({error})") from None
    return header


def check_base(adapter: Adapter, path: Path, weights_sha256: str) -> None:
    if adapter.base != weights_sha256:
        raise ModelError(
            f"model.adapter={path}: made for a base with weights_sha256={adapter.base}, "
            f"this model has {weights_sha256}"
        )


def identity(path: Path, base_sha256: str) -> str:
    """weights_sha256 of base and adapter together."""
    sha256 = files.remembered_hashes(path.parent, [path.name])[path.name]
    return files.digest({"base": base_sha256, "adapter": sha256})


def override(config: Any, changes: Mapping[str, Any]) -> None:
    """Replace fields of a transformers config, before a model is built of it."""
    for name, value in changes.items():
        rope = getattr(config, "rope_parameters", None)
        if name == "rope_theta" and rope is not None:  # its place since transformers 5
            config.rope_parameters = {**rope, "rope_theta": value}
        else:
            setattr(config, name, value)


def merge(model: Any, adapter: Adapter, path: Path, dtype: torch.dtype) -> None:
    """W + scale * B A into a model that was loaded in fp32, which then becomes `dtype`.

    Raises ModelError if a target is no weight of the model or has another shape.
    """
    import torch

    weights = dict(model.named_parameters())
    factors = read_factors(path, adapter, str(model.device))
    with torch.no_grad():
        for target in adapter.targets:
            weight = weights.get(f"{target}.weight")
            a, b = (factors[side][target].float() for side in "ab")
            if weight is None or weight.shape != (b.shape[0], a.shape[1]):
                shape = None if weight is None else list(weight.shape)
                raise ModelError(
                    f"model.adapter={path}: {target} changes [{b.shape[0]}, {a.shape[1]}] weights, "
                    f"the model has {shape}"
                )
            weight.add_(b @ a, alpha=adapter.scale)
        # Parameters only: the rotary frequencies are buffers and stay fp32.
        for parameter in weights.values():
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def read_factors(path: Path, adapter: Adapter, device: str) -> dict[str, dict[str, torch.Tensor]]:
    """Matrices by target: `a` [rank, in] and `b` [out, rank]."""
    from safetensors.torch import load_file

    stored = load_file(path, device=device)
    return {
        side.lower(): {target: stored[f"{target}.lora_{side}"] for target in adapter.targets}
        for side in "AB"
    }


def write(
    path: Path, adapter: Adapter, matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Save an adapter, replacing the file in one step. matrices: (A, B) of each target."""
    from safetensors.torch import save_file

    tensors = {
        f"{target}.lora_{side}": matrix.detach().cpu().contiguous()
        for target in adapter.targets
        for side, matrix in zip("AB", matrices[target], strict=True)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    save_file(tensors, temporary, metadata={"adapter": json.dumps(asdict(adapter))})
    temporary.chmod(0o644)
    temporary.replace(path)

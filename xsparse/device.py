"""Which device a run uses and what it is called, found without importing torch."""

import os
from dataclasses import dataclass
from importlib import metadata

from xsparse.store.environment import environment


@dataclass(frozen=True)
class Device:
    """kind: "cpu" or "cuda[:N]" as torch takes it; label: the hardware's own name."""

    kind: str
    label: str

    @property
    def is_cuda(self) -> bool:
        return self.kind.startswith("cuda")


def find(wanted: str, env: dict | None = None) -> Device:
    """The device for `device=wanted` ("auto", "cpu", "cuda", "cuda:N").

    Raises ValueError when CUDA is asked for and there is none.
    """
    env = env or environment()
    gpus = [] if _cpu_build() or os.environ.get("CUDA_VISIBLE_DEVICES") == "" else env["gpus"]
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return Device("cpu", env["cpu"])
    if not gpus:
        raise ValueError(f"device={wanted}: no CUDA device here; allowed is auto | cpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible and all(part.strip().isdigit() for part in visible.split(",")):
        shown = [int(part) for part in visible.split(",")]
        gpus = [gpus[number] for number in shown if number < len(gpus)]
    number = int(wanted.partition(":")[2] or 0)
    if number >= len(gpus):
        raise ValueError(f"device={wanted}: allowed is cuda:0 to cuda:{len(gpus) - 1}")
    return Device("cuda" if wanted == "auto" else wanted, gpus[number]["name"])


def dtype_name(wanted: str, device: Device) -> str:
    """float32 on a CPU, where bfloat16 is slower; bfloat16 on CUDA."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if device.is_cuda else "float32"


def _cpu_build() -> bool:
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True

"""Operators: pure functions on tensors, the same signatures in every backend.

A backend is a module `<name>_backend` with the functions that `OPERATORS` names (docs/design.md),
its `name`, and, where it does not run everywhere, `why_not(device) -> str | None`: the reason, from
what the device can do, never from what it is called.
"""

import importlib
import importlib.util
from types import ModuleType

import torch

BACKENDS = ("triton", "flex", "fa4", "torch", "naive")
OPERATORS = (
    "antidiagonal_scores",
    "antidiagonal_stats",
    "antidiagonal_block_sums",
    "merge_stats",
    "select_blocks",
    "block_lists",
    "attention_mass",
    "block_sparse_attention",
    "tiles_of_empty_row",
    "dense_attention",
    "dense_kernel",
    "merge_states",
    "gather_tiles",
    "put_token",
    "fold_token",
    "step_scores",
    "choose_tiles",
)


def get(backend: str = "auto", device: str | torch.device = "cpu") -> ModuleType:
    """The backend to run on a device; backends are imported only when asked for.

    `auto` is triton where it can run and torch elsewhere. Raises ValueError with the reason if the
    one asked for cannot run: nothing is replaced silently.
    """
    device = torch.device(device)
    if backend == "auto":
        use_triton = device.type == "cuda" and _why_not("triton", device) is None
        backend = "triton" if use_triton else "torch"
    if backend not in BACKENDS:
        raise ValueError(f"ops_backend={backend}: allowed is auto | {' | '.join(BACKENDS)}")
    reason = _why_not(backend, device)
    if reason:
        raise ValueError(f"ops_backend={backend} cannot run on {device}: {reason}")
    return _module(backend)


def _why_not(backend: str, device: torch.device) -> str | None:
    if importlib.util.find_spec(f"xsparse.ops.{backend}_backend") is None:
        return "this version of xsparse does not contain it"
    try:
        module = _module(backend)
    except ImportError as error:
        return str(error)
    why_not = getattr(module, "why_not", None)
    return why_not(device) if why_not else None


def _module(backend: str) -> ModuleType:
    return importlib.import_module(f"xsparse.ops.{backend}_backend")

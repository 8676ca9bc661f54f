"""The operators as Triton kernels; dense attention and diagnostics stay with torch.

Runs on NVIDIA GPUs with tensor cores for bf16 and enough shared memory for one step of the
attention kernel, and on the CPU inside Triton's interpreter (TRITON_INTERPRET=1) for tests.
"""
# ruff: noqa: F401 (a backend offers what it imports: xsparse.ops.OPERATORS)

import functools
import os

import torch
import triton  # noqa: F401  (a missing Triton is an ImportError that says so)

from xsparse.ops.antidiagonal.kernel import (
    antidiagonal_block_sums,
    antidiagonal_scores,
    antidiagonal_stats,
    merge_stats,
)
from xsparse.ops.attention import dense, hopper
from xsparse.ops.attention.dense import dense_kernel
from xsparse.ops.attention.fast import attention_mass
from xsparse.ops.attention.kernel import block_sparse_attention
from xsparse.ops.decode.kernel import choose_tiles, fold_token, put_token, step_scores
from xsparse.ops.gather.kernel import gather_tiles
from xsparse.ops.merge.kernel import merge_states
from xsparse.ops.selection.kernel import block_lists, select_block_lists, select_blocks
from xsparse.ops.tiles import KVTiles

name = "triton"
dense_attention = functools.partial(dense.dense_attention, merge=merge_states)

SHARED_MEMORY_BYTES = 160 << 10


def why_not(device: str | torch.device) -> str | None:
    """The reason why a device cannot run these kernels, or None."""
    device = torch.device(device)
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "the Triton kernels need a CUDA GPU (or TRITON_INTERPRET=1, for tests)"
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"the Triton kernels need a CUDA GPU; device is {device.type}"
    if torch.version.hip:
        return "the Triton kernels are written for NVIDIA GPUs; this is a ROCm build"
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        return f"compute capability {properties.major}.{properties.minor}; at least 8.0 is needed"
    shared = properties.shared_memory_per_block_optin
    if shared < SHARED_MEMORY_BYTES:
        return (
            f"{shared >> 10} KiB of shared memory per block;"
            f" at least {SHARED_MEMORY_BYTES >> 10} KiB is needed"
        )
    return None


def tiles_of_empty_row(q: torch.Tensor, kv: KVTiles) -> int:
    """The Hopper kernel computes one masked tile for a row without any."""
    return int(q.shape[1] > 1 and hopper.why_not(q, kv) is None)

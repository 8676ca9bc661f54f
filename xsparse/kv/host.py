"""The paged store in host memory.

Layout `[layer][page][K|V][kv_head][sub_block][block_size][head_dim]`: one page of one layer is
contiguous, so are its K half and its V half, and so is every tile. One layout serves whole-page
copies and tile gathers.
"""

from pathlib import Path

import torch
from torch import Tensor

from xsparse.kv.shape import CacheShape


def available_bytes() -> int:
    """Host memory that can still be taken, in bytes: the machine's, within the cgroup's limit."""
    with open("/proc/meminfo", encoding="ascii") as file:
        free = {line.split(":")[0]: line.split()[1] for line in file}
    available = int(free["MemAvailable"]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:  # no cgroup v2 here
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def allocate(shape: CacheShape, pages: int, limit_bytes: int | None = None) -> Tensor:
    """[layers, pages, 2, kv_heads, ratio, block_size, head_dim]; pinned beside a CUDA device.

    Raises MemoryError with the GB needed and available before anything is touched.
    """
    s = shape
    need = s.layers * pages * s.page_size * s.token_bytes
    have = available_bytes() if limit_bytes is None else limit_bytes
    if need > have:
        raise MemoryError(
            f"engine=offload needs {need / 1e9:.1f} GB of host memory for {pages * s.page_size} "
            f"tokens, {have / 1e9:.1f} GB are available"
        )
    size = (s.layers, pages, 2, s.kv_heads, s.block_size_ratio, s.block_size, s.head_dim)
    return torch.zeros(size, dtype=s.dtype, pin_memory=s.device.type == "cuda")

"""Host memory of the paged store: pinned beside a CUDA device, and kept for the next store.

Layout `[layer][page][K|V][kv_head][sub_block][block_size][head_dim]`, without the K half where K
stays on the device: one page of one layer is contiguous, so are its halves, and so is every tile.

Pinning is slow (seconds for tens of GB), so memory is taken in the size that is needed, touched by
all cores, pinned in one piece, and the largest piece given back is used again for a store of
half its size or more.
"""

import logging
import mmap
import time
import weakref
from pathlib import Path

import torch
from torch import Tensor

from xsparse.kv.gigabytes import gb_down, gb_up
from xsparse.kv.shape import CacheShape

logger = logging.getLogger(__name__)

STEP_BYTES = 1 << 30  # touched at once, between two lines of progress
ANNOUNCED_BYTES = 4 << 30  # less is pinned before anybody wonders


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


class HostMemory:
    """Bytes of host memory, pinned if asked for. Unpinned when nothing refers to it any more."""

    def __init__(self, nbytes: int, pinned: bool):
        begin_s = time.perf_counter()
        self.pinned = pinned
        # Whole pages of an own mapping: pinning must not touch what others use.
        mapping = mmap.mmap(-1, max(nbytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        if not pinned:
            return
        for begin in range(0, nbytes, STEP_BYTES):
            self.bytes[begin : begin + STEP_BYTES].zero_()
            if nbytes >= ANNOUNCED_BYTES:
                done = min(begin + STEP_BYTES, nbytes)
                logger.info("host memory: %.0f of %.0f GB touched", done / 1e9, nbytes / 1e9)
        address, runtime = self.bytes.data_ptr(), torch.cuda.cudart()
        assert runtime is not None
        error = runtime.cudaHostRegister(address, len(self.bytes), 0)
        if int(error):
            raise MemoryError(f"{nbytes / 1e9:.1f} GB of host memory cannot be pinned: {error}")
        weakref.finalize(self, runtime.cudaHostUnregister, address)
        if nbytes >= ANNOUNCED_BYTES:
            seconds = time.perf_counter() - begin_s
            logger.info("host memory: %.1f GB pinned in %.1f s", nbytes / 1e9, seconds)

    @property
    def nbytes(self) -> int:
        return len(self.bytes)


class HostPool:
    """The largest piece of pinned memory given back, until a store comes that it does not suit."""

    def __init__(self):
        self.kept: HostMemory | None = None

    def take(self, nbytes: int, pinned: bool) -> HostMemory:
        kept, self.kept = self.kept, None
        if kept is not None and kept.pinned == pinned and nbytes <= kept.nbytes <= 2 * nbytes:
            return kept
        del kept  # gone before more is taken
        return HostMemory(nbytes, pinned)

    def give(self, memory: HostMemory) -> None:
        if memory.pinned and (self.kept is None or self.kept.nbytes < memory.nbytes):
            self.kept = memory


POOL = HostPool()


class HostStore:
    """data: [layers, pages, halves, kv_heads, ratio, block_size, head_dim]; its content is
    undefined until written. halves: 2 for K and V, 1 for V alone.

    Raises MemoryError with the GB needed and available before anything is touched.
    """

    def __init__(self, shape: CacheShape, halves: int, pages: int, limit_bytes: int | None = None):
        s = shape
        size = (s.layers, pages, halves, s.kv_heads, s.block_size_ratio, s.block_size, s.head_dim)
        need = s.layers * pages * s.page_bytes(halves)
        tokens = pages * s.page_size
        if limit_bytes is not None and need > limit_bytes:
            raise MemoryError(
                f"engine.host_memory_gb={limit_bytes / 1e9:g}: allowed is >= {gb_up(need)}, the GB "
                f"of {tokens} tokens, or null for what is free"
            )
        kept = POOL.kept.nbytes if POOL.kept is not None else 0
        if limit_bytes is None and need > (have := available_bytes() + kept):
            raise MemoryError(
                f"engine=offload needs {gb_up(need)} GB of host memory for {tokens} tokens, "
                f"{gb_down(have)} GB are available"
            )
        self.memory = POOL.take(need, s.device.type == "cuda")
        self.data: Tensor = self.memory.bytes[:need].view(s.dtype).view(size)

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def close(self) -> None:
        """Give the memory back; no copy may be under way."""
        POOL.give(self.memory)
        del self.memory, self.data

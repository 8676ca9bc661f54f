"""Memory of the host store: taken in the size needed, given back, used again."""

import torch

from xsparse.kv.host import HostMemory, HostPool, HostStore
from xsparse.kv.shape import CacheShape

SHAPE = CacheShape(3, 4, 2, 8, 16, 2, 64, torch.float32, torch.device("cpu"))


def test_a_store_takes_what_its_pages_need():
    for halves in (1, 2):
        store = HostStore(SHAPE, halves, pages=5)
        assert store.data.shape == (3, 5, halves, 2, 2, 16, 8)
        assert store.nbytes == 3 * 5 * SHAPE.page_bytes(halves) == store.memory.nbytes
        store.data.fill_(1.0)
        assert float(store.data.sum()) == store.data.numel()


def test_pinned_memory_is_kept_for_the_next_store():
    pool = HostPool()
    # As if pinned, which only a machine with a GPU can do.
    first, small = HostMemory(4096, False), HostMemory(64, False)
    first.pinned = small.pinned = True
    pool.give(first)
    pool.give(small)
    assert pool.take(3000, True) is first  # the largest was kept
    assert pool.kept is None
    pool.give(first)
    assert pool.take(100, False) is not first
    pool.give(first)
    assert pool.take(1000, False) is not first  # too large to be held for so little

"""Tiles of history gathered from host memory, window by window, without a host read.

A window is a few KV heads with all their tiles, so windows need no merging; only where a head has
more history than a window has room do several follow each other. How many windows there are depends
on the length alone, and each ends early where the device finds fewer tiles. The gather of the next
window runs beside attention over the current one.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from xsparse.kv.engine import Window
from xsparse.kv.shape import CacheShape
from xsparse.kv.streams import Buffer, CopyLane, Mark, compute_mark, compute_waits
from xsparse.ops.tiles import KVTiles

WINDOW_TILES = 1024  # of K and of V: 32 MiB with blocks of 128 and d = 128 in 16 bits
SMALL_TILES = 256  # up to here one window takes every head: more would only be launches
PROGRAMS = 16
"""Of the gather kernel while attention runs: enough for the link, few enough to miss."""


class Gathered:
    """Two window buffers inside `pool`, which also holds what else attention reads with them.

    pool: [tiles, block_size, head_dim]; first: the buffers' first tile; tiles: of one half of one
    buffer; halves: 2 for K and V, 1 for V alone
    """

    def __init__(self, shape: CacheShape, pool: Tensor, first: int, tiles: int, halves: int, ops):
        self.shape, self.pool, self.ops = shape, pool, ops
        self.first, self.tiles, self.halves = first, tiles, halves
        self.lane = CopyLane(shape.device)
        size = halves * tiles
        self.buffers = [Buffer(pool[first + i * size : first + (i + 1) * size]) for i in range(2)]

    def windows(
        self,
        source: Tensor,
        wanted: Tensor,
        own: KVTiles,
        *,
        resident: Callable[[Tensor], Tensor] | None,
        written: Mark,
        stage: Callable[[str], AbstractContextManager],
    ) -> Iterator[Window]:
        """source: host tiles of the layer in page order; wanted: bool [kv_heads, history blocks];
        own: the chunk's own blocks, V in `pool`; resident: where K of block numbers lies in
        own.k_pool, where K is not gathered."""
        s, device = self.shape, self.shape.device
        heads, history = wanted.shape
        per_window = self._heads(history)
        room = min(self.tiles // per_window, history)
        rounds, groups = -(-history // room), -(-heads // per_window)

        head = torch.arange(heads, dtype=torch.int32, device=device)[:, None]
        number = torch.arange(history, dtype=torch.int32, device=device)
        rank = wanted.cumsum(1, dtype=torch.int32) - 1
        lists = self.ops.block_lists(wanted[:, None])
        order = lists.indices[:, 0]
        real = number < lists.counts
        tile = page_tiles(order, s, self.halves, head)
        half = s.kv_heads * s.block_size_ratio
        sources = [torch.where(real, tile + t * half, -1) for t in range(self.halves)]
        ready = compute_mark(device)

        def load(i: int) -> None:
            turn, group = divmod(i, groups)
            rows = slice(group * per_window, min(heads, (group + 1) * per_window))
            low, high = turn * room, min(history, (turn + 1) * room)
            buffer, lane = self.buffers[i % 2], self.lane
            with lane.running():
                lane.wait(buffer.used)
                lane.wait(ready)
                lane.wait(written)
                with stage("transfer"):
                    for t in range(self.halves):
                        index = sources[t][rows, low:high].reshape(-1)
                        out = buffer.data[t * self.tiles : t * self.tiles + len(index)]
                        self.ops.gather_tiles(source, index, out, programs=PROGRAMS)
            buffer.loaded = lane.mark()

        load(0)
        for turn in range(rounds):
            low = turn * room
            width = min(history, low + room) - low
            # The buffer of each head's window, its row in it, and the tile's rank there.
            buffer = (head // per_window + turn * groups) % 2
            base = self.first + buffer * (self.halves * self.tiles) + head % per_window * width
            held = wanted if rounds == 1 else wanted & (rank >= low) & (rank < low + width)
            place = torch.where(held, base + rank - low, 0)
            blocks = torch.where(held, number, -1)
            if turn == 0:  # the chunk's own blocks go with the first window of each head
                blocks = torch.cat([blocks, own.blocks], 1)
                k_own, v_own = own.k_index, own.v_index
            else:
                blocks = torch.nn.functional.pad(blocks, (0, own.blocks.shape[1]), value=-1)
                k_own = v_own = torch.zeros_like(own.v_index)
            v_index = torch.cat([place + (self.halves - 1) * self.tiles, v_own], 1)
            k_place = resident(number) if resident else place
            k_index = torch.cat([k_place, k_own], 1)
            for group in range(groups):
                i = turn * groups + group
                if i + 1 < rounds * groups:
                    load(i + 1)
                rows = slice(group * per_window, min(heads, (group + 1) * per_window))
                buffer = self.buffers[i % 2]
                compute_waits(buffer.loaded, device)
                tiles = KVTiles(own.k_pool, self.pool, k_index[rows], v_index[rows], blocks[rows])
                yield Window(tiles, range(rows.start, rows.stop), None, only=rounds == 1)
                buffer.used = compute_mark(device)

    def _heads(self, history: int) -> int:
        """KV heads of a window: at least one, and several windows where there is much to move."""
        heads = self.shape.kv_heads
        if heads * history <= min(SMALL_TILES, self.tiles):
            return heads
        return max(1, min(self.tiles // history, -(-heads // 4)))

    def reset(self) -> None:
        for buffer in self.buffers:
            buffer.loaded = buffer.used = None


def page_tiles(numbers: Tensor, shape: CacheShape, halves: int, head: Tensor) -> Tensor:
    """First-half tile of every (kv head, block) in a pool of pages.

    numbers: int [kv_heads or 1, n]; head: int [kv_heads, 1]
    """
    s = shape
    page = torch.div(numbers, s.block_size_ratio, rounding_mode="floor")
    return (page * (halves * s.kv_heads) + head) * s.block_size_ratio + numbers % s.block_size_ratio


def tiles_of_window(shape: CacheShape, capacity: int) -> int:
    """Tiles of one half of a window buffer: no more than the sequence can have."""
    return min(WINDOW_TILES, shape.kv_heads * shape.blocks(capacity))

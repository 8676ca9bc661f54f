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
PROGRAMS = 24
"""Of the gather kernel while attention runs: enough for the link, few enough to miss."""


class Gathered:
    """Two window buffers inside `pool`, which also holds what else attention reads with them.

    pool: [tiles, block_size, head_dim]; first: the buffers' first tile; tiles: of one half of one
    buffer; halves: 2 for K and V, 1 for V alone
    """

    def __init__(self, shape: CacheShape, pool: Tensor, first: int, tiles: int, halves: int, ops):
        self.shape, self.pool, self.ops = shape, pool, ops
        self.first, self.tiles, self.halves = first, tiles, halves
        # Urgent: the next window must come in while attention holds every multiprocessor.
        self.lane = CopyLane(shape.device, urgent=True)
        size = halves * tiles
        self.buffers = [Buffer(pool[first + i * size : first + (i + 1) * size]) for i in range(2)]
        # Of the K and V of one tile after the other: first all K, then all V.
        place = torch.arange(tiles, dtype=torch.int32, device=shape.device)
        self.places = torch.stack([place + t * tiles for t in range(halves)], -1).flatten()

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
        groups, columns = heads // per_window, per_window * history
        room = min(self.tiles, columns)
        rounds = -(-columns // room)

        # The tiles of a group of heads as one list, those that are wanted first.
        grouped = wanted.reshape(groups, columns)
        rank = (grouped.cumsum(1, dtype=torch.int32) - 1).view(heads, history)
        lists = self.ops.block_lists(grouped[:, None])
        order, counts = lists.indices[:, 0], lists.counts[:, 0]
        group = torch.arange(groups, dtype=torch.int32, device=device)[:, None]
        head = group * per_window + torch.div(order, history, rounding_mode="floor")
        tile = page_tiles(order % history, s, self.halves, head)
        # K and V in turns, in one launch: a second one would wait until attention lets go again.
        half = s.kv_heads * s.block_size_ratio
        sources = torch.stack([tile + t * half for t in range(self.halves)], -1).flatten(1)
        counts = [(counts - turn * room).clamp(0, room) * self.halves for turn in range(rounds)]
        self.lane.keeps(sources, *counts)  # attention may fail while a gather still reads them
        ready = compute_mark(device)

        def load(i: int) -> None:
            turn, g = divmod(i, groups)
            low, high = (x * self.halves for x in (turn * room, min(columns, (turn + 1) * room)))
            buffer, lane = self.buffers[i % 2], self.lane
            with lane.running():
                lane.wait(buffer.used)
                lane.wait(ready)
                lane.wait(written)
                with stage("transfer"):
                    self.ops.gather_tiles(
                        source,
                        sources[g, low:high],
                        buffer.data,
                        to=self.places[: high - low],
                        count=counts[turn][g : g + 1],
                        programs=PROGRAMS,
                    )
            buffer.loaded = lane.mark()

        load(0)
        number = torch.arange(history, dtype=torch.int32, device=device)
        head = torch.arange(heads, dtype=torch.int32, device=device)[:, None]
        group = torch.div(head, per_window, rounding_mode="floor")
        for turn in range(rounds):
            low = turn * room
            base = self.first + (group + turn * groups) % 2 * (self.halves * self.tiles)
            held = wanted if rounds == 1 else wanted & (rank >= low) & (rank < low + room)
            place = torch.where(held, base + rank - low, 0)
            blocks = torch.where(held, number, -1)
            if turn == 0:  # the chunk's own blocks go with the first window of each head
                blocks = torch.cat([blocks, own.blocks], 1)
                k_own, v_own = own.k_index, own.v_index
            else:
                blocks = torch.nn.functional.pad(blocks, (0, own.blocks.shape[1]), value=-1)
                k_own = v_own = torch.zeros_like(own.v_index)
            v_index = torch.cat([place + (self.halves - 1) * self.tiles, v_own], 1)
            k_index = torch.cat([resident(number) if resident else place, k_own], 1)
            for g in range(groups):
                i = turn * groups + g
                if i + 1 < rounds * groups:
                    load(i + 1)
                rows = slice(g * per_window, (g + 1) * per_window)
                buffer = self.buffers[i % 2]
                compute_waits(buffer.loaded, device)
                tiles = KVTiles(own.k_pool, self.pool, k_index[rows], v_index[rows], blocks[rows])
                yield Window(tiles, range(rows.start, rows.stop), None, only=rounds == 1)
                buffer.used = compute_mark(device)

    def _heads(self, history: int) -> int:
        """KV heads of a window, a divisor of all: as many as fit, but several windows where there
        is much to move."""
        heads = self.shape.kv_heads
        few = heads * history <= SMALL_TILES
        fits = [
            n
            for n in range(1, heads + 1)
            if heads % n == 0 and n * history <= self.tiles and (few or 4 * n <= heads)
        ]
        return max(fits, default=1)

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

"""K and V in host memory, read back as pages through a ring of device slots or as gathered tiles.

On the device stay the chunks of two layers, the block being filled, and a digest. Where the digest
is K itself, V alone goes to the host. A chunk is copied to the host while the next layer computes;
marks per layer order the copies. Without a CUDA device the same path runs with plain copies,
counted as if they crossed a link.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xsparse.kv.digests import (
    DIGESTS,
    BlockMean,
    BlockStats,
    MinMax,
    QuantisedK,
    ResidentK,
    StridedK,
)
from xsparse.kv.engine import Engine, Memory, Window, block_stats, bytes_of
from xsparse.kv.gathered import Gathered, page_tiles, tiles_of_window
from xsparse.kv.host import HostStore
from xsparse.kv.ring import SLOT_BYTES, Ring
from xsparse.kv.shape import CacheShape
from xsparse.kv.streams import CopyLane, Mark, compute_mark, compute_waits
from xsparse.ops import torch_backend
from xsparse.ops.bounds import block_mean, block_minmax
from xsparse.ops.decode import Chosen, RowPlace, TileGeometry
from xsparse.ops.tiles import KVTiles


class OffloadEngine(Engine):
    """transfer: "ring" or "gather"; digest: a name of `kv.digests.DIGESTS`; ring_slots >= 2;
    stats: statistics of blocks, beside the digest or the digest itself; step_slots: room on the
    device for decode's tiles, per layer and KV head (0: decode reads everything through the ring)
    """

    name = "offload"

    def __init__(
        self,
        shape: CacheShape,
        *,
        ops: Any = torch_backend,
        transfer: str = "ring",
        ring_slots: int = 4,
        digest: str = "resident_k",
        digest_format: str = "int8",
        stride: int = 8,
        stats: str | None = None,
        step_slots: int = 0,
        limit_bytes: int | None = None,
    ):
        self.digest = DIGESTS[digest](shape, stride, digest_format)
        own = self.digest if isinstance(self.digest, BlockStats) else None
        super().__init__(shape, own if stats in (None, digest) else block_stats(stats, shape))
        self.digests = [self.digest] if self.stats in (None, own) else [self.digest, self.stats]
        s = shape
        self.ops = ops
        self.transfer = transfer
        self.ring_slots = ring_slots
        self.limit_bytes = limit_bytes
        self.k = self.digest if isinstance(self.digest, ResidentK) else None  # K itself
        self.halves = 1 if self.k else 2
        self.store: HostStore | None = None
        self.d2h = CopyLane(s.device)
        # Behind the copies of each layer's blocks to the host: all of them, and all but the last
        # chunk's, which is what history waits for.
        self.written: list[Mark] = [None] * s.layers
        self.history_written: list[Mark] = [None] * s.layers
        self.digested = [0] * s.layers  # tokens the digest was shown
        # The block being filled is the last of each head's tiles; decode's tiles lie before it.
        self.step_slots = step_slots
        self.tail = self._zeros(
            s.layers, self.halves, s.kv_heads, step_slots + 1, s.block_size, s.head_dim
        )
        self._head = torch.arange(s.kv_heads, dtype=torch.int32, device=s.device)[:, None]

    @torch.inference_mode(False)  # or buffers could not be written outside inference mode
    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=self.shape.dtype, device=self.shape.device)

    @torch.inference_mode(False)
    def reserve(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        s = self.shape
        capacity = s.pages(tokens) * s.page_size
        self._settle()
        fresh = HostStore(s, self.halves, capacity // s.page_size, self.limit_bytes)
        before = [kept.layers for kept in self.digests]
        try:
            # Buffers of the device first: if it has no room for them, all stays as it was.
            pool, slots = self._device_buffers(capacity)
            for kept in self.digests:
                kept.reserve(capacity)
        except BaseException:
            for kept, layers in zip(self.digests, before, strict=True):
                kept.layers = layers
            fresh.close()
            raise
        if self.store is not None:
            if any(self.lengths):
                fresh.data[:, : self.store.data.shape[1]] = self.store.data
            self.store.close()
        self.store, self.capacity = fresh, capacity
        self.generation += 1
        self._install(pool, slots)
        self._settle()  # new buffers are zeroed on the compute stream, which no copy waits for

    def _device_buffers(self, capacity: int) -> tuple[Tensor, list[Tensor]]:
        """A pool of tiles for two chunks and two windows, and the slots of the ring."""
        s = self.shape
        tile = (s.block_size, s.head_dim)
        tiles = 2 * self._chunk_pages * self.halves * s.kv_heads * s.block_size_ratio
        if self.transfer == "gather":
            tiles += 2 * self.halves * tiles_of_window(s, capacity)
        pages = min(window_pages(s, self.halves), s.pages(capacity))
        slot = (pages, self.halves, s.kv_heads, s.block_size_ratio, *tile)
        return self._zeros(tiles, *tile), [self._zeros(*slot) for _ in range(self.ring_slots)]

    @property
    def _chunk_pages(self) -> int:
        # A chunk may start inside a page and take an open block in front.
        return self.shape.pages(self.shape.chunk_size) + 1

    def _install(self, pool: Tensor, slots: list[Tensor]) -> None:
        s = self.shape
        self.pool = pool
        size = self._chunk_pages * self.halves * s.kv_heads * s.block_size_ratio
        self.chunks = [
            _Chunk(pool[i * size : (i + 1) * size], i * size, s, self.halves) for i in range(2)
        ]
        self.ring = Ring(slots, s.device)
        self.gathered = None
        if self.transfer == "gather":
            tiles = tiles_of_window(s, self.capacity)
            self.gathered = Gathered(s, pool, 2 * size, tiles, self.halves, self.ops)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        s = self.shape
        start = self.lengths[layer]
        end = start + k.shape[1]
        self.make_room(end)
        chunk = self.chunk(layer)
        compute_waits(chunk.copied, s.device)  # its last copy to the host must have read it
        older = start % s.block_size
        if older:
            open_k, open_v = self._open_block(layer, start)
            k, v = torch.cat([open_k, k], 1), torch.cat([open_v, v], 1)
        chunk.fill(start // s.block_size, k, v)
        self._catch_up(layer, chunk.first_block * s.block_size)
        self.digested[layer] = end
        for kept in self.digests:
            kept.store(layer, chunk.first_block * s.block_size, k)
        self.lengths[layer] = end
        self._save(layer, chunk, end)

    def _catch_up(self, layer: int, end: int) -> None:
        """Show the digest K up to `end` that decode steps wrote: they keep K itself and their own
        statistics up to date, nothing else."""
        s = self.shape
        begin = self.digested[layer] // s.block_size * s.block_size
        keeps = bool(self.digest.layers[layer])
        if begin >= end or not keeps or self.k is not None or self.digest is self.stats:
            return
        assert self.store is not None
        self._settle()
        first, stop = begin // s.page_size, s.pages(end)
        k = _in_order(self.store.data[layer, first:stop, 0])
        k = k[:, begin - first * s.page_size : end - first * s.page_size]
        self.digest.store(layer, begin, k.to(s.device))

    def begin_steps(self) -> None:
        compute_waits(self.d2h.mark(), self.shape.device)  # the open block is copied as a whole

    def advance(self, layer: int, tokens: int = 1) -> None:
        super().advance(layer, tokens)
        self.written[layer] = compute_mark(self.shape.device)  # steps write to the host themselves

    def chunk(self, layer: int) -> "_Chunk":
        return self.chunks[layer % 2]

    def _open_block(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V [kv_heads, n, d] of the block being filled."""
        held = length % self.shape.block_size
        tail = self.tail[layer, :, :, -1, :held]
        if self.k is not None:
            return self.k.keys(layer, length)[:, length - held :], tail[0]
        return tail[0], tail[1]

    def _save(self, layer: int, chunk: "_Chunk", end: int) -> None:
        """Copy the chunk's complete blocks to the host; the open one stays on the device, and goes
        as well where decode steps will add to it token by token."""
        s = self.shape
        assert self.store is not None
        complete = end // s.block_size
        if end % s.block_size:
            self.tail[layer, :, :, -1].copy_(chunk.block(complete))
            complete += bool(self.step_slots)
        ready = compute_mark(s.device)
        first = chunk.first_block
        ratio, store = s.block_size_ratio, self.store.data[layer]
        # Whole pages lie in one piece, here and there.
        whole = range(-(-first // ratio), complete // ratio)
        with self.d2h.running():
            self.d2h.wait(ready)
            if len(whole):
                source = chunk.pages[whole.start - chunk.first_page : whole.stop - chunk.first_page]
                store[whole.start : whole.stop].copy_(source, non_blocking=True)
            for begin, stop in _ends(first, complete, ratio):
                page, sub = divmod(begin, ratio)
                rows = slice(sub, sub + stop - begin)
                source = chunk.pages[page - chunk.first_page]
                for half in range(self.halves):
                    for head in range(s.kv_heads):
                        target = store[page, half, head, rows]
                        target.copy_(source[half, head, rows], non_blocking=True)
        blocks = max(complete - first, 0)
        self.traffic.d2h += blocks * self.halves * s.kv_heads * s.tile_bytes
        self.history_written[layer] = self.written[layer]
        chunk.copied = self.written[layer] = self.d2h.mark()

    def keys(self, layer: int) -> "OffloadKeys":
        return OffloadKeys(self, layer)

    # Reading back

    def windows(self, layer: int, tiles: Tensor, pages: Tensor | None) -> Iterator[Window]:
        history = self.chunk(layer).first_block
        own = self._own_tiles(layer)
        own_window = Window(
            own, range(self.shape.kv_heads), slice(history, history + own.blocks.shape[1])
        )
        if not history:
            yield Window(own, own_window.heads, None, only=True)
        elif self.gathered is not None:
            wanted = tiles[:, :history].expand(self.shape.kv_heads, -1)
            self.traffic.h2d = self.traffic.h2d + wanted.sum() * (
                self.halves * self.shape.tile_bytes
            )
            yield from self.gathered.windows(
                self._host_tiles(layer),
                wanted,
                own,
                resident=self._resident_index if self.k is not None else None,
                written=self.history_written[layer],
                stage=self.stage,
            )
        else:
            assert pages is not None
            ids = pages[: self.shape.pages(history * self.shape.block_size)]
            with self.stage("sync"):  # the copy engine is driven from the host
                ids = ids.nonzero().flatten()
                listed = ids.tolist()
            reading = self._read(self.ring.loads(layer, listed, soon=True))
            yield own_window  # while the first pages are on their way
            begin = 0
            for load, data in reading:
                yield self._ring_window(
                    layer, data, ids[begin : begin + len(load.pages)], load, history
                )
                begin += len(load.pages)

    def dense_parts(self, layer: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
        s = self.shape
        chunk = self.chunk(layer)
        history = chunk.first_block * s.block_size
        listed = range(s.pages(history))
        for load, data in self._read(
            self.ring.loads(layer, listed), self._next_layer(layer, history)
        ):
            start = load.pages[0] * s.page_size
            stop = min(start + len(load.pages) * s.page_size, history)
            parts = [_in_order(data[:, half])[:, : stop - start] for half in range(self.halves)]
            if self.k is not None:
                parts.insert(0, self.k.keys(layer, stop)[:, start:])
            yield parts[0], parts[1], False
        yield chunk.k, chunk.v, True

    def _next_layer(self, layer: int, history: int) -> list:
        """What the next layer will read, if it is at the same place in the sequence."""
        following = layer + 1
        if following == self.shape.layers:
            return []
        first = self.lengths[following] // self.shape.block_size * self.shape.block_size
        if first != history or self.lengths[following] == self.lengths[layer]:
            return []
        return self.ring.loads(following, range(self.shape.pages(history)))

    def _read(self, wanted: list, then: list | None = None):
        assert self.store is not None
        layer = wanted[0].layer if wanted else -1

        def written(of: int) -> Mark:
            # The layer being read has its chunk appended, the next one not yet.
            return self.history_written[of] if of == layer else self.written[of]

        def count(moved: int) -> None:
            self.traffic.h2d = self.traffic.h2d + moved  # not in place: others hold it

        return self.ring.read(
            self.store.data, wanted, then or [], written=written, stage=self.stage, count=count
        )

    def _ring_window(
        self, layer: int, data: Tensor, ids: Tensor, load: Any, history: int
    ) -> Window:
        """ids: the page numbers of the slot, on the device."""
        s = self.shape
        count = sum(min(s.block_size_ratio, history - p * s.block_size_ratio) for p in load.pages)
        sub = torch.arange(s.block_size_ratio, dtype=torch.int32, device=s.device)
        numbers = (ids.int()[:, None] * s.block_size_ratio + sub).flatten()[None, :count]
        numbers = numbers.expand(s.kv_heads, -1)
        place = torch.arange(count, dtype=torch.int32, device=s.device)
        v_index = page_tiles(place, s, self.halves, self._head)
        pool = data.view(-1, s.block_size, s.head_dim)
        if self.k is not None:
            tiles = KVTiles(
                self.k.pool(layer), pool, self._resident_index(numbers), v_index, numbers
            )
        else:
            half = s.kv_heads * s.block_size_ratio
            tiles = KVTiles(pool, pool, v_index, v_index + half, numbers)
        return Window(tiles, range(s.kv_heads), numbers[0])

    def _own_tiles(self, layer: int) -> KVTiles:
        """The blocks of the current chunk."""
        s = self.shape
        chunk = self.chunk(layer)
        stop = s.blocks(self.lengths[layer])
        numbers = torch.arange(chunk.first_block, stop, dtype=torch.int32, device=s.device)
        place = numbers - chunk.first_page * s.block_size_ratio
        v_index = chunk.first_tile + page_tiles(place, s, self.halves, self._head)
        numbers = numbers.expand(s.kv_heads, -1)
        if self.k is not None:
            k_index = self._resident_index(numbers)
            return KVTiles(self.k.pool(layer), self.pool, k_index, v_index, numbers)
        half = s.kv_heads * s.block_size_ratio
        return KVTiles(self.pool, self.pool, v_index, v_index + half, numbers)

    def _resident_index(self, numbers: Tensor) -> Tensor:
        return self._head * (self.capacity // self.shape.block_size) + numbers

    def _host_tiles(self, layer: int) -> Tensor:
        assert self.store is not None
        return self.store.data[layer].view(-1, self.shape.block_size, self.shape.head_dim)

    # Decode steps

    def token_places(self, layer: int) -> tuple[list[RowPlace], list[RowPlace]]:
        """The open block on the device, and the page on the host, written through."""
        s = self.shape
        assert self.store is not None
        tail = self.tail[layer].view(-1, s.head_dim)
        host = self.store.data[layer].view(-1, s.head_dim)
        rows = (self.step_slots + 1) * s.block_size

        def places(half: int) -> list[RowPlace]:
            first = (half * s.kv_heads * rows) + self.step_slots * s.block_size
            page = self.halves * s.kv_heads * s.page_size
            return [
                RowPlace(tail, span=s.block_size, piece=0, head=rows, first=first),
                RowPlace(
                    host,
                    span=s.page_size,
                    piece=page,
                    head=s.page_size,
                    first=half * s.kv_heads * s.page_size,
                ),
            ]

        if self.k is None:
            return places(0), places(1)
        k_rows = self.k.pool(layer).view(-1, s.head_dim)
        k_place = RowPlace(k_rows, span=self.capacity, piece=0, head=self.capacity, first=0)
        return [k_place], places(0)

    @property
    def token_bytes_to_host(self) -> int:
        s = self.shape
        return self.halves * s.kv_heads * s.head_dim * s.dtype.itemsize

    def geometry(self, budget: int) -> TileGeometry:
        s = self.shape
        return TileGeometry(
            block_size=s.block_size,
            ratio=s.block_size_ratio,
            halves=self.halves,
            slots=self.step_slots,
            resident_blocks=self.capacity // s.block_size if self.k is not None else 0,
        )

    def step_tiles(self, layer: int, chosen: Chosen) -> KVTiles:
        s = self.shape
        tail = self.tail[layer].view(-1, s.block_size, s.head_dim)
        with self.stage("transfer"):
            self.ops.gather_tiles(self._host_tiles(layer), chosen.source, tail, to=chosen.target)
        k_pool = self.k.pool(layer) if self.k is not None else tail
        return KVTiles(k_pool, tail, chosen.k_index, chosen.v_index, chosen.blocks)

    # Life

    def memory(self) -> Memory:
        device = {"tail": bytes_of(self.tail)}
        if self.capacity:
            device["chunks_and_windows"] = bytes_of(self.pool)
            device["ring"] = bytes_of(*(slot.data for slot in self.ring.slots))
        host = {"pages": self.store.nbytes if self.store is not None else 0}
        return Memory(device, host, digest=sum(d.nbytes for d in self.digests))

    def _settle(self) -> None:
        """Wait for every copy and for every kernel that reads host memory."""
        if self.shape.device.type == "cuda":
            torch.cuda.synchronize(self.shape.device)

    def reset(self) -> None:
        self._settle()
        super().reset()
        for kept in self.digests:
            kept.reset()
        self.digested = [0] * self.shape.layers
        self.tail[:, :, :, -1].zero_()
        self.written = [None] * self.shape.layers
        self.history_written = [None] * self.shape.layers
        if self.capacity:
            for chunk in self.chunks:
                chunk.copied = None
            self.ring.reset()
            if self.gathered is not None:
                self.gathered.reset()

    def close(self) -> None:
        self._settle()
        super().reset()
        if self.store is not None:
            self.store.close()
        self.store, self.capacity = None, 0
        self.generation += 1
        for kept in self.digests:
            kept.layers = []
        if hasattr(self, "pool"):
            del self.pool, self.chunks, self.ring, self.gathered


def window_pages(shape: CacheShape, halves: int) -> int:
    """Pages of a slot of the ring, where the sequence has as many."""
    return max(1, SLOT_BYTES // shape.page_bytes(halves))


def _ends(first: int, stop: int, ratio: int) -> Iterator[tuple[int, int]]:
    """The blocks of [first, stop) in pages that are not wholly inside, as ranges within a page."""
    block = first
    while block < stop:
        end = min(stop, (block // ratio + 1) * ratio)
        if end - block < ratio:
            yield block, end
        block = end


def _in_order(pages: Tensor) -> Tensor:
    """[pages, kv_heads, ratio, block_size, d] -> [kv_heads, tokens, d]; a copy if several pages."""
    return pages.transpose(0, 1).flatten(1, 3)


class _Chunk:
    """The current chunk of one layer, on the device, in page layout.

    tiles: its part of the engine's pool, from tile `first_tile` on; pages: the same as
    [chunk pages, halves, kv_heads, ratio, block_size, head_dim], page `first_page` of the sequence
    first. k, v: [kv_heads, n, head_dim], every token from block `first_block` on: the open block's
    older tokens and the chunk.
    """

    def __init__(self, tiles: Tensor, first_tile: int, shape: CacheShape, halves: int):
        s = self.shape = shape
        self.first_tile = first_tile
        self.pages = tiles.view(
            -1, halves, s.kv_heads, s.block_size_ratio, s.block_size, s.head_dim
        )
        self.copied: Mark = None
        self.first_page = self.first_block = 0
        self.k = self.v = tiles[:0, 0]

    def fill(self, first_block: int, k: Tensor, v: Tensor) -> None:
        s = self.shape
        self.k, self.v = k, v
        self.first_block = first_block
        self.first_page = first_block // s.block_size_ratio
        size, begin = s.page_size, first_block * s.block_size - self.first_page * s.page_size
        end = begin + k.shape[1]
        halves = (v,) if self.pages.shape[1] == 1 else (k, v)
        rows = self.pages.flatten(3, 4)  # [pages, halves, kv_heads, page_size, head_dim]
        first, last = -(-begin // size), end // size  # the whole pages, in one copy
        for half, x in enumerate(halves):
            if last > first:
                whole = x[:, first * size - begin : last * size - begin]
                rows[first:last, half] = whole.unflatten(1, (-1, size)).transpose(0, 1)
            for low, high in _ends(begin, end, size):
                page = low // size
                target = rows[page, half, :, low - page * size : high - page * size]
                target.copy_(x[:, low - begin : high - begin])
        rest = -end % s.block_size
        if rest:  # what lies behind the last token is read and masked: it must be finite
            page, row = divmod(end, size)
            rows[page, :, :, row : row + rest] = 0

    def block(self, number: int) -> Tensor:
        """[halves, kv_heads, block_size, head_dim] of one block of the sequence."""
        page, sub = divmod(number, self.shape.block_size_ratio)
        return self.pages[page - self.first_page, :, :, sub]


class OffloadKeys:
    """K of one layer as the digest shows it (the KeyView of selectors)."""

    def __init__(self, engine: OffloadEngine, layer: int):
        self.engine, self.layer = engine, layer
        self.length = engine.lengths[layer]
        self.kv_heads = engine.shape.kv_heads

    @property
    def resident(self) -> bool:
        return self.engine.k is not None

    def keys(self) -> Tensor:
        if self.engine.k is None:
            raise self._lacks("K; use pieces()")
        return self.engine.k.keys(self.layer, self.length)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        engine, s = self.engine, self.engine.shape
        if self.resident:
            yield 0, self.keys()
            return
        if isinstance(engine.digest, QuantisedK):
            yield from engine.digest.pieces(self.layer, self.length)
            return
        chunk = engine.chunk(self.layer)
        history = chunk.first_block * s.block_size
        loads = engine.ring.loads(self.layer, range(s.pages(history)), slice(0, 1))
        for load, data in engine._read(loads):
            start = load.pages[0] * s.page_size
            yield start, _in_order(data[:, 0])[:, : history - start]
        yield history, chunk.k

    def strided(self, stride: int) -> Tensor:
        digest = self.engine.digest
        if self.resident:
            return self.keys()[:, ::stride]
        if not isinstance(digest, StridedK) or digest.stride != stride:
            raise self._lacks(f"K at stride {stride}")
        return digest.keys(self.layer, self.length)

    def minmax(self, block_size: int) -> tuple[Tensor, Tensor]:
        for kept in self.engine.digests:
            if isinstance(kept, MinMax):
                return kept.bounds(self.layer, self.length)
        if self.resident:
            return block_minmax(self.keys(), block_size)
        raise self._lacks("block bounds")

    def mean(self, block_size: int) -> Tensor:
        for kept in self.engine.digests:
            if isinstance(kept, BlockMean):
                return kept.means(self.layer, self.length)
        if self.resident:
            return block_mean(self.keys(), block_size)
        raise self._lacks("block means")

    def _lacks(self, what: str) -> ValueError:
        return ValueError(f"digest={self.engine.digest.name} does not hold {what}")

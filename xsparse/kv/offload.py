"""K and V in host memory, read back as pages through a ring of device slots or as gathered tiles.

Only the current chunk, the open last block and a digest stay on the device. A chunk is copied to
the host while the next layer computes; marks per layer and per slot order the copies.
Without a CUDA device the same path runs with plain copies, counted as if they crossed a link.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from xsparse.kv import host
from xsparse.kv.digests import DIGESTS, MinMax, ResidentK, StridedK
from xsparse.kv.engine import Engine, Memory, Window
from xsparse.kv.shape import CacheShape
from xsparse.kv.streams import CopyLane, Mark, compute_mark, compute_waits
from xsparse.ops.bounds import block_minmax
from xsparse.ops.tiles import KVTiles


class OffloadEngine(Engine):
    """transfer: "ring" or "gather"; digest: a name of `kv.digests.DIGESTS`; ring_slots >= 2."""

    name = "offload"
    one_part = False

    def __init__(
        self,
        shape: CacheShape,
        *,
        transfer: str = "ring",
        ring_slots: int = 4,
        digest: str = "resident_k",
        stride: int = 8,
        gather: Callable[[Tensor, Tensor, Tensor], None] | None = None,
        limit_bytes: int | None = None,
    ):
        super().__init__(shape)
        self.transfer = transfer
        self.gather = gather
        self.limit_bytes = limit_bytes
        self.digest = DIGESTS[digest](shape, stride)
        self.store: Tensor | None = None
        self.h2d, self.d2h = CopyLane(shape.device), CopyLane(shape.device)
        s = shape
        page = (2, s.kv_heads, s.block_size_ratio, s.block_size, s.head_dim)
        # A chunk may start and end inside a page, and take an open block in front.
        chunk_pages = s.pages(s.chunk_size) + 2
        self.chunks = [_Chunk(self._zeros(chunk_pages, *page), s) for _ in range(2)]
        self.open_block = self._zeros(s.layers, 2, s.kv_heads, s.block_size, s.head_dim)
        self.slots = [_Slot(self._zeros(*page)) for _ in range(ring_slots)]
        # Behind the copies of each layer's pages to the host: all of them, and all but the last
        # chunk's, which is what history waits for.
        self.written: list[Mark] = [None] * s.layers
        self.history_written: list[Mark] = [None] * s.layers
        self.tables: _Tables | None = None
        self._gathered = self._zeros(2, 0, s.block_size, s.head_dim)

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
        fresh = host.allocate(s, capacity // s.page_size, self.limit_bytes)
        if self.store is not None and any(self.lengths):
            fresh[:, : self.store.shape[1]] = self.store
        # The digest first: if the device has no room for it, all stays as it was.
        self.digest.reserve(capacity)
        self.store, self.capacity = fresh, capacity
        self.tables = _Tables(s, capacity)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        s = self.shape
        start = self.lengths[layer]
        end = start + k.shape[1]
        self._make_room(end)
        chunk = self.chunk(layer)
        compute_waits(chunk.copied, s.device)  # its last copy to the host must have read it
        chunk.fill(start, k, v, self.open_block[layer])
        self.digest.store(layer, chunk.first_block * s.block_size, chunk.k)
        self.lengths[layer] = end
        self._save(layer, chunk, end)

    def chunk(self, layer: int) -> "_Chunk":
        return self.chunks[layer % 2]

    def _save(self, layer: int, chunk: "_Chunk", end: int) -> None:
        """Copy the chunk's complete blocks to the host; the open one stays on the device."""
        s = self.shape
        assert self.store is not None
        complete = end // s.block_size
        if end % s.block_size:
            self.open_block[layer].copy_(chunk.block(complete))
        ready = compute_mark(s.device)
        with self.d2h.running():
            self.d2h.wait(ready)
            block = chunk.first_block
            while block < complete:
                page, sub = divmod(block, s.block_size_ratio)
                stop = min(complete, (page + 1) * s.block_size_ratio)
                source = chunk.pages[page - chunk.first_page]
                target = self.store[layer, page]
                if stop - block == s.block_size_ratio:
                    target.copy_(source, non_blocking=True)
                else:
                    for half in range(2):
                        for head in range(s.kv_heads):
                            rows = slice(sub, sub + stop - block)
                            target[half, head, rows].copy_(
                                source[half, head, rows], non_blocking=True
                            )
                block = stop
        self.traffic.d2h += (complete - chunk.first_block) * s.block_size * s.token_bytes
        self.history_written[layer] = self.written[layer]
        chunk.copied = self.written[layer] = self.d2h.mark()

    def keys(self, layer: int) -> "OffloadKeys":
        return OffloadKeys(self, layer)

    # Reading back

    def windows(self, layer: int, tiles: Tensor, pages: Tensor | None) -> Iterator[Window]:
        history = self.chunk(layer).first_block
        if history:
            if self.transfer == "gather":
                yield from self._gather(layer, tiles[:, :history])
            else:
                assert pages is not None
                for page, slot in self._ring(layer, self._page_list(pages, history)):
                    yield self._page_window(layer, page, slot, history)
        yield self._chunk_window(layer)

    def dense_parts(self, layer: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
        s = self.shape
        chunk = self.chunk(layer)
        history = chunk.first_block * s.block_size
        for page, slot in self._ring(layer, list(range(s.pages(history)))):
            start = page * s.page_size
            stop = min(start + s.page_size, history)
            k, v = slot.data.view(2, s.kv_heads, s.page_size, s.head_dim)[:, :, : stop - start]
            if isinstance(self.digest, ResidentK):
                k = self.digest.keys(layer, stop)[:, start:]
            yield k, v, False
        yield chunk.k, chunk.v, True

    def _page_list(self, pages: Tensor, history: int) -> list[int]:
        """Page numbers on the host: the copy engine is driven from there."""
        count = self.shape.pages(history * self.shape.block_size)
        with self.stage("sync"):
            return pages[:count].nonzero().flatten().tolist()

    def _ring(self, layer: int, pages: list[int], halves: slice | None = None):
        """Yield (page, slot) with the next pages already on their way.

        halves: which of K and V to move; by default V only where K is resident.
        """
        if halves is None:
            halves = slice(1, 2) if isinstance(self.digest, ResidentK) else slice(0, 2)
        slots = self.slots
        ahead = len(slots) - 1
        for i in range(min(ahead, len(pages))):
            self._load(slots[i % len(slots)], layer, pages[i], halves)
        for i, page in enumerate(pages):
            if i + ahead < len(pages):
                self._load(slots[(i + ahead) % len(slots)], layer, pages[i + ahead], halves)
            slot = slots[i % len(slots)]
            compute_waits(slot.loaded, self.shape.device)
            yield page, slot
            slot.used = compute_mark(self.shape.device)

    def _load(self, slot: "_Slot", layer: int, page: int, halves: slice) -> None:
        assert self.store is not None
        with self.h2d.running():
            self.h2d.wait(slot.used)
            self.h2d.wait(self.history_written[layer])
            source = self.store[layer, page, halves]
            with self.stage("transfer"):
                slot.data[halves].copy_(source, non_blocking=True)
        slot.loaded = self.h2d.mark()
        self.traffic.h2d += source.numel() * source.element_size()

    def _page_window(self, layer: int, page: int, slot: "_Slot", history: int) -> Window:
        s = self.shape
        assert self.tables is not None
        first = page * s.block_size_ratio
        count = min(s.block_size_ratio, history - first)
        v_pool = slot.data.view(-1, s.block_size, s.head_dim)
        v_index = self.tables.in_page[1][:, :count]
        k_pool, k_index = v_pool, self.tables.in_page[0][:, :count]
        if isinstance(self.digest, ResidentK):
            k_pool, k_index = self.digest.pool(layer), self.tables.resident[page][:, :count]
        numbers = self.tables.numbers[page][:, :count]
        return Window(
            KVTiles(k_pool, v_pool, k_index, v_index, numbers), slice(first, first + count)
        )

    def _chunk_window(self, layer: int) -> Window:
        s = self.shape
        chunk = self.chunk(layer)
        blocks = s.blocks(self.lengths[layer]) - chunk.first_block
        numbers = torch.arange(
            chunk.first_block, chunk.first_block + blocks, dtype=torch.int32, device=s.device
        ).expand(s.kv_heads, -1)
        k_index = _page_tiles(numbers, chunk.first_page, s)
        pool = chunk.pages.view(-1, s.block_size, s.head_dim)
        half = s.kv_heads * s.block_size_ratio
        return Window(
            KVTiles(pool, pool, k_index, k_index + half, numbers),
            slice(chunk.first_block, chunk.first_block + blocks),
        )

    def _gather(self, layer: int, tiles: Tensor) -> Iterator[Window]:
        """One window of exactly the wanted tiles, each KV head its own.

        tiles: bool [kv_heads, history blocks]
        """
        s = self.shape
        assert self.store is not None
        assert self.gather is not None
        counts = tiles.sum(1)
        with self.stage("sync"):
            total, columns = torch.stack([counts.sum(), counts.max()]).tolist()
        if not total:
            return
        order = torch.argsort(~tiles, dim=1, stable=True)[:, :columns].to(torch.int32)
        real = torch.arange(columns, device=s.device) < counts[:, None]
        numbers = torch.where(real, order, -1)
        # Compact places in the window, head by head; what is no tile goes to one place too many.
        place = torch.where(real, real.flatten().cumsum(0).view_as(order) - 1, total)
        k_tiles = place.new_empty(total + 1, dtype=torch.int32)
        k_tiles[place.flatten()] = _page_tiles(order, 0, s).flatten()
        k_tiles, place = k_tiles[:total], place.clamp(max=total - 1).to(torch.int32)
        source = self.store[layer].view(-1, s.block_size, s.head_dim)
        half = s.kv_heads * s.block_size_ratio
        if self._gathered.shape[1] < total:  # generously, since every chunk has more history
            self._gathered = self._zeros(2, 2 * total, s.block_size, s.head_dim)
        window = self._gathered[:, :total]
        compute_waits(self.history_written[layer], s.device)
        with self.stage("transfer"):
            self.gather(source, k_tiles + half, window[1])
        k_pool, k_index, halves = window[0], place, 2
        if isinstance(self.digest, ResidentK):
            k_pool, k_index, halves = self.digest.pool(layer), self._resident_index(order), 1
        else:
            with self.stage("transfer"):
                self.gather(source, k_tiles, window[0])
        self.traffic.h2d += halves * total * s.tile_bytes
        yield Window(KVTiles(k_pool, window[1], k_index, place, numbers), None)

    def _resident_index(self, numbers: Tensor) -> Tensor:
        heads = torch.arange(self.shape.kv_heads, dtype=torch.int32, device=numbers.device)
        return heads[:, None] * (self.capacity // self.shape.block_size) + numbers

    def memory(self) -> Memory:
        def size(*tensors: Tensor) -> int:
            return sum(t.numel() * t.element_size() for t in tensors)

        device = {
            "chunks": size(*(c.pages for c in self.chunks)),
            "open_block": size(self.open_block),
            "ring": size(*(slot.data for slot in self.slots)),
            "gathered": size(self._gathered),
        }
        pages = size(self.store) if self.store is not None else 0
        return Memory(device=device, host={"pages": pages}, digest=self.digest.nbytes)

    def _settle(self) -> None:
        """Wait for every copy and for every kernel that reads host memory."""
        if self.shape.device.type == "cuda":
            torch.cuda.synchronize(self.shape.device)

    def reset(self) -> None:
        self._settle()
        super().reset()
        self.digest.reset()
        self.open_block.zero_()
        self.written = [None] * self.shape.layers
        self.history_written = [None] * self.shape.layers
        for chunk in self.chunks:
            chunk.copied = None
        for slot in self.slots:
            slot.loaded = slot.used = None

    def close(self) -> None:
        self._settle()
        super().reset()
        self.store, self.capacity, self.tables = None, 0, None
        self.digest.layers = []
        self._gathered = self._gathered[:, :0].clone()


class _Tables:
    """Where tiles lie, per page, worked out once: int32, and each page's part contiguous.

    numbers:  [pages, kv_heads, ratio] block numbers
    resident: [pages, kv_heads, ratio] tiles of K kept on the device
    in_page:  [2, kv_heads, ratio] tiles of K and of V in a slot of the ring
    """

    def __init__(self, shape: CacheShape, capacity: int):
        s = shape
        blocks = capacity // s.block_size
        heads = torch.arange(s.kv_heads, dtype=torch.int32, device=s.device)[:, None]
        sub = torch.arange(s.block_size_ratio, dtype=torch.int32, device=s.device)
        numbers = torch.arange(blocks, dtype=torch.int32, device=s.device)
        numbers = numbers.view(-1, 1, s.block_size_ratio)
        self.numbers = numbers.expand(-1, s.kv_heads, -1).contiguous()
        self.resident = self.numbers + heads * blocks
        in_page = heads * s.block_size_ratio + sub
        self.in_page = torch.stack([in_page, in_page + s.kv_heads * s.block_size_ratio])


class _Slot:
    """One page on the device. data: [2, kv_heads, ratio, block_size, head_dim]."""

    def __init__(self, data: Tensor):
        self.data = data
        self.loaded: Mark = None
        self.used: Mark = None


class _Chunk:
    """The current chunk of one layer, on the device, in page layout.

    pages: [chunk pages, 2, kv_heads, ratio, block_size, head_dim]; page `first_page` of the
    sequence comes first. k, v: [kv_heads, n, head_dim], every token from block `first_block` on:
    the open block's older tokens and the chunk.
    """

    def __init__(self, pages: Tensor, shape: CacheShape):
        self.pages = pages
        self.shape = shape
        self.copied: Mark = None
        self.first_page = self.first_block = 0
        self.k = self.v = pages[0, 0, :, 0, :0]

    def fill(self, start: int, k: Tensor, v: Tensor, open_block: Tensor) -> None:
        s = self.shape
        older = start % s.block_size
        if older:
            k = torch.cat([open_block[0, :, :older], k], 1)
            v = torch.cat([open_block[1, :, :older], v], 1)
        self.k, self.v = k, v
        self.first_block = start // s.block_size
        self.first_page = self.first_block // s.block_size_ratio
        begin = self.first_block * s.block_size - self.first_page * s.page_size
        end = begin + k.shape[1]
        # Page by page: a page is the largest piece in which tokens of one head are contiguous.
        for page in range(s.pages(end)):
            low, high = max(begin, page * s.page_size), min(end, (page + 1) * s.page_size)
            rows = slice(low - page * s.page_size, high - page * s.page_size)
            target = self.pages[page].view(2, s.kv_heads, s.page_size, s.head_dim)
            target[0, :, rows] = k[:, low - begin : high - begin]
            target[1, :, rows] = v[:, low - begin : high - begin]
        rest = -end % s.block_size
        if rest:  # what lies behind the last token is read and masked: it must be finite
            page, row = divmod(end, s.page_size)
            target = self.pages[page].view(2, s.kv_heads, s.page_size, s.head_dim)
            target[:, :, row : row + rest] = 0

    def block(self, number: int) -> Tensor:
        """[2, kv_heads, block_size, head_dim] of one block of the sequence."""
        page, sub = divmod(
            number - self.first_page * self.shape.block_size_ratio, self.shape.block_size_ratio
        )
        return self.pages[page, :, :, sub]


def _page_tiles(numbers: Tensor, first_page: int, shape: CacheShape) -> Tensor:
    """K tile of every (kv head, block number) in a pool of pages that begins at `first_page`.

    numbers: int32 [kv_heads, n]
    """
    s = shape
    page = numbers // s.block_size_ratio - first_page
    heads = torch.arange(s.kv_heads, dtype=torch.int32, device=numbers.device)[:, None]
    return (page * (2 * s.kv_heads) + heads) * s.block_size_ratio + numbers % s.block_size_ratio


class OffloadKeys:
    """K of one layer as the digest shows it (the KeyView of selectors)."""

    def __init__(self, engine: OffloadEngine, layer: int):
        self.engine, self.layer = engine, layer
        self.length = engine.lengths[layer]
        self.kv_heads = engine.shape.kv_heads

    def keys(self) -> Tensor:
        digest = self.engine.digest
        if not isinstance(digest, ResidentK):
            raise ValueError(f"digest={digest.name} does not hold K; use pieces()")
        return digest.keys(self.layer, self.length)

    @property
    def resident(self) -> bool:
        return isinstance(self.engine.digest, ResidentK)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        if self.resident:
            yield 0, self.keys()
            return
        engine, s = self.engine, self.engine.shape
        chunk = engine.chunk(self.layer)
        history = chunk.first_block * s.block_size
        for page, slot in engine._ring(self.layer, list(range(s.pages(history))), slice(0, 1)):
            start = page * s.page_size
            k = slot.data[0].view(s.kv_heads, s.page_size, s.head_dim)
            yield start, k[:, : min(s.page_size, history - start)]
        yield history, chunk.k

    def strided(self, stride: int) -> Tensor:
        digest = self.engine.digest
        if self.resident:
            return self.keys()[:, ::stride]
        if not isinstance(digest, StridedK) or digest.stride != stride:
            raise ValueError(f"digest={digest.name} does not hold K at stride {stride}")
        return digest.keys(self.layer, self.length)

    def minmax(self, block_size: int) -> tuple[Tensor, Tensor]:
        digest = self.engine.digest
        if self.resident:
            return block_minmax(self.keys(), block_size)
        if not isinstance(digest, MinMax):
            raise ValueError(f"digest={digest.name} does not hold block bounds")
        return digest.bounds(self.layer, self.length)

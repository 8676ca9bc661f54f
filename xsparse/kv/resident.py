"""All of K and V on the device, contiguous per KV head.

A layer lies as `[K|V][kv_head][block][block_size][head_dim]`, which is at once a view
`[kv_heads, tokens, head_dim]` for dense kernels and a pool of tiles for sparse ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xsparse.kv.digests import BlockMean, BlockStats, MinMax
from xsparse.kv.engine import Engine, Memory, Window, block_stats, bytes_of
from xsparse.ops.decode import Chosen, RowPlace, TileGeometry
from xsparse.ops.tiles import KVTiles
from xsparse.selectors.base import TensorKeys


class ResidentEngine(Engine):
    name = "resident"

    def __init__(self, shape, stats: str | None = None):
        super().__init__(shape, block_stats(stats, shape) if stats else None)
        self.cache: list[Tensor] = []

    @torch.inference_mode(False)  # or the cache could not be reset outside inference mode
    def reserve(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        capacity = self.shape.blocks(tokens) * self.shape.block_size
        try:
            self._grow(capacity)
            if self.stats is not None:
                self.stats.reserve(capacity)
        except BaseException:
            self.close()  # some layers are gone: without this the next sequence would miss them
            raise

    def _grow(self, capacity: int) -> None:
        s = self.shape
        fresh = []
        for layer in range(s.layers):
            # Zeros, not empty: what lies behind the last token is read and masked.
            new = torch.zeros(2, s.kv_heads, capacity, s.head_dim, dtype=s.dtype, device=s.device)
            if self.cache:
                held = self.lengths[layer]
                new[:, :, :held] = self.cache[layer][:, :, :held]
                self.cache[layer] = new[:0]
            fresh.append(new)
        self.cache, self.capacity = fresh, capacity
        self.generation += 1
        blocks = capacity // s.block_size
        numbers = torch.arange(blocks, dtype=torch.int32, device=s.device)
        heads = torch.arange(s.kv_heads, dtype=torch.int32, device=s.device)[:, None]
        k_index = heads * blocks + numbers
        # Of every block there is room for: captured graphs hold these addresses.
        self._tiles = (k_index, k_index + s.kv_heads * blocks, numbers.repeat(s.kv_heads, 1))

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        start = self.lengths[layer]
        end = start + k.shape[1]
        self.make_room(end)
        self.cache[layer][0, :, start:end] = k
        self.cache[layer][1, :, start:end] = v
        self.lengths[layer] = end
        if self.stats is not None:
            first = start // self.shape.block_size * self.shape.block_size
            self.stats.store(layer, first, self.cache[layer][0, :, first:end])

    def keys(self, layer: int) -> "ResidentKeys":
        k = self.cache[layer][0, :, : self.lengths[layer]]
        return ResidentKeys(k, self.stats, layer)

    def windows(self, layer: int, tiles: Tensor, pages: Tensor | None) -> Iterator[Window]:
        s = self.shape
        blocks = s.blocks(self.lengths[layer])
        pool = self.cache[layer].view(-1, s.block_size, s.head_dim)
        every = KVTiles(pool, pool, *(tiles[:, :blocks] for tiles in self._tiles))
        yield Window(every, range(s.kv_heads), None, only=True)

    def dense_parts(self, layer: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
        n = self.lengths[layer]
        yield self.cache[layer][0, :, :n], self.cache[layer][1, :, :n], True

    def token_places(self, layer: int) -> tuple[list[RowPlace], list[RowPlace]]:
        s, tokens = self.shape, self.capacity
        rows = self.cache[layer].view(-1, s.head_dim)

        def places(half: int) -> list[RowPlace]:
            first = half * s.kv_heads * tokens
            return [RowPlace(rows, span=tokens, piece=0, head=tokens, first=first)]

        return places(0), places(1)

    def geometry(self, budget: int) -> TileGeometry:
        """As if V alone were elsewhere: where K lies says where V lies."""
        s = self.shape
        blocks = self.capacity // s.block_size
        return TileGeometry(
            block_size=s.block_size, ratio=1, halves=1, slots=budget, resident_blocks=blocks
        )

    def all_tiles(self, layer: int) -> KVTiles:
        """Every block there is room for, as columns in order."""
        s = self.shape
        pool = self.cache[layer].view(-1, s.block_size, s.head_dim)
        return KVTiles(pool, pool, *self._tiles)

    def step_tiles(self, layer: int, chosen: Chosen) -> KVTiles:
        s = self.shape
        pool = self.cache[layer].view(-1, s.block_size, s.head_dim)
        v_index = chosen.k_index + s.kv_heads * (self.capacity // s.block_size)
        return KVTiles(pool, pool, chosen.k_index, v_index, chosen.blocks)

    def memory(self) -> Memory:
        digest = self.stats.nbytes if self.stats is not None else 0
        return Memory(device={"kv": bytes_of(*self.cache)}, digest=digest)

    def reset(self) -> None:
        super().reset()
        # A shorter sequence must not read the last one's tokens as the tail of its own last block:
        # they are masked, but a NaN there would still spread through 0 * NaN.
        for t in self.cache:
            t.zero_()
        if self.stats is not None:
            self.stats.reset()

    def close(self) -> None:
        super().reset()
        self.cache, self.capacity = [], 0
        self.generation += 1
        if self.stats is not None:
            self.stats.layers = []


@dataclass(frozen=True)
class ResidentKeys(TensorKeys):
    """K of a layer, with the statistics of blocks that the engine keeps anyway."""

    stats: BlockStats | None = None
    layer: int = 0

    def minmax(self, block_size: int) -> tuple[Tensor, Tensor]:
        if isinstance(self.stats, MinMax):
            return self.stats.bounds(self.layer, self.length)
        return super().minmax(block_size)

    def mean(self, block_size: int) -> Tensor:
        if isinstance(self.stats, BlockMean):
            return self.stats.means(self.layer, self.length)
        return super().mean(block_size)

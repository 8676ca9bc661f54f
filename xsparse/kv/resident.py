"""All of K and V on the device, contiguous per KV head.

A layer lies as `[K|V][kv_head][block][block_size][head_dim]`, which is at once a view
`[kv_heads, tokens, head_dim]` for dense kernels and a pool of tiles for sparse ones.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from xsparse.kv.engine import Engine, Memory, Window
from xsparse.ops.tiles import KVTiles
from xsparse.selectors.base import TensorKeys


class ResidentEngine(Engine):
    name = "resident"
    one_part = True

    def __init__(self, shape):
        super().__init__(shape)
        self.cache: list[Tensor] = []
        self._index: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @torch.inference_mode(False)  # or the cache could not be reset outside inference mode
    def reserve(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        capacity = self.shape.blocks(tokens) * self.shape.block_size
        try:
            self._grow(capacity)
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
        self._index.clear()

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        start = self.lengths[layer]
        end = start + k.shape[1]
        self._make_room(end)
        self.cache[layer][0, :, start:end] = k
        self.cache[layer][1, :, start:end] = v
        self.lengths[layer] = end

    def keys(self, layer: int) -> TensorKeys:
        return TensorKeys(self.cache[layer][0, :, : self.lengths[layer]])

    def windows(self, layer: int, tiles: Tensor, pages: Tensor | None) -> Iterator[Window]:
        s = self.shape
        blocks = s.blocks(self.lengths[layer])
        pool = self.cache[layer].view(-1, s.block_size, s.head_dim)
        k_index, v_index, numbers = self._indices(blocks)
        yield Window(KVTiles(pool, pool, k_index, v_index, numbers), slice(0, blocks))

    def dense_parts(self, layer: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
        n = self.lengths[layer]
        yield self.cache[layer][0, :, :n], self.cache[layer][1, :, :n], True

    def memory(self) -> Memory:
        return Memory(device={"kv": sum(t.numel() * t.element_size() for t in self.cache)})

    def reset(self) -> None:
        super().reset()
        # A shorter sequence must not read the last one's tokens as the tail of its own last block:
        # they are masked, but a NaN there would still spread through 0 * NaN.
        for t in self.cache:
            t.zero_()

    def close(self) -> None:
        self.cache, self.capacity = [], 0
        self._index.clear()

    def _indices(self, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
        if blocks not in self._index:
            if len(self._index) > 64:
                self._index.clear()
            s = self.shape
            per_head = self.capacity // s.block_size
            numbers = torch.arange(blocks, dtype=torch.int32, device=s.device)
            heads = torch.arange(s.kv_heads, dtype=torch.int32, device=s.device)[:, None]
            k_index = heads * per_head + numbers
            v_index = k_index + s.kv_heads * per_head
            self._index[blocks] = (k_index, v_index, numbers.expand(s.kv_heads, -1).contiguous())
        return self._index[blocks]

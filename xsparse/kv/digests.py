"""Digests: what stays on the device so that a selector can judge K that was offloaded.

Each digest is written when a chunk is appended and holds the whole sequence, the current chunk
included. `none` and `streamed` keep nothing; `streamed` reads K over the link at every selection.
"""

import torch
from torch import Tensor

from xsparse.kv.shape import CacheShape
from xsparse.ops.bounds import block_minmax


class Digest:
    """Keeps nothing."""

    name = "none"

    def __init__(self, shape: CacheShape, stride: int):
        self.shape = shape
        self.stride = stride
        self.layers: list[Tensor] = []

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens`, a multiple of block_size; what is held stays."""
        self.layers = [
            _grow(self.layers[i] if self.layers else None, self._size(tokens), self.shape)
            for i in range(self.shape.layers)
        ]

    def _size(self, tokens: int) -> tuple[int, ...]:
        """Size of one layer; dimension 2 is the one that grows."""
        return (0, 0, 0, 0)

    def store(self, layer: int, start: int, k: Tensor) -> None:
        """k: [kv_heads, n, head_dim], the tokens from position `start` on; `start` is the first
        position of a block, so blocks are rewritten whole as they fill."""

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.layers)

    def reset(self) -> None:
        for t in self.layers:
            t.zero_()


class Streamed(Digest):
    name = "streamed"


class ResidentK(Digest):
    """K itself: exact, and only V has to move."""

    name = "resident_k"

    def _size(self, tokens: int) -> tuple[int, ...]:
        return (1, self.shape.kv_heads, tokens, self.shape.head_dim)

    def store(self, layer: int, start: int, k: Tensor) -> None:
        self.layers[layer][0, :, start : start + k.shape[1]] = k

    def keys(self, layer: int, length: int) -> Tensor:
        return self.layers[layer][0, :, :length]

    def pool(self, layer: int) -> Tensor:
        s = self.shape
        return self.layers[layer].view(-1, s.block_size, s.head_dim)


class StridedK(Digest):
    """Every stride-th K."""

    name = "strided_k"

    def _size(self, tokens: int) -> tuple[int, ...]:
        return (1, self.shape.kv_heads, tokens // self.stride, self.shape.head_dim)

    def store(self, layer: int, start: int, k: Tensor) -> None:
        rows = k[:, :: self.stride]  # start is a multiple of block_size, hence of the stride
        first = start // self.stride
        self.layers[layer][0, :, first : first + rows.shape[1]] = rows

    def keys(self, layer: int, length: int) -> Tensor:
        return self.layers[layer][0, :, : -(-length // self.stride)]


class MinMax(Digest):
    """Smallest and largest K of each block, per feature (Quest, arXiv 2406.10774)."""

    name = "minmax"

    def _size(self, tokens: int) -> tuple[int, ...]:
        s = self.shape
        return (2, s.kv_heads, tokens // s.block_size, s.head_dim)

    def store(self, layer: int, start: int, k: Tensor) -> None:
        low, high = block_minmax(k, self.shape.block_size)
        first = start // self.shape.block_size
        self.layers[layer][0, :, first : first + low.shape[1]] = low
        self.layers[layer][1, :, first : first + high.shape[1]] = high

    def bounds(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        blocks = self.shape.blocks(length)
        return self.layers[layer][0, :, :blocks], self.layers[layer][1, :, :blocks]


DIGESTS = {d.name: d for d in (Digest, Streamed, ResidentK, StridedK, MinMax)}


def _grow(old: Tensor | None, size: tuple[int, ...], shape: CacheShape) -> Tensor:
    new = torch.zeros(size, dtype=shape.dtype, device=shape.device)
    if old is not None:
        kept = min(old.shape[2], new.shape[2])
        new[:, :, :kept] = old[:, :, :kept]
    return new

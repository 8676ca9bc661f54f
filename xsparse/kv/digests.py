"""Digests: what stays on the device so that a selector can judge K that was offloaded.

Each digest is written when a chunk is appended and holds the whole sequence, the current chunk
included. `none` and `streamed` keep nothing; `streamed` reads K over the link at every selection.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from xsparse.kv.shape import CacheShape
from xsparse.ops.bounds import block_mean, block_minmax

FORMATS = ("int8", "int4", "fp8")
PIECE_TOKENS = 1 << 14  # dequantised at once
_WIDTH = {"int8": 255, "int4": 15, "fp8": 2 * 448}  # from the smallest code to the largest

Part = tuple[tuple[int, ...], torch.dtype]  # size and dtype of a tensor; dimension 2 grows


class Digest:
    """Keeps nothing.

    stride: tokens per key that strided_k keeps; format: one of FORMATS, how quantised_k keeps K
    """

    name: ClassVar[str] = "none"

    def __init__(self, shape: CacheShape, stride: int, format: str = "int8"):
        self.shape = shape
        self.stride = stride
        self.format = format
        self.layers: list[tuple[Tensor, ...]] = []

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens`, a multiple of block_size; what is held stays.

        If the device has no room (torch.OutOfMemoryError), all is as it was.
        """
        parts = self._parts(tokens)
        device = self.shape.device
        fresh = [
            tuple(torch.zeros(size, dtype=dtype, device=device) for size, dtype in parts)
            for _ in range(self.shape.layers)
        ]
        for old, new in zip(self.layers, fresh, strict=False):  # no layers before the first time
            for a, b in zip(old, new, strict=True):
                kept = min(a.shape[2], b.shape[2])
                b[:, :, :kept] = a[:, :, :kept]
        self.layers = fresh

    def _parts(self, tokens: int) -> tuple[Part, ...]:
        """The tensors of one layer."""
        return ()

    def store(self, layer: int, start: int, k: Tensor) -> None:
        """k: [kv_heads, n, head_dim], the tokens from position `start` on; `start` is the first
        position of a block, so blocks are rewritten whole as they fill."""

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for parts in self.layers for t in parts)

    def reset(self) -> None:
        for parts in self.layers:
            for t in parts:
                t.zero_()


class Streamed(Digest):
    name = "streamed"


class ResidentK(Digest):
    """K itself: exact, and only V has to move."""

    name = "resident_k"

    def _parts(self, tokens: int) -> tuple[Part, ...]:
        s = self.shape
        return (((1, s.kv_heads, tokens, s.head_dim), s.dtype),)

    def store(self, layer: int, start: int, k: Tensor) -> None:
        self.layers[layer][0][0, :, start : start + k.shape[1]] = k

    def keys(self, layer: int, length: int) -> Tensor:
        return self.layers[layer][0][0, :, :length]

    def pool(self, layer: int) -> Tensor:
        s = self.shape
        return self.layers[layer][0].view(-1, s.block_size, s.head_dim)


class StridedK(Digest):
    """Every stride-th K."""

    name = "strided_k"

    def _parts(self, tokens: int) -> tuple[Part, ...]:
        s = self.shape
        return (((1, s.kv_heads, tokens // self.stride, s.head_dim), s.dtype),)

    def store(self, layer: int, start: int, k: Tensor) -> None:
        rows = k[:, :: self.stride]  # start is a multiple of block_size, hence of the stride
        first = start // self.stride
        self.layers[layer][0][0, :, first : first + rows.shape[1]] = rows

    def keys(self, layer: int, length: int) -> Tensor:
        return self.layers[layer][0][0, :, : -(-length // self.stride)]


class BlockStats(Digest):
    """Numbers per block and feature. They may be kept beside a digest that holds K itself, and
    decode kernels rewrite the open block's in place."""

    def stats(self, layer: int) -> Tensor:
        """[numbers, kv_heads, blocks there is room for, head_dim]"""
        return self.layers[layer][0]

    def _of(self, k: Tensor) -> tuple[Tensor, ...]:
        """k: [kv_heads, n, head_dim]; returns each number, [kv_heads, blocks, head_dim]."""
        raise NotImplementedError

    def store(self, layer: int, start: int, k: Tensor) -> None:
        first = start // self.shape.block_size
        for target, numbers in zip(self.stats(layer), self._of(k), strict=True):
            target[:, first : first + numbers.shape[1]] = numbers


class MinMax(BlockStats):
    """Smallest and largest K of each block, per feature (Quest, arXiv 2406.10774)."""

    name = "minmax"

    def _parts(self, tokens: int) -> tuple[Part, ...]:
        s = self.shape
        return (((2, s.kv_heads, tokens // s.block_size, s.head_dim), s.dtype),)

    def _of(self, k: Tensor) -> tuple[Tensor, ...]:
        return block_minmax(k, self.shape.block_size)

    def bounds(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        low, high = self.stats(layer)[:, :, : self.shape.blocks(length)]
        return low, high


class BlockMean(BlockStats):
    """Mean K of each block (FlashPrefill). In fp32: a decode step updates it in place."""

    name = "block_mean"

    def _parts(self, tokens: int) -> tuple[Part, ...]:
        s = self.shape
        return (((1, s.kv_heads, tokens // s.block_size, s.head_dim), torch.float32),)

    def _of(self, k: Tensor) -> tuple[Tensor, ...]:
        return (block_mean(k, self.shape.block_size),)

    def means(self, layer: int, length: int) -> Tensor:
        return self.stats(layer)[0, :, : self.shape.blocks(length)]


class QuantisedK(Digest):
    """K in 8 or 4 bits a number: k = zero + scale x code, zero and scale per block and feature.

    Features of K differ in size and are off-centre while the tokens of one are alike (KIVI,
    arXiv 2402.02750), so each range is that of one feature in one block, wherever it lies.

        int8, int4   codes 0 .. 255 or 15; zero is the smallest number of the range
        fp8          codes are float8_e4m3fn, -448 .. 448; zero is the middle of the range

    Two tensors per layer: codes, bytes [1, kv_heads, tokens, head_dim], for int4 half as many,
    feature c in the low and c + head_dim / 2 in the high bits of byte c; and ranges, zero and
    scale, fp32 [2, kv_heads, blocks, head_dim].
    """

    name = "quantised_k"

    def __init__(self, shape: CacheShape, stride: int, format: str = "int8"):
        super().__init__(shape, stride, format)
        if format not in FORMATS:
            raise ValueError(f"format={format}: allowed is {' | '.join(FORMATS)}")
        if format == "int4" and shape.head_dim % 2:
            raise ValueError(f"format=int4: head_dim={shape.head_dim}, allowed is an even number")

    def _parts(self, tokens: int) -> tuple[Part, ...]:
        s = self.shape
        width = s.head_dim // 2 if self.format == "int4" else s.head_dim
        return (
            ((1, s.kv_heads, tokens, width), torch.uint8),
            ((2, s.kv_heads, tokens // s.block_size, s.head_dim), torch.float32),
        )

    def store(self, layer: int, start: int, k: Tensor) -> None:
        size, n = self.shape.block_size, k.shape[1]
        k = k.float()
        low, high = block_minmax(k, size)
        zero = (low + high) / 2 if self.format == "fp8" else low
        # A feature that is constant in a block has no range: its code is 0 whatever the scale.
        scale = ((high - low) / _WIDTH[self.format]).clamp_min(torch.finfo(torch.float32).tiny)
        token_zero, token_scale = (t.repeat_interleave(size, 1)[:, :n] for t in (zero, scale))
        codes, ranges = self.layers[layer]
        codes[0, :, start : start + n] = self._encode((k - token_zero) / token_scale)
        first = start // size
        ranges[0, :, first : first + zero.shape[1]] = zero
        ranges[1, :, first : first + zero.shape[1]] = scale

    def pieces(self, layer: int, length: int) -> Iterator[tuple[int, Tensor]]:
        """(position of the first token, k [kv_heads, n, head_dim]) in order, in the cache's dtype.

        n is at most PIECE_TOKENS (or one block), so the room this needs does not grow with length.
        """
        size, blocks = self.shape.block_size, self.shape.blocks(length)
        step = max(1, PIECE_TOKENS // size)
        codes, ranges = self.layers[layer]
        for first in range(0, blocks, step):
            last = min(first + step, blocks)
            start = first * size
            zero, scale = ranges[:, :, first:last, None]
            k = self._decode(codes[0, :, start : last * size]).unflatten(1, (-1, size))
            k = k.mul_(scale).add_(zero).to(self.shape.dtype).flatten(1, 2)
            yield start, k[:, : length - start]

    def _encode(self, x: Tensor) -> Tensor:
        """x: fp32 in the range of the codes"""
        if self.format == "fp8":
            return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        codes = x.round().clamp(0, _WIDTH[self.format]).to(torch.uint8)
        if self.format == "int8":
            return codes
        low, high = codes.chunk(2, -1)
        return low | high << 4

    def _decode(self, codes: Tensor) -> Tensor:
        """fp32, a tensor of its own"""
        if self.format == "fp8":
            return codes.view(torch.float8_e4m3fn).float()
        if self.format == "int4":
            codes = torch.cat([codes & 15, codes >> 4], -1)
        return codes.float()


DIGESTS = {
    d.name: d for d in (Digest, Streamed, ResidentK, StridedK, MinMax, BlockMean, QuantisedK)
}

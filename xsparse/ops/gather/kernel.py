"""Gather tiles by index, also straight from pinned host memory.

A kernel can read pinned host memory through its ordinary address. That reaches the speed of the
copy engine for tiles of any size, needs no host read of the index, and works inside a CUDA graph.
A few programs saturate the link, which leaves the GPU to whatever runs beside it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 32
WARPS = 8
WORDS = 4096
"""4-byte words a program moves at once: enough requests in flight to hide the link's latency."""


def gather_tiles(
    source: Tensor,
    index: Tensor,
    out: Tensor,
    *,
    to: Tensor | None = None,
    count: Tensor | None = None,
    programs: int = PROGRAMS,
) -> None:
    """out[to[i]] = source[index[i]], or out[i] without `to`; a negative index moves nothing,
    nor does what lies behind the first `count`.

    source: [tiles, block_size, head_dim], contiguous, on the device of `out` or in pinned host
    memory; index, to: int [n] and count: int [1], on the device; out: [n or more, block_size,
    head_dim], contiguous
    """
    if source.device.type == "cpu" and out.device.type == "cuda" and not source.is_pinned():
        raise ValueError("gather_tiles reads host memory only where it is pinned")
    if source.shape[1:] != out.shape[1:] or source.dtype != out.dtype:
        raise ValueError(
            f"tiles of source {tuple(source.shape[1:])} {source.dtype} and out"
            f" {tuple(out.shape[1:])} {out.dtype} differ"
        )
    if not (source.is_contiguous() and out.is_contiguous()):
        raise ValueError("gather_tiles needs contiguous source and out")
    if not out.numel() or not len(index):
        return
    source_words = source.view(len(source), -1).view(torch.int32)
    out_words = out.view(len(out), -1).view(torch.int32)
    _gather_kernel[(programs,)](
        source_words,
        index,
        to,
        count,
        out_words,
        len(index),
        out_words.shape[1],
        WORDS=WORDS,
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["tiles"])
def _gather_kernel(source, index, to, count, out, tiles, words, WORDS: tl.constexpr):
    if count is not None:  # tiles of the list that are not there cost no look at each
        tiles = tl.minimum(tiles, tl.load(count).to(tl.int32))
    parts = tl.cdiv(words, WORDS)
    for i in range(tl.program_id(0), tiles * parts, tl.num_programs(0)):
        tile = i // parts
        word = (i % parts) * WORDS + tl.arange(0, WORDS)
        row = tl.load(index + tile).to(tl.int64)
        inside = word < tl.where(row >= 0, words, 0)
        data = tl.load(source + row * words + word, mask=inside)
        place = tile if to is None else tl.load(to + tile)
        tl.store(out + place.to(tl.int64) * words + word, data, mask=inside)

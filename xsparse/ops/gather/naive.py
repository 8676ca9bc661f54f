"""Gathering tiles with an indexed copy."""

import torch
from torch import Tensor


def gather_tiles(source: Tensor, index: Tensor, out: Tensor) -> None:
    """out[i] = source[index[i]].

    source: [tiles, block_size, head_dim], on the device of `out` or on the host; index: int [n];
    out: [n, block_size, head_dim], contiguous. Reading the host from a GPU this way waits for the
    index; the Triton form does not.
    """
    if source.device == out.device:
        torch.index_select(source, 0, index.to(source.device), out=out)
    else:
        out.copy_(source.index_select(0, index.to(source.device)))

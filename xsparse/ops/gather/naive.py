"""Gathering tiles with an indexed copy."""

import torch
from torch import Tensor


def gather_tiles(
    source: Tensor,
    index: Tensor,
    out: Tensor,
    *,
    to: Tensor | None = None,
    count: Tensor | None = None,
    programs: int | None = None,
) -> None:
    """out[to[i]] = source[index[i]], or out[i] without `to`; a negative index moves nothing,
    nor does what lies behind the first `count`.

    source: [tiles, block_size, head_dim], on the device of `out` or on the host; index, to: int
    [n]; count: int [1]; out: [n or more, block_size, head_dim]. Reading the host from a GPU this
    way waits for the index; the Triton form does not, and it alone has programs.
    """
    if not len(index):
        return
    index = index.to(source.device)
    if to is None:
        to = torch.arange(len(index), device=source.device)
    moves = index >= 0
    if count is not None:
        moves &= torch.arange(len(index), device=source.device) < count.to(source.device)
        index = index.masked_fill(~moves, -1)
    if source.is_cuda:
        # Without reading the device: what does not move repeats the first that does.
        order = torch.arange(len(index), device=source.device)
        entry = torch.where(moves, order, moves.int().argmax())
        index, to = index[entry], to[entry].long()
        tiles = source.index_select(0, index.clamp(min=0))
        tiles = torch.where((index >= 0)[:, None, None], tiles, out.index_select(0, to))
    else:
        index, to = index[moves], to.to(source.device)[moves].long().to(out.device)
        tiles = source.index_select(0, index).to(out.device)
    out.index_copy_(0, to, tiles)

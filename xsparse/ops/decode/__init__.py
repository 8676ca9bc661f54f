"""One decode step with its position on the device, so that one CUDA graph can hold all of it.

The step writes the new token where K and V live (`put_token`), keeps what is known of its block up
to date (`fold_token`), scores the complete blocks (`step_scores`), picks a budget of them per KV
head and says which tiles must move into a small cache (`choose_tiles`), which `gather_tiles` then
moves. Nothing here reads the device from the host, and launches depend on shapes only.

`position` is int64 [1] on the device: the position of the token being decoded, counted from 0. Its
block is the open block; the blocks before it are complete. Who drives the step sees to it that the
position lies within the capacity of every tensor, which no kernel can report.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("minmax", "block_mean")
"""Statistics of a block: its smallest and largest key per feature (Quest, arXiv 2406.10774), or
the mean of its keys."""


@dataclass(frozen=True)
class RowPlace:
    """Where the rows of tokens lie in a pool.

    rows: [n, head_dim], contiguous, on the device or in pinned host memory. The row of (KV head h,
    position p) is first + (p // span) * piece + h * head + p % span: with these four an open tile,
    a paged store and a contiguous cache are the same thing.
    """

    rows: Tensor
    span: int
    piece: int
    head: int
    first: int

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or not self.rows.is_contiguous():
            raise ValueError(
                f"rows of shape {tuple(self.rows.shape)}: allowed is contiguous [n, d]"
            )


@dataclass(frozen=True)
class TileGeometry:
    """How tiles are numbered in the store on the host, in the cache and in resident K.

    block_size: tokens; ratio: blocks per page of the store; halves: 2 where K and V lie on the
    host, 1 where K is resident and V alone does; slots: tiles cached per (KV head, half), the open
    block's not counted; resident_blocks: blocks of capacity per KV head of resident K

    With H KV heads and t the half (0 is K and 1 is V, or 0 is V where it is alone):

        store     block b of head h    ((b // ratio) * halves * H + t * H + h) * ratio + b % ratio
        cache     slot m of head h     (t * H + h) * (slots + 1) + m;  m = slots: the open block
        resident  block b of head h    h * resident_blocks + b
    """

    block_size: int
    ratio: int
    halves: int
    slots: int
    resident_blocks: int = 0

    def __post_init__(self) -> None:
        if self.halves not in (1, 2):
            raise ValueError(f"halves={self.halves}: allowed is 1 | 2")
        for name in ("block_size", "ratio", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is >= 1")
        if (self.halves == 1) != (self.resident_blocks > 0):
            raise ValueError(
                f"resident_blocks={self.resident_blocks} with halves={self.halves}: allowed is > 0"
                " where K is resident (halves=1) and 0 where it is not"
            )


@dataclass(frozen=True)
class Chosen:
    """What a step reads and what must move before it can; B blocks per KV head at most.

    Columns are the n chosen blocks in ascending order, then the open block, then unused ones.

    blocks: int32 [kv_heads, B + 1], block numbers, -1 where unused
    k_index, v_index: int32 [kv_heads, B + 1], tile of each column, 0 where unused
    counts: int32 [q_heads, 1], n + 1
    source: int32 [halves * kv_heads * B], tile of the store to be moved, -1 where none is
    target: int32 like source, the tile of the cache it goes to, 0 where none does
    moved: int64 [1], tiles moved so far; steps add to it
    """

    blocks: Tensor
    k_index: Tensor
    v_index: Tensor
    counts: Tensor
    source: Tensor
    target: Tensor
    moved: Tensor

    @classmethod
    def allocate(
        cls, q_heads: int, kv_heads: int, budget: int, halves: int, device: str | torch.device
    ) -> "Chosen":
        """Outputs for at most `budget` complete blocks per KV head."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        columns, tiles = (kv_heads, budget + 1), halves * kv_heads * budget
        return cls(
            zeros(*columns),
            zeros(*columns),
            zeros(*columns),
            zeros(q_heads, 1),
            zeros(tiles),
            zeros(tiles),
            zeros(1, dtype=torch.int64),
        )

    @property
    def budget(self) -> int:
        return self.blocks.shape[1] - 1


def empty_state(kv_heads: int, slots: int, device: str | torch.device) -> Tensor:
    """A cache that holds nothing: int32 [2, kv_heads, slots], the block of each slot and the
    position at which it was last chosen. Filling it with -1 empties it again."""
    return torch.full((2, kv_heads, slots), -1, dtype=torch.int32, device=device)


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind={kind}: allowed is {' | '.join(KINDS)}")


def check_places(k_places: Sequence[RowPlace], v_places: Sequence[RowPlace]) -> None:
    most = max(len(k_places), len(v_places))
    if most > 2:
        raise ValueError(f"{most} places of one tensor: allowed is at most 2")


def check_budget(out: Chosen, geometry: TileGeometry) -> None:
    if geometry.slots < out.budget:
        raise ValueError(
            f"slots={geometry.slots}: allowed is >= {out.budget}, the blocks of a step"
        )

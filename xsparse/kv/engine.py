"""What every KV engine offers.

An engine keeps K and V of one sequence. `append` takes a chunk, `keys` shows K to a selector,
`windows` and `dense_parts` hand out what attention reads, piece by piece; the pieces of one call
are disjoint and their union is what was asked for. `token_places`, `geometry` and `step_tiles`
serve decode steps whose position lives on the device. An engine never knows which method selected.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from xsparse.kv.digests import DIGESTS, BlockStats
from xsparse.kv.shape import CacheShape
from xsparse.ops.decode import Chosen, RowPlace, TileGeometry
from xsparse.ops.tiles import KVTiles
from xsparse.selectors.base import KeyView


@dataclass(frozen=True)
class Window:
    """K and V of some blocks, ready to be read.

    tiles:   the columns, for the KV heads of this window
    heads:   these KV heads, as a range
    columns: the blocks that are the columns, a range or int [columns]; None: column i is block i of
             the sequence, with -1 in `tiles.blocks` where it is not in this window
    only:    nothing else is read for these heads, so there is nothing to merge with
    """

    tiles: KVTiles
    heads: range
    columns: slice | Tensor | None = None
    only: bool = False

    def rows(self, group: int) -> slice:
        """The query heads, `group` for each KV head."""
        return slice(self.heads.start * group, self.heads.stop * group)

    def mask(self, executed: Tensor, group: int) -> Tensor:
        """The window's part of a mask.

        executed: bool [q_heads, q_blocks, k_blocks] -> bool [window's heads, q_blocks, columns]
        """
        rows = executed[self.rows(group)]
        if isinstance(self.columns, slice):
            return rows[:, :, self.columns]
        if self.columns is not None:
            return rows.index_select(2, self.columns)
        return rows & (self.tiles.blocks >= 0).repeat_interleave(group, 0)[:, None]


@dataclass
class Traffic:
    """Bytes that crossed between host and device, as if moved where both are one. A tensor where
    only the device knows."""

    h2d: int | Tensor = 0
    d2h: int | Tensor = 0


@dataclass
class Memory:
    """Bytes of every buffer an engine holds, by name."""

    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    digest: int = 0


def bytes_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def block_stats(kind: str, shape: CacheShape) -> BlockStats:
    """kind: "minmax" or "block_mean"."""
    stats = DIGESTS[kind](shape, 1)
    assert isinstance(stats, BlockStats)
    return stats


class Engine(ABC):
    """K and V of one sequence.

    stats: statistics of K per block, where decode or a selector judges blocks by them
    """

    name: str

    def __init__(self, shape: CacheShape, stats: BlockStats | None = None):
        self.shape = shape
        self.stats = stats
        self.lengths = [0] * shape.layers
        self.traffic = Traffic()
        self.capacity = 0
        self.generation = 0  # of the buffers: whoever holds their addresses must look again
        self.sequence = 0  # how many were forgotten so far: whoever continues one must look again
        # Who times the engine sets this; stages are "transfer" and "sync".
        self.stage: Callable[[str], AbstractContextManager] = lambda name: nullcontext()

    @property
    def length(self) -> int:
        """Tokens held by every layer."""
        return self.lengths[-1]

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in all, no more than whole pages need.

        Raises MemoryError naming GB needed and available.
        """

    def make_room(self, end: int) -> None:
        """Before appending up to `end`: where nobody reserved, capacity doubles if it may."""
        if self.capacity < end < 2 * self.capacity:
            try:
                return self.reserve(2 * self.capacity)
            except MemoryError:  # refused before anything was touched
                pass
        self.reserve(end)

    @abstractmethod
    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add a chunk. k, v: [kv_heads, C, head_dim]."""

    @abstractmethod
    def keys(self, layer: int) -> KeyView:
        """K of the layer, the last chunk included."""

    @abstractmethod
    def windows(self, layer: int, tiles: Tensor, pages: Tensor | None) -> Iterator[Window]:
        """Everything of `tiles` and the chunk's own blocks.

        tiles: bool [kv_heads or 1, k_blocks]; pages: bool [pages] where whole pages move
        """

    @abstractmethod
    def dense_parts(self, layer: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """K, V [kv_heads, n, head_dim] in order, and whether causality cuts the part."""

    # Decode steps. Nothing below reads the length: a captured graph replays it for later tokens.

    @abstractmethod
    def token_places(self, layer: int) -> tuple[list[RowPlace], list[RowPlace]]:
        """Where K and where V of one more token are written."""

    @property
    def token_bytes_to_host(self) -> int:
        """Bytes one token of one layer sends to the host."""
        return 0

    def begin_steps(self) -> None:
        """Before the first layer of a step, never inside a captured graph: what appended tokens
        left to do must not overtake the steps."""
        return  # where nothing is copied beside the computation

    def advance(self, layer: int, tokens: int = 1) -> None:
        """Say that tokens have been put at `token_places`."""
        self.lengths[layer] += tokens
        self.traffic.d2h += tokens * self.token_bytes_to_host

    @abstractmethod
    def geometry(self, budget: int) -> TileGeometry:
        """How `choose_tiles` numbers this engine's tiles when it picks up to `budget` blocks."""

    @abstractmethod
    def step_tiles(self, layer: int, chosen: Chosen) -> KVTiles:
        """K and V of the chosen blocks, fetched if need be."""

    @abstractmethod
    def memory(self) -> Memory: ...

    def reset(self) -> None:
        """Forget the sequence; buffers stay."""
        self.lengths = [0] * self.shape.layers
        self.traffic = Traffic()
        self.sequence += 1

    @abstractmethod
    def close(self) -> None:
        """Give every buffer that grows with the sequence back."""

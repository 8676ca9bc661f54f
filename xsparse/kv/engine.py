"""What every KV engine offers.

An engine keeps K and V of one sequence. `append` takes a chunk, `keys` shows K to a selector,
`windows` and `dense_parts` hand out what attention reads, piece by piece; the pieces of one call
are disjoint and their union is what was asked for. An engine never knows which method selected.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from xsparse.kv.shape import CacheShape
from xsparse.ops.tiles import KVTiles
from xsparse.selectors.base import KeyView


@dataclass(frozen=True)
class Window:
    """K and V of some blocks, ready to be read.

    tiles: columns of the window
    span:  the columns as a contiguous range of blocks, or None where KV heads differ
    """

    tiles: KVTiles
    span: slice | None

    def mask(self, executed: Tensor) -> Tensor:
        """The window's columns of a mask.

        executed: bool [q_heads, q_blocks, k_blocks] -> bool [q_heads, q_blocks, columns]
        """
        if self.span is not None:
            return executed[:, :, self.span]
        q_heads, q_blocks, _ = executed.shape
        blocks = self.tiles.blocks.long()
        blocks = blocks.repeat_interleave(q_heads // blocks.shape[0], 0)[:, None, :]
        kept = executed.gather(2, blocks.clamp(min=0).expand(-1, q_blocks, -1))
        return kept & (blocks >= 0)


@dataclass
class Traffic:
    """Bytes that crossed between host and device; counted as if moved where both are one."""

    h2d: int = 0
    d2h: int = 0


@dataclass
class Memory:
    """Bytes of every buffer an engine holds, by name."""

    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    digest: int = 0


class Engine(ABC):
    """K and V of one sequence."""

    name: str
    one_part: bool  # windows and dense_parts always hand out a single part

    def __init__(self, shape: CacheShape):
        self.shape = shape
        self.lengths = [0] * shape.layers
        self.traffic = Traffic()
        self.capacity = 0
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

    def _make_room(self, end: int) -> None:
        """Before appending up to `end`: where nobody reserved, capacity doubles."""
        if end > self.capacity:
            self.reserve(max(end, 2 * self.capacity))

    @abstractmethod
    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add a chunk. k, v: [kv_heads, C, head_dim]."""

    @abstractmethod
    def keys(self, layer: int) -> KeyView:
        """K of the layer, the last chunk included."""

    @abstractmethod
    def windows(self, layer: int, tiles: Tensor, pages: Tensor | None) -> Iterator[Window]:
        """Everything of `tiles` in windows, the current chunk's own blocks last.

        tiles: bool [kv_heads or 1, k_blocks]; pages: bool [pages] where whole pages move
        """

    @abstractmethod
    def dense_parts(self, layer: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """K, V [kv_heads, n, head_dim] in order, and whether causality cuts the part."""

    @abstractmethod
    def memory(self) -> Memory: ...

    def reset(self) -> None:
        """Forget the sequence; buffers stay."""
        self.lengths = [0] * self.shape.layers
        self.traffic = Traffic()

    @abstractmethod
    def close(self) -> None:
        """Give every buffer of the sequence back."""

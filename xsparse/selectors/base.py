"""What a selection method is, and how it sees K.

A selector turns the queries of a chunk and a view of K into a mask over blocks. It knows nothing
of where K lies: a `KeyView` shows it whole, piece by piece or as a digest, and refuses what it
does not have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from xsparse.selectors.threshold import Thresholds


class KeyView(Protocol):
    """K of one layer after RoPE: history and, last, the current chunk."""

    @property
    def length(self) -> int:
        """Tokens N, the current chunk included."""
        ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def resident(self) -> bool:
        """Whether keys() works."""
        ...

    def keys(self) -> Tensor:
        """[kv_heads, N, d]. Raises ValueError where K is not on the device."""
        ...

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """(position of the first token, k [kv_heads, n, d]) in order, anew with every call."""
        ...

    def strided(self, stride: int) -> Tensor:
        """[kv_heads, ceil(N / stride), d], the keys at multiples of the stride."""
        ...

    def minmax(self, block_size: int) -> tuple[Tensor, Tensor]:
        """Smallest and largest key of each block, per feature: [kv_heads, blocks, d] twice."""
        ...

    def mean(self, block_size: int) -> Tensor:
        """Mean key of each block, fp32 [kv_heads, blocks, d]."""
        ...


@dataclass(frozen=True)
class TensorKeys:
    """The KeyView of one tensor that holds all of K. k: [kv_heads, N, d]"""

    k: Tensor
    resident = True

    @property
    def length(self) -> int:
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[0]

    def keys(self) -> Tensor:
        return self.k

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.k

    def strided(self, stride: int) -> Tensor:
        return self.k[:, ::stride]

    def minmax(self, block_size: int) -> tuple[Tensor, Tensor]:
        from xsparse.ops.bounds import block_minmax

        return block_minmax(self.k, block_size)

    def mean(self, block_size: int) -> Tensor:
        from xsparse.ops.bounds import block_mean

        return block_mean(self.k, block_size)


@dataclass(frozen=True)
class Site:
    """Where in the model and in the sequence a selection happens.

    q_start: position of the chunk's first query; scaling: the model's factor of its logits;
    ops: the operators, see `xsparse.ops.get`
    """

    layer: int
    q_start: int
    block_size: int
    scaling: float
    ops: Any

    @property
    def first_block(self) -> int:
        return self.q_start // self.block_size


@dataclass(frozen=True)
class Selection:
    """mask: bool [q_heads, q_blocks, k_blocks]; scores: like it, mass per block, or None"""

    mask: Tensor
    scores: Tensor | None = None


class Selector(ABC):
    """A selection method: a dataclass of its parameters.

    digests:       where K of offloaded history may be found (docs/selectors.md)
    has_scores:    select returns scores, so the reduction `mean_score` works
    keep_all:      parameters with which every causal block is kept
    dense:         everything is kept whatever the parameters; engines then skip selection
    """

    name: ClassVar[str]
    digests: ClassVar[tuple[str, ...]]
    has_scores: ClassVar[bool] = True
    keep_all: ClassVar[dict[str, Any]] = {}
    dense: ClassVar[bool] = False

    @abstractmethod
    def select(self, q: Tensor, keys: KeyView, site: Site) -> Selection:
        """q: [q_heads, C, d]; the mask has a row per block of the sequence the chunk touches."""

    def threshold_of(self, layer: int) -> float | Tensor:
        """The share of mass a row must keep; 1 for a method without a threshold."""
        return 1.0


@dataclass
class MassSelector(Selector):
    """A method that scores blocks with attention mass and keeps the best up to a share of it.

    threshold: in [0, 1], or "@file.json" with one per layer and query head
    """

    threshold: Any = 0.9
    thresholds: Thresholds = field(init=False, repr=False, compare=False)
    keep_all: ClassVar[dict[str, Any]] = {"threshold": 1.0}

    def __post_init__(self) -> None:
        from xsparse.selectors import threshold

        self.thresholds = threshold.parse(self.threshold)

    @abstractmethod
    def scores(self, q: Tensor, keys: KeyView, site: Site) -> Tensor:
        """Mass per block [q_heads, q_blocks, k_blocks], 0 above the diagonal."""

    def select(self, q: Tensor, keys: KeyView, site: Site) -> Selection:
        scores = self.scores(q, keys, site)
        threshold = self.thresholds.for_layer(site.layer, scores.device)
        mask = site.ops.select_blocks(scores, threshold, q_block_start=site.first_block)
        return Selection(mask, scores)

    def threshold_of(self, layer: int) -> float | Tensor:
        return self.thresholds.for_layer(layer)


def check_stride(stride: int, block_size: int | None = None) -> None:
    """Raise ValueError unless the stride is a whole number of tokens, and divides a block."""
    if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
        raise ValueError(f"stride={stride}: allowed is an integer >= 1 that divides block_size")
    if block_size is not None and block_size % stride:
        raise ValueError(f"stride={stride}: allowed is a divisor of block_size={block_size}")


def streamed_scores(q: Tensor, keys: KeyView, site: Site, *, stride: int, ops: Any) -> Tensor:
    """antidiagonal_scores with K seen piece by piece, twice."""
    import torch

    place = {"stride": stride, "q_start": site.q_start, "scaling": site.scaling}
    stats = None
    for start, k in keys.pieces():
        piece = ops.antidiagonal_stats(q, k, k_start=start, **place)
        stats = piece if stats is None else ops.merge_stats(stats, piece)
    assert stats is not None  # the current chunk is always a piece
    return torch.cat(
        [
            ops.antidiagonal_block_sums(
                q, k, *stats, block_size=site.block_size, k_start=start, **place
            )
            for start, k in keys.pieces()
        ],
        dim=-1,
    )

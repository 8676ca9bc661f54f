"""Pages through a ring of device slots, by the copy engine.

A slot takes several pages: a copy must be large to use the link (2 MB reach 64 % of it, 16 MB 97 %
on an H200), and every slot is a part of attention that must be merged. Neighbouring pages of the
store go in one copy. Copies are issued ahead as slots become free, also those of the next layer
where it is known what that will read.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from xsparse.kv.streams import Buffer, CopyLane, Mark, compute_mark, compute_waits

SLOT_BYTES = 128 << 20


@dataclass(frozen=True)
class Load:
    """Pages of one layer for one slot; halves: of K and V, those that move."""

    layer: int
    pages: tuple[int, ...]
    halves: slice


class Ring:
    """slots: each [pages of a slot, halves, kv_heads, ratio, block_size, head_dim]."""

    def __init__(self, slots: Sequence[Tensor], device: torch.device):
        self.slots = [Buffer(slot) for slot in slots]
        self.device = device
        self.lane = CopyLane(device)
        self.free = deque(self.slots)
        self.ahead: deque[tuple[Load, Buffer]] = deque()

    @property
    def pages(self) -> int:
        """Pages a slot takes."""
        return len(self.slots[0].data)

    def loads(
        self,
        layer: int,
        pages: Sequence[int],
        halves: slice = slice(None),
        *,
        soon: bool = False,
    ) -> list[Load]:
        """The pages in portions of a slot; soon: the first portions are small, since somebody
        waits for them."""
        portions, begin, size = [], 0, max(1, self.pages // 8) if soon else self.pages
        while begin < len(pages):
            portions.append(Load(layer, tuple(pages[begin : begin + size]), halves))
            begin, size = begin + size, min(2 * size, self.pages)
        return portions

    def read(
        self,
        store: Tensor,
        wanted: list[Load],
        then: list[Load],
        *,
        written: Callable[[int], Mark],
        stage: Callable[[str], AbstractContextManager],
        count: Callable[[int], None],
    ) -> Iterator[tuple[Load, Tensor]]:
        """Loads in order with the slot's filled part; copies begin before the first is asked for.

        store: [layers, pages, halves, ...]; then: what will be read next, copied ahead as slots
        become free; written: the mark behind which a layer's pages lie in the store; count takes
        bytes
        """
        held = [load for load, _ in self.ahead]
        upcoming = deque([*wanted, *then])
        if held != list(upcoming)[: len(held)]:
            self.drop()
            held = []
        for _ in held:
            upcoming.popleft()

        def fill() -> None:
            while upcoming and self.free:
                load, slot = upcoming.popleft(), self.free.popleft()
                count(self._copy(store, load, slot, written(load.layer), stage))
                self.ahead.append((load, slot))

        def drain() -> Iterator[tuple[Load, Tensor]]:
            for _ in wanted:
                fill()
                load, slot = self.ahead.popleft()
                try:
                    compute_waits(slot.loaded, self.device)
                    yield load, slot.data[: len(load.pages)]
                finally:
                    slot.used = compute_mark(self.device)
                    if slot not in self.free:  # unless the ring was reset meanwhile
                        self.free.append(slot)
            fill()

        fill()
        return drain()

    def _copy(self, store: Tensor, load: Load, slot: Buffer, written: Mark, stage) -> int:
        """Returns the bytes that move."""
        lane = self.lane
        moved = 0
        with lane.running():
            lane.wait(slot.used)
            lane.wait(written)
            with stage("transfer"):
                for begin, stop in _neighbours(load.pages):
                    first = load.pages[begin]
                    source = store[load.layer, first : first + stop - begin, load.halves]
                    target = slot.data[begin:stop, load.halves]
                    if not source.is_contiguous():  # one half of two: page by page it is
                        for page, room in zip(source, target, strict=True):
                            room.copy_(page, non_blocking=True)
                    else:
                        target.copy_(source, non_blocking=True)
                    moved += source.numel() * source.element_size()
        slot.loaded = lane.mark()
        return moved

    def drop(self) -> None:
        """Forget what was copied ahead."""
        while self.ahead:
            self.free.append(self.ahead.popleft()[1])  # unread; copies are in order anyway

    def reset(self) -> None:
        """After every copy and reader is done."""
        self.ahead.clear()
        self.free = deque(self.slots)
        for slot in self.slots:
            slot.loaded = slot.used = None


def _neighbours(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of positions whose pages follow each other."""
    begin = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield begin, i
            begin = i

"""Doubles of what selectors see, for tests."""

from dataclasses import dataclass

import torch

from tests.ops.cases import Case, make
from xsparse.ops import torch_backend
from xsparse.selectors import Site, TensorKeys


@dataclass(frozen=True)
class StreamedKeys(TensorKeys):
    """K that is never whole: pieces of `piece` tokens and, last, the chunk from `chunk_start`."""

    piece: int = 256
    chunk_start: int = 0
    resident = False

    def keys(self):
        raise ValueError("K is not on the device")

    strided = minmax = keys

    def pieces(self):
        history = self.chunk_start // 128 * 128
        for start in range(0, history, self.piece):
            yield start, self.k[:, start : min(start + self.piece, history)]
        yield history, self.k[:, history:]


def site(case: Case, layer: int = 0, q_start: int | None = None) -> Site:
    return Site(
        layer=layer,
        q_start=case.q_start if q_start is None else q_start,
        block_size=case.block_size,
        scaling=case.scaling,
        ops=torch_backend,
    )


def select(selector, case: Case):
    """Selection of the case's chunk."""
    q, k, _ = make(case)
    return selector.select(q, TensorKeys(k), site(case))


def causal(case: Case) -> torch.Tensor:
    """bool [q_blocks, k_blocks]"""
    block = torch.arange(case.k_blocks)
    return block <= block[case.q_start // case.block_size :, None]

"""What a table gains over one scalar threshold that keeps as many blocks, on held-out prompts.

Which blocks a threshold keeps is decided by their shares (`rule.block_shares`), so histograms of
the shares tell what every scalar keeps at once: nothing else of a prompt is stored, whatever its
length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from xsparse.calibrate.rule import ALWAYS, NEVER, block_shares, covering_shares

STEPS = 10_000  # scalar thresholds that are tried: 0, 1 / STEPS, ..., 1


@dataclass(frozen=True)
class Kept:
    """Ratios of sums over layers, heads, rows and prompts. density: kept of the causal triples;
    recall: kept of the true mass; covered: rows, of those with a choice, that keep `coverage`"""

    density: float
    recall: float
    covered: float


@dataclass(frozen=True)
class Comparison:
    """A table, and the least scalar threshold that keeps at least as many blocks. more_recall,
    more_covered: prompts of which the table keeps more mass, covers more rows than the least
    scalar that keeps at least as many blocks of that prompt"""

    table: Kept
    scalar: float
    by_scalar: Kept
    more_recall: int
    more_covered: int


class HeldOut:
    """Sums over held-out prompts, for several tables at once. tables: fp64 [n, layers, q_heads]"""

    def __init__(self, tables: Tensor, coverage: float):
        self.tables = tables
        self.coverage = coverage
        self.prompts: list[Tensor] = []  # [3, n + STEPS + 1], see `watch`

    def begin(self) -> None:
        """The next prompt."""
        self.prompts.append(self.tables.new_zeros(3, len(self.tables) + STEPS + 1))

    def watch(self, layer: int, first_block: int, mass: Tensor, scores: Tensor) -> None:
        """Add a chunk: blocks, mass and rows that each table keeps, and that each step of a
        scalar adds to what the step before it keeps."""
        shares = block_shares(scores, first_block)
        choice = max(0, 2 - first_block)  # rows 0 and 1 have none
        rows = covering_shares(mass, shares, self.coverage)[:, choice:]
        causal = shares < NEVER
        blocks, weight = shares[causal], mass.double()[causal]
        tables = self.tables[:, layer].to(shares.device)
        kept = blocks < tables[:, causal.nonzero()[:, 0]]
        by_table = [kept.sum(-1), kept.double() @ weight, (rows < tables[..., None]).sum((1, 2))]
        by_step = [_steps(blocks), _steps(blocks, weight), _steps(rows.flatten())]
        for sums, *both in zip(self.prompts[-1], by_table, by_step, strict=True):
            sums += torch.cat(both).cpu()

    def compare(self) -> list[Comparison]:
        """One per table."""
        n = len(self.tables)
        prompts = torch.stack(self.prompts)
        prompts[..., n:] = prompts[..., n:].cumsum(-1)
        whole = prompts.sum(0)
        shares = whole / whole[:, -1:]  # a threshold of 1 keeps all
        found = []
        for table in range(n):
            scalar = n + int(_first(whole[0, n:] >= whole[0, table]))
            own = n + _first(prompts[:, 0, n:] >= prompts[:, 0, table, None])
            of_scalar = prompts.gather(-1, own[:, None, None].expand(-1, 3, 1))[..., 0]
            more = prompts[..., table] > of_scalar * (1 + 1e-9)  # not by the rounding of sums
            _, more_recall, more_covered = more.sum(0).tolist()
            found.append(
                Comparison(
                    table=Kept(*shares[:, table].tolist()),
                    scalar=(scalar - n) / STEPS,
                    by_scalar=Kept(*shares[:, scalar].tolist()),
                    more_recall=more_recall,
                    more_covered=more_covered,
                )
            )
        return found


def _first(true: Tensor) -> Tensor:
    """Index of the first true entry of the last dimension."""
    return true.int().argmax(-1)


def _steps(shares: Tensor, weight: Tensor | None = None) -> Tensor:
    """How much has each step as its first. k / STEPS keeps what has share < k / STEPS, so a share
    belongs to the step after it; what is always kept belongs to 0."""
    step = (shares * STEPS).floor().long().add_(1).clamp_(max=STEPS)
    step[shares == ALWAYS] = 0
    return step.bincount(weight, minlength=STEPS + 1)

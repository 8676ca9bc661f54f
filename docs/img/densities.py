"""Draws densities.svg: how one mask becomes what moves, and the four densities of it.

`python docs/img/densities.py` writes it. Every number in it is counted by xsparse itself: the mask
goes through a Session with an offload engine, as a selector's would.
"""

from pathlib import Path

import torch

from xsparse import ops
from xsparse.attached import Stats
from xsparse.attention import Rules, Session
from xsparse.kv.offload import OffloadEngine
from xsparse.kv.shape import CacheShape
from xsparse.selectors import Selection, Selector

KV_HEADS, GROUP, HISTORY, BLOCKS, RATIO = 2, 2, 8, 10, 2
BLOCK_SIZE, HEAD_DIM = 16, 8  # tokens, numbers; no density depends on them
# KEPT[query head][query block of the chunk]: key blocks. The chunk's own blocks are 8 and 9.
KEPT = [
    [{0, 3, 8}, {0, 3, 8, 9}],
    [{0, 8}, {0, 2, 9}],
    [{0, 6, 8}, {0, 6, 9}],
    [{0, 8}, {0, 7, 8, 9}],
]


class Drawn(Selector):
    """Answers with the mask of the drawing, and with everything for what came before."""

    def select(self, q, keys, site):
        if not keys.resident:
            for _ in range(2):  # as an exact estimator, which passes over K twice
                for _ in keys.pieces():
                    pass
        if not site.q_start:
            return Selection(torch.ones(len(q), HISTORY, HISTORY).bool().tril())
        mask = [[[block in row for block in range(BLOCKS)] for row in rows] for rows in KEPT]
        return Selection(torch.tensor(mask))


def measured(transfer: str, attend: str = "mask", digest: str = "resident_k") -> Stats:
    """What the chunk of the drawing costs; its history is appended before and not counted."""
    backend = ops.get("naive")
    shape = CacheShape(
        layers=1,
        q_heads=KV_HEADS * GROUP,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        block_size_ratio=RATIO,
        chunk_size=HISTORY * BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    engine = OffloadEngine(shape, transfer=transfer, digest=digest, ops=backend)
    rules = Rules(attend=attend, transfer=transfer)
    session = Session(engine, Drawn(), backend, rules=rules)
    generator = torch.Generator().manual_seed(0)
    for tokens in (HISTORY * BLOCK_SIZE, (BLOCKS - HISTORY) * BLOCK_SIZE):
        session.counters.reset()
        q = torch.randn(KV_HEADS * GROUP, tokens, HEAD_DIM, generator=generator)
        k, v = torch.randn(2, KV_HEADS, tokens, HEAD_DIM, generator=generator)
        session.attend(0, q, k, v, HEAD_DIM**-0.5)
    return Stats(session)


def share(value: float | None) -> str:
    return f"{100 * (value or 0):.0f} %"


# Drawing

CELL, LEFT, WIDTH = 22, 196, 790
INK, PALE, SET, OWN = "#0b5fa5", "#eef1f4", "#e08a00", "#8fa3b5"


class Canvas:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, *, size: int = 12, look: str = "") -> None:
        self.parts.append(f'<text x="{x}" y="{y}" font-size="{size}" {look}>{words}</text>')

    def row(self, y: float, label: str, kept: set[int], last: int, color: str) -> None:
        """One row of key blocks; `last` is the last one a query of the row may see."""
        self.text(LEFT - 10, y + 15, label, size=11, look='text-anchor="end" fill="#555"')
        for block in range(last + 1):
            fill = PALE if block not in kept else OWN if block >= HISTORY else color
            x = LEFT + block * CELL
            self.parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 4}" fill="{fill}"/>'
            )

    def frame(self, y: float, first: int, count: int) -> None:
        x = LEFT + first * CELL - 2
        self.parts.append(
            f'<rect x="{x}" y="{y - 2}" width="{count * CELL + 2}" height="{CELL}" fill="none" '
            f'stroke="#333"/>'
        )


def draw() -> str:
    """The SVG."""
    mask = measured("ring")
    gather = measured("gather")
    heads = [
        [set.union(*(KEPT[g * GROUP + h][row] for h in range(GROUP))) for row in range(2)]
        for g in range(KV_HEADS)
    ]
    tiles = [set.union(*rows) for rows in heads]
    union = set.union(*tiles)
    pages = {b // RATIO for b in union if b < HISTORY}
    moved = {b for b in range(BLOCKS) if b // RATIO in pages or b >= HISTORY}

    c = Canvas()
    notes = LEFT + BLOCKS * CELL + 24
    c.text(LEFT, 20, "key blocks", look='fill="#555"')
    for block in range(BLOCKS):
        x = LEFT + block * CELL + CELL / 2 - 1
        c.text(x, 38, str(block), size=11, look='text-anchor="middle" fill="#555"')
    y = 46

    def note(line: int, words: str, bold: bool = False) -> None:
        c.text(notes, y + 14 + 18 * line, words, look='font-weight="bold"' if bold else "")

    note(0, "1. the selector's mask", bold=True)
    note(1, f"{mask.numbers['mask_kept']} of {mask.numbers['mask_causal']} causal triples are kept")
    note(2, f"mask_density {share(mask.mask_density)}", bold=True)
    note(3, "attend=mask: the kernel computes the same,")
    note(4, f"executed_density {share(mask.executed_density)}", bold=True)
    for head, rows in enumerate(KEPT):
        for row, kept in enumerate(rows):
            label = f"KV {head // GROUP}, query head {head}, block {HISTORY + row}"
            c.row(y, label, kept, HISTORY + row, INK)
            y += CELL - 2
        y += 6

    y += 14
    note(0, "2. any over the query heads of a KV head", bold=True)
    for group, rows in enumerate(heads):
        for row, kept in enumerate(rows):
            c.row(y, f"KV {group}, block {HISTORY + row}", kept, HISTORY + row, INK)
            y += CELL - 2
        y += 4

    y += 14
    count = sum(len([b for b in kept if b < HISTORY]) for kept in tiles)
    note(0, "3. any over the query blocks of the chunk", bold=True)
    note(1, f"{count} of {KV_HEADS * HISTORY} tiles of history: what transfer=gather moves;")
    note(2, f"only V, as K is resident: transfer_ratio {share(gather.transfer_ratio)}", bold=True)
    for group, kept in enumerate(tiles):
        c.row(y, f"KV {group}", kept, BLOCKS - 1, SET)
        y += CELL
    y += 24

    c.text(notes, y + 14, "4. any over the KV heads", look='font-weight="bold"')
    c.row(y, "all heads", union, BLOCKS - 1, INK)
    y += CELL + 22

    note(0, "5. any over the blocks of a page", bold=True)
    note(
        1,
        f"{len(pages)} of {HISTORY // RATIO} pages: page_density {share(mask.page_density)}",
        bold=True,
    )
    note(2, "transfer=ring moves these pages;")
    note(3, f"only V, as K is resident: transfer_ratio {share(mask.transfer_ratio)}", bold=True)
    c.row(y, f"pages of {RATIO} blocks", moved, BLOCKS - 1, SET)
    for page in pages:
        c.frame(y, page * RATIO, RATIO)
    y += CELL + 30
    look = 'fill="#555"'
    for color, words in (
        (INK, "kept"),
        (SET, "moves"),
        (OWN, "the chunk's own, on the device"),
        (PALE, "left out"),
    ):
        c.parts.append(f'<rect x="16" y="{y - 11}" width="14" height="14" fill="{color}"/>')
        c.text(36, y, words, size=11, look=look)
        y += 20
    height = y - 4
    body = "\n".join(c.parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")

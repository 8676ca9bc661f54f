"""What the operators of a decode step must satisfy, in any form and on any device.

The expected values come from plain Python loops over lists, which share no code with the operators.
`ops` is a backend; `pinned` says whether what stands for host memory is pinned.
"""

import math
import random
from types import ModuleType

import torch
from torch import Tensor

from xsparse.ops.decode import Chosen, RowPlace, TileGeometry, empty_state


def at(position: int, device: str) -> Tensor:
    return torch.tensor([position], device=device)


# put_token


def put(ops: ModuleType, device: str, dtype: torch.dtype, *, pinned: bool = False) -> None:
    """An open tile, a paged store in host memory and a contiguous cache, at edges and between."""
    heads, d, size, ratio, pages, slots = 3, 24, 4, 2, 3, 2
    tokens = pages * ratio * size

    def zeros(*shape: int, host: bool = False) -> Tensor:
        made = torch.zeros(shape, dtype=dtype, device="cpu" if host else device)
        return made.pin_memory() if host and pinned else made

    store = zeros(pages, 2, heads, ratio, size, d, host=True)
    cache = zeros(heads, slots + 1, size, d)
    resident = zeros(heads, tokens, d)
    page, tile = ratio * size, (slots + 1) * size
    in_store = [
        RowPlace(store.view(-1, d), page, 2 * heads * page, page, half * heads * page)
        for half in (0, 1)
    ]
    in_cache = RowPlace(cache.view(-1, d), size, 0, tile, slots * size)
    in_resident = RowPlace(resident.view(-1, d), tokens, 0, tokens, 0)
    want_store, want_cache, want_resident = (x.cpu().clone() for x in (store, cache, resident))
    generator = torch.Generator().manual_seed(1)
    for p in (0, 1, 3, 4, 7, 8, 15, tokens - 1):
        # Token-major, as a model's projection leaves it: heads are strided.
        both = torch.randn(1, 2 * heads, d, generator=generator).to(dtype)
        k, v = both.transpose(0, 1).split(heads)
        moved = both.to(device).transpose(0, 1).split(heads)
        ops.put_token(*moved, at(p, device), [in_store[0], in_resident], [in_store[1], in_cache])
        for h in range(heads):
            block, row = divmod(p, size)
            for half, x in enumerate((k, v)):
                want_store[block // ratio, half, h, block % ratio, row] = x[h, 0]
            want_cache[h, slots, row] = v[h, 0]
            want_resident[h, p] = k[h, 0]
    if device == "cuda":
        torch.cuda.synchronize()
    for got, want in ((store, want_store), (cache, want_cache), (resident, want_resident)):
        assert torch.equal(got.cpu(), want)


# fold_token and step_scores


def fold(ops: ModuleType, device: str, dtype: torch.dtype) -> None:
    heads, d, size, blocks = 2, 24, 4, 3
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(heads, blocks * size, d, generator=generator).to(dtype)
    # What was there before must not show.
    extremes = torch.full((2, heads, blocks, d), 99.0, dtype=dtype, device=device)
    means = torch.full((1, heads, blocks, d), 99.0, device=device)
    for p in range(blocks * size):
        k = keys[:, p : p + 1].to(device)
        ops.fold_token(k, at(p, device), extremes, kind="minmax", block_size=size)
        ops.fold_token(k, at(p, device), means, kind="block_mean", block_size=size)
        b, last = p // size, slice(p // size * size, p + 1)
        assert torch.equal(extremes[0, :, b].cpu(), keys[:, last].amin(1))
        assert torch.equal(extremes[1, :, b].cpu(), keys[:, last].amax(1))
        want = keys[:, last].double().mean(1)
        torch.testing.assert_close(means[0, :, b].cpu().double(), want, atol=1e-6, rtol=1e-6)


def scores(
    ops: ModuleType,
    device: str,
    dtype: torch.dtype,
    *,
    kind: str,
    position: int,
    blocks: int = 5,
    head_dim: int = 24,
) -> None:
    q_heads, heads, size, scaling = 6, 2, 4, 0.3
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, q_heads, head_dim, generator=generator).to(dtype).transpose(0, 1)
    shape = (heads, blocks, head_dim)
    if kind == "minmax":
        pair = torch.randn(2, *shape, generator=generator).to(dtype)
        stats = torch.stack([pair.amin(0), pair.amax(0)])
    else:
        stats = torch.randn(1, *shape, generator=generator)
    got = ops.step_scores(
        q.to(device),
        stats.to(device),
        at(position, device),
        kind=kind,
        block_size=size,
        scaling=scaling,
    )
    assert got.dtype == torch.float32
    queries, known = q[:, 0].double(), stats.double()
    complete = position // size
    want = torch.full((heads, blocks), -math.inf, dtype=torch.float64)
    for h in range(heads):
        members = queries[h * q_heads // heads : (h + 1) * q_heads // heads]
        for b in range(min(complete, blocks)):
            ends = [members * part[h, b] for part in known]
            best = (ends[0] if kind == "block_mean" else torch.maximum(*ends)).sum(-1).max()
            want[h, b] = math.inf if b in (0, complete - 1) else scaling * best
    torch.testing.assert_close(got.cpu().double(), want, atol=1e-5, rtol=1e-5)


# choose_tiles


class Oracle:
    """The choice and the cache of one KV head, in lists and dicts."""

    def __init__(self, head: int, heads: int, budget: int, geometry: TileGeometry, keep: bool):
        self.head, self.heads, self.budget, self.keep = head, heads, budget, keep
        self.g = geometry
        self.slot_of: dict[int, int] = {}  # block -> slot
        self.chosen_at = [-1] * geometry.slots

    def step(self, scores: list[float], position: int) -> dict:
        g, H, h = self.g, self.heads, self.head
        complete = position // g.block_size
        ranked = sorted(range(complete), key=lambda b: (-scores[b], b))
        chosen = sorted(ranked[: self.budget])
        missing = [b for b in chosen if b not in self.slot_of] if self.keep else chosen
        if self.keep:
            kept = {self.slot_of[b] for b in chosen if b in self.slot_of}
            free = [m for m in range(g.slots) if m not in kept]
            free.sort(key=lambda m: (self.chosen_at[m], m))
            for b, m in zip(missing, free, strict=False):
                self.slot_of = {x: y for x, y in self.slot_of.items() if y != m} | {b: m}
            for b in chosen:
                self.chosen_at[self.slot_of[b]] = position
            slots = [self.slot_of[b] for b in chosen]
        else:
            slots = list(range(len(chosen)))
        B, n, V = self.budget, len(chosen), g.halves - 1

        def padded(values: list[int], fill: int, length: int) -> list[int]:
            return values + [fill] * (length - len(values))

        def cached(t: int, m: int) -> int:
            return (t * H + h) * (g.slots + 1) + m

        source, target = [], []
        for t in range(g.halves):
            from_, to = [-1] * B, [0] * B
            for i, (b, m) in enumerate(zip(chosen, slots, strict=True)):
                if b in missing:
                    page = b // g.ratio * g.halves * H + t * H + h
                    from_[i], to[i] = page * g.ratio + b % g.ratio, cached(t, m)
            source.append(from_)
            target.append(to)
        columns = [*chosen, complete]
        k = [cached(0, m) for m in [*slots, g.slots]]
        if g.halves == 1:
            k = [h * g.resident_blocks + b for b in columns]
        return {
            "blocks": padded(columns, -1, B + 1),
            "k_index": padded(k, 0, B + 1),
            "v_index": padded([cached(V, m) for m in [*slots, g.slots]], 0, B + 1),
            "count": n + 1,
            "source": source,
            "target": target,
            "moved": len(missing) * g.halves,
        }


def random_scores(heads: int, blocks: int, complete: int, draw: random.Random) -> list[list[float]]:
    """Rows with ties, both zeros, infinities in the middle and drift between steps."""
    values = [-math.inf, -2.5, -0.0, 0.0, 0.5, 0.5, 1.0, 1e30, math.inf]
    rows = []
    for _ in range(heads):
        spread = draw.random() < 0.5
        row = [draw.gauss(0, 1) if spread else draw.choice(values) for _ in range(blocks)]
        row = row[:complete] + [-math.inf] * (blocks - complete)
        if complete:
            row[0] = row[complete - 1] = math.inf
        rows.append(row)
    return rows


def choose(
    ops: ModuleType,
    device: str,
    *,
    budget: int,
    slots: int,
    blocks: int,
    positions: list[int],
    halves: int = 2,
    ratio: int = 2,
    keep: bool = True,
    heads: int = 2,
    group: int = 3,
    block_size: int = 4,
    seed: int = 0,
) -> None:
    """Many steps of one sequence against the oracle, everything the step writes."""
    draw = random.Random(seed)
    g = TileGeometry(block_size, ratio, halves, slots, blocks if halves == 1 else 0)
    state = empty_state(heads, slots, device)
    out = Chosen.allocate(heads * group, heads, budget, halves, device)
    oracles = [Oracle(h, heads, budget, g, keep) for h in range(heads)]
    moved = 0
    for position in positions:
        rows = random_scores(heads, blocks, position // block_size, draw)
        given = torch.tensor(rows, dtype=torch.float32)
        ops.choose_tiles(given.to(device), at(position, device), state, out, geometry=g, keep=keep)
        want = [o.step(r, position) for o, r in zip(oracles, given.tolist(), strict=True)]
        for name in ("blocks", "k_index", "v_index"):
            assert getattr(out, name).tolist() == [w[name] for w in want], (name, position)
        assert out.counts.flatten().tolist() == [w["count"] for w in want for _ in range(group)]
        for name in ("source", "target"):
            flat = [x for t in range(halves) for w in want for x in w[name][t]]
            assert getattr(out, name).tolist() == flat, (name, position)
        moved += sum(w["moved"] for w in want)
        assert out.moved.item() == moved
        held, chosen_at = state.tolist()
        for h, o in enumerate(oracles):
            by_slot = {m: b for b, m in o.slot_of.items()}
            assert held[h] == [by_slot.get(m, -1) for m in range(slots)]
            assert chosen_at[h] == o.chosen_at


# gather_tiles


def gather_to(ops: ModuleType, source: Tensor, device: str) -> None:
    """source: [6, ...]. Tiles land where `to` says; a negative index moves nothing, wherever its
    `to` points."""
    out = torch.full((9, *source.shape[1:]), 7.0, dtype=source.dtype, device=device)
    want = out.cpu().clone()

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ops.gather_tiles(source, ints(-1, 5, -1, 2, -1), out, to=ints(0, 0, 8, 4, 3))
    want[0], want[4] = source[5].cpu(), source[2].cpu()
    assert torch.equal(out.cpu(), want)
    ops.gather_tiles(source, ints(-1, -1), out, to=ints(0, 0))
    ops.gather_tiles(source, ints(), out, to=ints())
    assert torch.equal(out.cpu(), want)
    ops.gather_tiles(source, ints(3, -1, 1), out[:3])
    want[0], want[2] = source[3].cpu(), source[1].cpu()
    assert torch.equal(out.cpu(), want)


# A whole step


class Step:
    """Buffers of one layer and the five operators over them; `run` is one decode step."""

    def __init__(self, ops: ModuleType, device: str, kind: str, capacity: int, **sizes: int):
        self.ops, self.kind = ops, kind
        self.size, ratio, self.budget, slots = 16, 2, 4, 7
        heads, group, d = 2, 4, 64
        pages = capacity // (self.size * ratio)
        self.geometry = TileGeometry(self.size, ratio, 2, slots)
        dtype = torch.bfloat16
        store = torch.zeros(pages, 2, heads, ratio, self.size, d, dtype=dtype)
        self.store = store.pin_memory() if device == "cuda" else store
        self.cache = torch.zeros(2 * heads * (slots + 1), self.size, d, dtype=dtype, device=device)
        extremes = kind == "minmax"
        self.stats = torch.zeros(
            2 if extremes else 1,
            *(heads, capacity // self.size, d),
            dtype=dtype if extremes else torch.float32,
            device=device,
        )
        self.state = empty_state(heads, slots, device)
        self.out = Chosen.allocate(heads * group, heads, self.budget, 2, device)
        self.position = at(0, device)
        page, tile = ratio * self.size, (slots + 1) * self.size
        self.places = [
            [
                RowPlace(self.store.view(-1, d), page, 2 * heads * page, page, t * heads * page),
                RowPlace(
                    self.cache.view(-1, d),
                    *(self.size, 0, tile, (t * heads * (slots + 1) + slots) * self.size),
                ),
            ]
            for t in (0, 1)
        ]
        # Small whole numbers: every form sums them exactly, so all choose the same blocks.
        generator = torch.Generator().manual_seed(4)
        draw = torch.randint(-3, 4, (capacity, heads * (group + 2), d), generator=generator)
        self.tokens = draw.to(device, dtype)
        self.heads, self.q_heads = heads, heads * group

    def run(self) -> None:
        ops, position = self.ops, self.position
        token = self.tokens.index_select(0, position).transpose(0, 1)
        q, k, v = token.split([self.q_heads, self.heads, self.heads])
        at_stats = {"kind": self.kind, "block_size": self.size}
        ops.put_token(k, v, position, *self.places)
        ops.fold_token(k, position, self.stats, **at_stats)
        scores = ops.step_scores(q, self.stats, position, scaling=0.125, **at_stats)
        ops.choose_tiles(scores, position, self.state, self.out, geometry=self.geometry)
        tiles = self.store.view(-1, *self.cache.shape[1:])
        ops.gather_tiles(tiles, self.out.source, self.cache, to=self.out.target)
        position.add_(1)

    def same_as(self, other: "Step") -> None:
        for name in ("position", "store", "cache", "stats", "state"):
            assert torch.equal(getattr(self, name), getattr(other, name)), name
        for name, value in vars(self.out).items():
            assert torch.equal(value, getattr(other.out, name)), name

    def holds_what_it_names(self) -> None:
        """Every column's tile in the cache is that block of the store, for K and for V."""
        p, size, ratio = self.position.item() - 1, self.size, self.geometry.ratio
        store, cache = self.store, self.cache.cpu()
        blocks, k_index, v_index = (
            x.tolist() for x in (self.out.blocks, self.out.k_index, self.out.v_index)
        )
        for h in range(self.heads):
            for b, k, v in zip(blocks[h], k_index[h], v_index[h], strict=True):
                filled = min(size, p + 1 - b * size) if b >= 0 else 0
                for half, tile in ((0, k), (1, v)):
                    want = store[b // ratio, half, h, b % ratio, :filled]
                    assert torch.equal(cache[tile, :filled], want), (h, b, half)

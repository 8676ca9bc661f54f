"""What must hold whatever the engine: one sequence of drawn q, k, v through a Session each time.

Outputs are judged against fp64 attention over whole tokens inside the mask that was executed;
masks, densities and bytes against arithmetic done here, on what the session was seen to do.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

import xsparse
from tests.families import prompt, tiny
from xsparse.attention import Rules, Session
from xsparse.build import build as build_session
from xsparse.counters import density
from xsparse.hf import bound, cache_argument
from xsparse.kv import gathered
from xsparse.kv.offload import OffloadEngine
from xsparse.kv.resident import ResidentEngine
from xsparse.kv.shape import CacheShape
from xsparse.ops import torch_backend
from xsparse.selectors import Selection, build
from xsparse.settings import Settings
from xsparse.steps import Steps

LAYERS, Q_HEADS, KV_HEADS, D, BLOCK = 2, 4, 2, 8, 8
SCALING = 1 / math.sqrt(D)
TILE_BYTES = BLOCK * D * 4


def shape(ratio: int = 4, chunk: int = 32, kv_heads: int = KV_HEADS) -> CacheShape:
    device = torch.device("cpu")
    return CacheShape(LAYERS, Q_HEADS, kv_heads, D, BLOCK, ratio, chunk, torch.float32, device)


@dataclass(frozen=True)
class On:
    """An engine. slots: of the ring; digest: where the selector finds K."""

    engine: str = "resident"
    transfer: str = "ring"
    digest: str = "resident_k"
    slots: int = 3

    def build(self, shape: CacheShape, decode_blocks: int = 0):
        """decode_blocks: a decode step reads as many, judged by their bounds; 0: all of them."""
        stats = "minmax" if decode_blocks else None
        if self.engine == "resident":
            return ResidentEngine(shape, stats)
        return OffloadEngine(
            shape,
            transfer=self.transfer,
            digest=self.digest,
            ring_slots=self.slots,
            stride=4,
            stats=stats,
            step_slots=max(decode_blocks - 1, 0),
        )

    def __str__(self) -> str:
        if self.engine == "resident":
            return self.engine
        return f"{self.transfer}-{self.digest}-{self.slots}"


def offloads(*digests: str, slots: tuple[int, ...] = (2,)) -> list[On]:
    rings = [On("offload", "ring", d, s) for d in digests for s in slots]
    return rings + [On("offload", "gather", d) for d in digests]


@dataclass
class Step:
    """What one layer did with one chunk or decode step. mask: of the selector, in prefill."""

    layer: int
    q_start: int
    queries: int
    executed: Tensor
    tiles: Tensor
    pages: Tensor
    mask: Tensor | None


class Watched(Session):
    """A session that notes what it selects and executes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen: list[Step] = []
        self.selected: Selection | None = None
        if not self.selector.dense:
            self.selector = Watching(self.selector, self)

    def _read(self, layer, q, executed, tiles, pages, q_start, scaling):
        selected, self.selected = self.selected, None
        mask = None if selected is None else selected.mask
        self.seen.append(Step(layer, q_start, q.shape[1], executed, tiles, pages, mask))
        return super()._read(layer, q, executed, tiles, pages, q_start, scaling)

    def whole(self, layer: int, blocks: int) -> Tensor:
        """Everything executed in prefill, bool [q_heads, blocks, blocks]."""
        whole = torch.zeros(Q_HEADS, blocks, blocks, dtype=torch.bool)
        for step in self.seen:
            if step.layer == layer and step.mask is not None:
                first = step.q_start // BLOCK
                rows, columns = step.executed.shape[1:]
                whole[:, first : first + rows, :columns] |= step.executed
        return whole


class WatchedSteps(Steps):
    """Decode steps that note what they read; `session` is set by whoever made it."""

    session: Watched

    def _read(self, layer, q, scaling):
        tiles, lists = super()._read(layer, q, scaling)
        position = int(self.position)
        kept = torch.zeros(len(tiles.blocks), position // BLOCK + 1, dtype=torch.bool)
        for head, row in enumerate(tiles.blocks):
            kept[head, row[row >= 0].long()] = True
        executed = kept.repeat_interleave(Q_HEADS // len(kept), 0)[:, None]
        step = Step(layer, position, 1, executed, kept, torch.empty(0), None)
        self.session.seen.append(step)
        return tiles, lists


class Watching:
    def __init__(self, selector, session):
        self._selector, self._session = selector, session

    def select(self, q, keys, site):
        self._session.selected = self._selector.select(q, keys, site)
        return self._session.selected

    def __getattr__(self, name):
        return getattr(self._selector, name)


def session(
    on: On = On(),
    selector: str = "xattention",
    *,
    ratio: int = 4,
    chunk: int = 32,
    kv_heads: int = KV_HEADS,
    decode_blocks: int = 0,
    keep: bool = False,
    mass_recall: bool = False,
    rules: Rules | None = None,
    **params,
) -> Watched:
    params = {"threshold": 0.7, "stride": 4, "seed": 0} | params
    steps = partial(WatchedSteps, budget_tokens=decode_blocks * BLOCK, keep=keep)
    made = Watched(
        on.build(shape(ratio, chunk, kv_heads), decode_blocks),
        build(selector, **params),
        torch_backend,
        rules=rules or Rules(transfer=on.transfer),
        steps=steps if decode_blocks else None,
        mass_recall=mass_recall,
    )
    if made.steps is not None:
        made.steps.session = made
    return made


@dataclass
class Tokens:
    """Drawn q [layers, q_heads, N, d] and k, v [layers, kv_heads, N, d]: a sink, and a slow drift
    under which neighbours resemble each other, so that attention is not flat."""

    n: int
    seed: int = 0
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def draw(heads):
            return torch.randn(LAYERS, heads, self.n, D, generator=generator)

        self.q, self.k, self.v = draw(Q_HEADS), draw(KV_HEADS), draw(KV_HEADS)
        angle = torch.arange(self.n) / 20 + self.seed
        wave = 3 * torch.stack([angle.cos(), angle.sin()], -1)
        self.q[..., :2] += wave
        self.k[..., :2] += wave
        self.k[:, :, 0, 2] += 6
        self.q[..., 2] += 1


def drive(session: Session, tokens: Tokens, prompt: int | None = None, turns=()) -> Tensor:
    """Prefill `prompt` tokens (chunk by chunk, as a model would), decode the rest.

    turns: lengths of prompts that come one after another, negative for as many decoded tokens.
    Returns [layers, q_heads, N, d]
    """
    prompt = tokens.n if prompt is None else prompt
    steps = []
    for turn in turns or [prompt, prompt - tokens.n]:
        pieces = torch.ones(max(turn, 0)).split(session.engine.shape.chunk_size)
        steps += [(len(p), False) for p in pieces if len(p)] + [(1, True)] * -turn
    session.reset()
    outs, start = [], 0
    for size, session.decoding in steps:
        rows = slice(start, start + size)
        q, k, v = tokens.q[:, :, rows], tokens.k[:, :, rows], tokens.v[:, :, rows]
        out = [session.attend(i, q[i], k[i], v[i], SCALING) for i in range(LAYERS)]
        outs.append(torch.stack(out))
        start += size
    return torch.cat(outs, 2)


def attention(tokens: Tokens, layer: int, visible: Tensor | None = None) -> Tensor:
    """fp64 softmax over the visible tokens. visible: bool [q_heads, N, N], cut by causality."""
    q, k, v = (t[layer].double() for t in (tokens.q, tokens.k, tokens.v))
    k, v = (t.repeat_interleave(Q_HEADS // len(t), 0) for t in (k, v))
    causal = torch.ones(tokens.n, tokens.n, dtype=torch.bool).tril()
    visible = causal if visible is None else causal & visible
    logits = (q @ k.mT * SCALING).masked_fill(~visible, -torch.inf)
    return torch.softmax(logits, -1) @ v


def by_token(mask: Tensor, n: int) -> Tensor:
    """A mask of blocks as one of tokens, [heads, n, n]."""
    return mask.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :n, :n]


def assert_attends(session: Watched, tokens: Tokens, out: Tensor) -> None:
    """Every output is attention inside the mask that the session executed for it, or dense where
    it had none."""
    for layer in range(LAYERS):
        visible = torch.ones(Q_HEADS, tokens.n, tokens.n, dtype=torch.bool)
        for step in (s for s in session.seen if s.layer == layer):
            rows = torch.arange(step.q_start, step.q_start + step.queries)
            row_mask = step.executed[:, rows // BLOCK - step.q_start // BLOCK]
            seen = row_mask.repeat_interleave(BLOCK, 2)[:, :, : tokens.n]
            visible[:, rows] = False
            visible[:, rows, : seen.shape[2]] = seen
        want = attention(tokens, layer, visible)
        torch.testing.assert_close(out[layer].double(), want, atol=2e-5, rtol=0)


def masks(session: Watched) -> list[Tensor]:
    blocks = session.engine.shape.blocks(session.engine.length)
    return [session.whole(layer, blocks) for layer in range(LAYERS)]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


# Masks and outputs do not depend on where K and V lie

LENGTH = 203  # no multiple of anything
EVERYWHERE = [On(), *offloads("streamed", "resident_k", slots=(2, 3, 8))]


@pytest.mark.parametrize("on", EVERYWHERE, ids=str)
def test_engine_slots_page_and_chunk_do_not_change_mask_or_output(on):
    tokens = Tokens(LENGTH)
    reference = session()
    want = drive(reference, tokens)
    assert 0.2 < masks(reference)[0].sum() / (Q_HEADS * 26 * 27 / 2) < 0.8
    assert_attends(reference, tokens, want)
    for ratio, chunk in ((1, 32), (2, 64), (4, 8), (4, 40), (8, 32), (8, 256)):
        one = session(on, ratio=ratio, chunk=chunk)
        torch.testing.assert_close(drive(one, tokens), want, atol=2e-5, rtol=0)
        assert_same(masks(one), masks(reference))


@pytest.mark.parametrize("selector", ["strided_k", "minmax", "oracle_topp", "random"])
def test_every_selector_sees_the_same_keys_in_every_engine(selector):
    tokens = Tokens(LENGTH)
    reference = session(selector=selector)
    want = drive(reference, tokens)
    assert_attends(reference, tokens, want)
    for on in offloads(*build(selector).digests):
        one = session(on, selector)
        torch.testing.assert_close(drive(one, tokens), want, atol=2e-5, rtol=0)
        assert_same(masks(one), masks(reference))


RULES = [
    ("vote", "any", "any"),
    ("any", "vote", "any"),
    ("any", "any", "vote"),
    ("mean_score", "any", "any"),
    ("any", "mean_score", "any"),
    ("any", "any", "mean_score"),
    ("vote", "mean_score", "vote"),
    ("mean_score", "vote", "mean_score"),
]


@pytest.mark.parametrize("attend", ["mask", "set"])
@pytest.mark.parametrize("rules", RULES, ids="-".join)
@pytest.mark.parametrize("transfer", ["ring", "gather"])
def test_every_engine_executes_the_mask_that_the_rules_define(transfer, rules, attend):
    tokens = Tokens(LENGTH)
    keys = Rules(*rules, attend=attend, transfer=transfer)
    reference = session(rules=keys)
    want = drive(reference, tokens)
    assert_attends(reference, tokens, want)
    for digest, slots in (("resident_k", 2), ("streamed", 8)):
        one = session(On("offload", transfer, digest, slots), rules=keys)
        torch.testing.assert_close(drive(one, tokens), want, atol=2e-5, rtol=0)
        assert_same([s.executed for s in one.seen], [s.executed for s in reference.seen])
        assert_same([s.pages for s in one.seen], [s.pages for s in reference.seen])


def test_any_executes_the_mask_itself_and_set_everything_that_moved():
    for on in (On(), *offloads("resident_k")):
        for attend in ("mask", "set"):
            one = session(on, rules=Rules(attend=attend, transfer=on.transfer))
            drive(one, Tokens(LENGTH))
            for step in one.seen:
                assert step.mask is not None
                if attend == "mask":
                    assert torch.equal(step.executed, step.mask)
                    continue
                block = torch.arange(step.mask.shape[2])
                moved = step.tiles.expand(KV_HEADS, -1) if on.transfer == "ring" else step.tiles
                for head in range(Q_HEADS):
                    for row in range(step.mask.shape[1]):
                        diagonal = step.q_start // BLOCK + row
                        kept = moved[head // (Q_HEADS // KV_HEADS)] & (block <= diagonal)
                        assert torch.equal(step.executed[head, row], kept)
                        assert not (step.mask[head, row] & ~kept).any()


@pytest.mark.parametrize("chunk", [8, 32, 72, 256])
def test_random_draws_do_not_depend_on_chunks(chunk):
    tokens = Tokens(LENGTH)
    one, other = session(selector="random"), session(selector="random", chunk=chunk)
    drive(one, tokens)
    drive(other, tokens)
    assert_same(masks(other), masks(one))


# Nothing is left behind


@pytest.mark.parametrize("on", [On(), *offloads("resident_k", "streamed"), *offloads("minmax")])
def test_prompts_through_one_session_equal_each_alone(on):
    selector = "minmax" if on.digest == "minmax" else "xattention"

    def fresh():
        return session(on, selector, decode_blocks=4)

    prompts = [Tokens(181, seed=1), Tokens(60, seed=2), Tokens(250, seed=3), Tokens(9, seed=4)]
    shared = fresh()
    for tokens in prompts:
        alone = fresh()
        want = drive(alone, tokens, tokens.n - 5)
        shared.seen.clear()
        assert torch.equal(drive(shared, tokens, tokens.n - 5), want)
        assert_same([s.executed for s in shared.seen], [s.executed for s in alone.seen])
        assert shared.counters.read() == alone.counters.read()


class Boom(Exception):
    pass


@pytest.mark.parametrize("on", [On(), *offloads("resident_k", "streamed")], ids=str)
@pytest.mark.parametrize("where", ["select_blocks", "block_sparse_attention", "merge_states"])
def test_a_session_is_reusable_after_an_exception_inside_a_layer(on, where):
    tokens = Tokens(120)
    want = drive(session(on), tokens)
    one = session(on)
    function, calls = getattr(one.ops, where), itertools.count()

    def fails(*args, **kwargs):
        if next(calls) == 5:
            raise Boom
        return function(*args, **kwargs)

    setattr(one.ops, where, fails)
    if where == "merge_states" and (on.engine == "resident" or on.transfer == "gather"):
        drive(one, tokens)  # one part only, for each head: nothing to merge
    else:
        with pytest.raises(Boom):
            drive(one, Tokens(200, seed=7))
    assert torch.equal(drive(one, tokens), want)


@pytest.mark.parametrize("decode", [0, 4])
@pytest.mark.parametrize("on", [On(), *offloads("resident_k", "streamed")], ids=str)
def test_memory_that_runs_out_leaves_a_session_that_works(on, decode, monkeypatch):
    """Wherever it runs out: each allocation of a growing engine fails once."""
    zeros, tokens = torch.zeros, Tokens(100)
    want = drive(session(on, decode_blocks=decode), tokens)
    for failing in itertools.count():
        one, calls = session(on, decode_blocks=decode), itertools.count()
        drive(one, Tokens(40))

        def full(*args, failing=failing, calls=calls, **kwargs):
            if next(calls) == failing:
                raise torch.OutOfMemoryError("no memory left")
            return zeros(*args, **kwargs)

        monkeypatch.setattr(torch, "zeros", full)
        try:
            one.engine.reserve(4096)
            break
        except torch.OutOfMemoryError:
            # What is lost is said to be lost; what is still held is what was written.
            assert one.engine.length in (0, 40)
        finally:
            monkeypatch.setattr(torch, "zeros", zeros)
        assert torch.equal(drive(one, tokens), want)
    assert failing > 1


# Any length

LENGTHS = [1, 3, 7, 8, 9, 31, 32, 33, 39, 40, 41, 63, 65, 97]
PLACES = [
    (On(), "xattention"),
    *((on, "xattention") for on in offloads("resident_k", "streamed")),
    *((on, "strided_k") for on in offloads("strided_k")),
    *((on, "minmax") for on in offloads("minmax")),
    *((on, "random") for on in offloads("none")),
    *((on, "full") for on in (On(), *offloads("none"))),
]
DECODED = 35  # crosses block edges and one page edge


def kept_by_bounds(q: Tensor, k: Tensor, budget_blocks: int) -> Tensor:
    """Quest's rule with loops. q: [q_heads, d]; k: [kv_heads, n, d] -> bool [kv_heads, blocks]"""
    n = k.shape[1]
    blocks = -(-n // BLOCK)
    kept = torch.zeros(len(k), blocks, dtype=torch.bool)
    for head, keys in enumerate(k):
        group = q[head * (len(q) // len(k)) : (head + 1) * (len(q) // len(k))]
        bound = []
        for b in range(blocks):
            rows = keys[b * BLOCK : (b + 1) * BLOCK]
            low, high = rows.amin(0), rows.amax(0)
            bound.append(max(torch.maximum(x * low, x * high).sum().item() for x in group))
        always = {0, blocks - 1, max(blocks - 2, 0)}
        rest = sorted(set(range(blocks)) - always, key=lambda b: -bound[b])
        for b in [*always, *rest[: budget_blocks - len(always)]]:
            kept[head, b] = True
    return kept


@pytest.mark.parametrize(
    ("on", "selector", "decode"),
    [(*place, "full") for place in PLACES] + [(*place, "minmax") for place in PLACES],
    ids=str,
)
def test_any_length_of_prompt_and_decode(on, selector, decode):
    for n in LENGTHS if decode == "full" else LENGTHS[::3]:
        tokens = Tokens(n + DECODED, seed=n)
        one = session(on, selector, decode_blocks=4 if decode == "minmax" else 0)
        out = drive(one, tokens, n)
        assert torch.isfinite(out).all()
        assert_attends(one, tokens, out)
        counters = one.counters.read()
        if decode == "full":
            assert counters["decode_tiles_kept"] == counters["decode_tiles"]
            continue
        for step in (s for s in one.seen if s.mask is None):
            end = step.q_start + 1
            assert step.tiles.sum(1).max() <= 4
            q, k = tokens.q[step.layer, :, step.q_start], tokens.k[step.layer, :, :end]
            assert torch.equal(step.tiles, kept_by_bounds(q, k, 4)), (n, end)


@pytest.mark.parametrize("on", [On(), *offloads("resident_k", "streamed"), *offloads("minmax")])
def test_a_prompt_may_go_on_inside_a_block(on):
    """Later turns begin anywhere; their masks are those of one prompt."""
    selector = "minmax" if on.digest == "minmax" else "oracle_topp"
    tokens = Tokens(150)
    one = session(on, selector)
    out = drive(one, tokens, turns=(45, 1, 30, 74))
    assert_attends(one, tokens, out)


@pytest.mark.parametrize("on", offloads("resident_k", "none")[2:], ids=str)
@pytest.mark.parametrize("tiles", [1, 3, 7])
def test_history_larger_than_a_gathered_window_changes_nothing(on, tiles, monkeypatch):
    """Then several windows follow each other for one head, and are merged."""
    selector = "xattention" if on.digest == "resident_k" else "random"
    tokens = Tokens(230)
    want = session(on, selector)
    out = drive(want, tokens)
    monkeypatch.setattr(gathered, "WINDOW_TILES", tiles)
    monkeypatch.setattr(gathered, "SMALL_TILES", 8)
    one = session(on, selector)
    torch.testing.assert_close(drive(one, tokens), out, atol=1e-5, rtol=1e-5)
    assert_same(masks(one), masks(want))
    assert one.counters.read()["bytes_h2d"] == want.counters.read()["bytes_h2d"]


METHOD_OF = {"strided_k": "strided_k", "minmax": "minmax", "block_mean": "block_mean"}


@pytest.mark.parametrize(
    "on",
    offloads("resident_k", "streamed", "quantised_k", "strided_k", "minmax", "block_mean"),
    ids=str,
)
def test_a_prompt_after_decode_steps_sees_what_they_wrote(on):
    """Every digest knows K of tokens that were decoded one by one, across block and page edges."""
    selector = METHOD_OF.get(on.digest, "xattention")
    tokens, turns = Tokens(190), (45, -75, 40, -10, 20)
    one = session(on, selector, decode_blocks=4)
    assert_attends(one, tokens, drive(one, tokens, turns=turns))
    if on.digest == "quantised_k":
        return  # its masks are nearly those of K itself
    alone = session(On(), selector, decode_blocks=4)
    drive(alone, tokens, turns=turns)
    assert_same([s.executed for s in one.seen], [s.executed for s in alone.seen])


# Heads


@pytest.mark.parametrize("on", [On(), *offloads("resident_k", "streamed")], ids=str)
def test_grouped_heads_equal_repeated_keys_and_values(on):
    tokens = Tokens(LENGTH)
    grouped, repeated = session(on), session(on, kv_heads=Q_HEADS)
    out = drive(grouped, tokens)
    wide = dataclasses.replace(tokens)
    wide.k, wide.v = (t.repeat_interleave(Q_HEADS // KV_HEADS, 1) for t in (tokens.k, tokens.v))
    torch.testing.assert_close(drive(repeated, wide), out, atol=2e-6, rtol=0)
    assert_same(masks(repeated), masks(grouped))
    mask = masks(grouped)[0]
    assert (mask[0] != mask[1]).any()  # heads of one group choose for themselves


# What is counted


def predicted_bytes(session: Watched, on: On, ratio: int) -> int:
    """Bytes to the device in prefill, from the sets that had to move."""
    page = KV_HEADS * ratio * TILE_BYTES  # of K or of V
    total = 0
    for step in session.seen:
        history = step.q_start // BLOCK
        halves = 1 if on.digest == "resident_k" else 2
        if on.transfer == "ring":
            total += int(step.pages.sum()) * halves * page
        else:
            total += int(step.tiles[:, :history].sum()) * halves * TILE_BYTES
        if on.digest == "streamed":  # two passes over the K half of every page
            total += 2 * -(-history // ratio) * page
    return total


@pytest.mark.parametrize("on", offloads("resident_k", "streamed", "minmax", "none"), ids=str)
@pytest.mark.parametrize(("ratio", "chunk"), [(4, 32), (2, 64), (4, 40), (8, 32)])
def test_bytes_are_those_of_the_sets_that_moved(on, ratio, chunk):
    name = {"minmax": "minmax", "none": "random"}.get(on.digest, "xattention")
    one = session(on, name, ratio=ratio, chunk=chunk)
    n = 8 * chunk
    drive(one, Tokens(n))
    counters = one.counters.read()
    history = LAYERS * sum(range(0, n, chunk)) * 2 * KV_HEADS * D * 4
    assert counters["bytes_history"] == history
    assert counters["bytes_h2d"] == predicted_bytes(one, on, ratio)
    halves = 1 if on.digest == "resident_k" else 2
    assert counters["bytes_d2h"] == LAYERS * n * halves * KV_HEADS * D * 4
    if chunk % (ratio * BLOCK) == 0:  # otherwise pages move that are history in part
        estimation = 1.0 if on.digest == "streamed" else 0.0
        most = 0.5 if on.digest == "resident_k" else 1.0
        assert estimation < counters["bytes_h2d"] / history <= estimation + most


@pytest.mark.parametrize("on", offloads("none", "resident_k"), ids=str)
@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_dense_attention_moves_exactly_everything(on, ratio):
    one = session(on, "full", ratio=ratio, chunk=64)
    drive(one, Tokens(300))
    counters = one.counters.read()
    share = 1.0 if on.digest == "none" else 0.5
    assert density(counters["bytes_h2d"], counters["bytes_history"]) == share
    assert density(counters["pages_moved"], counters["pages_history"]) == 1.0
    assert counters["mask_kept"] == counters["mask_causal"] == counters["executed"]


@pytest.mark.parametrize("transfer", ["ring", "gather"])
@pytest.mark.parametrize("rules", [("any", "any", "any"), ("vote", "any", "vote")], ids="-".join)
@pytest.mark.parametrize(("ratio", "chunk"), [(1, 32), (4, 40), (8, 64)])
def test_densities_are_those_of_the_masks(transfer, rules, ratio, chunk):
    keys = Rules(*rules, attend="set", transfer=transfer)
    for on in (On(), On("offload", transfer)):
        one = session(on, ratio=ratio, chunk=chunk, rules=keys)
        drive(one, Tokens(LENGTH))
        counters = one.counters.read()
        causal = kept = executed = pages = history_pages = 0
        for step in one.seen:
            assert step.mask is not None
            first = step.q_start // BLOCK
            own = -(-(step.q_start + step.queries) // BLOCK) - first
            causal += Q_HEADS * sum(first + row + 1 for row in range(own))
            kept += int(step.mask.sum())
            executed += int(step.executed.sum())
            history_pages += -(-first // ratio)
            wanted = {b // ratio for b in range(first) if step.tiles[:, b].any()}
            pages += len(wanted)
        assert counters["mask_causal"] == causal
        assert counters["mask_kept"] == kept
        assert counters["executed"] == executed
        assert counters["pages_history"] == history_pages
        assert counters["pages_moved"] == pages
        assert 0 < kept < causal
        assert kept < executed <= causal


def test_without_history_there_is_nothing_to_divide_by():
    one = session(On("offload"))
    drive(one, Tokens(20))
    counters = one.counters.read()
    assert counters["pages_history"] == counters["bytes_history"] == counters["bytes_h2d"] == 0
    assert density(counters.get("pages_moved"), counters["pages_history"]) is None


def true_share(tokens: Tokens, masks: list[Tensor]) -> float:
    """Share of true attention mass inside the masks."""
    inside = total = 0.0
    causal = torch.ones(tokens.n, tokens.n, dtype=torch.bool).tril()
    for layer, mask in enumerate(masks):
        q, k = tokens.q[layer].double(), tokens.k[layer].double()
        k = k.repeat_interleave(Q_HEADS // KV_HEADS, 0)
        p = torch.softmax((q @ k.mT * SCALING).masked_fill(~causal, -torch.inf), -1)
        inside += (p * by_token(mask, tokens.n)).sum().item()
        total += p.sum().item()
    return inside / total


@pytest.mark.parametrize("on", [On(), *offloads("resident_k", "streamed")], ids=str)
def test_mass_recall_is_the_true_mass_inside_the_executed_mask(on):
    tokens = Tokens(LENGTH)
    for threshold in (0.3, 0.8, 1.0):
        plain, one = (session(on, threshold=threshold, mass_recall=mass) for mass in (False, True))
        out = drive(plain, tokens)
        assert torch.equal(drive(one, tokens), out)
        counters = one.counters.read()
        recall = density(counters.pop("mass_kept"), counters.pop("mass_total"))
        assert recall == pytest.approx(true_share(tokens, masks(one)), abs=1e-5)
        assert recall is not None
        assert 0 < recall <= 1
        if threshold == 1:
            assert recall == 1
        assert counters == plain.counters.read()  # the diagnostic is no traffic of the method


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
def test_the_oracle_recalls_what_was_asked_and_no_estimator_with_less(threshold):
    one = session(selector="oracle_topp", threshold=threshold, mass_recall=True)
    drive(one, Tokens(LENGTH))
    counters = one.counters.read()
    recall = density(counters["mass_kept"], counters["mass_total"])
    assert recall is not None
    assert recall >= threshold


def test_numbers_that_are_not_finite_are_read_as_they_are():
    one = session()
    one.counters.add("mass_kept", torch.tensor(math.nan))
    one.counters.add("mass_total", torch.tensor(math.inf))
    read = one.counters.read()
    assert math.isnan(read["mass_kept"])
    assert read["mass_total"] == math.inf


# Through a model

SMALL = {"block_size": 16, "block_size_ratio": 2, "chunk_size": 64, "stride": 4}
MODEL_ENGINES = [
    {"engine": "resident"},
    {"engine": "offload", "transfer": "ring", "ring_slots": 2, "digest": "streamed"},
    {"engine": "offload", "transfer": "ring", "ring_slots": 8},
    {"engine": "offload", "transfer": "gather"},
]


def forward(model, session, cache, ids) -> Tensor:
    """Logits [N, vocabulary] of a prompt prefilled chunk by chunk."""
    kept = {cache_argument(model): cache}
    session.reset()
    session.phase = "prefill"
    with torch.inference_mode():
        pieces = ids.split(SMALL["chunk_size"], dim=1)
        return torch.cat([model(input_ids=piece, **kept).logits[0] for piece in pieces])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_sparse_model_gives_the_same_logits_in_every_engine(family):
    model, ids = tiny(family), prompt(230)
    results = []
    for engine in MODEL_ENGINES:
        built = build_session(model, Settings(threshold=0.5, **{**SMALL, **engine}))
        with bound(model, built) as cache:
            logits = forward(model, built, cache, ids)
        counters = built.counters.read()
        results.append((logits, counters["mask_kept"]))
        assert counters["mask_kept"] < counters["mask_causal"]
    for logits, kept in results[1:]:
        assert kept == results[0][1]
        torch.testing.assert_close(logits, results[0][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("offload", [False, True])
def test_inference_mode_may_come_and_go(offload):
    model, ids = tiny("llama"), prompt(100)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    with xsparse.attach(model, threshold=0.5, offload=offload, **SMALL):
        want = model.generate(ids, **options)
        with torch.inference_mode():
            first = model(input_ids=ids)
            kept = {cache_argument(model): first[cache_argument(model)]}
        model(input_ids=ids[:, :1], **kept)
        assert torch.equal(model.generate(ids, **options), want)
        with torch.inference_mode():
            assert torch.equal(model.generate(ids, **options), want)


def test_gradients_are_refused():
    model = tiny("llama").requires_grad_(True)
    with xsparse.attach(model, **SMALL), pytest.raises(ValueError, match="no_grad"):
        model(input_ids=prompt(20))


@pytest.mark.parametrize("engine", MODEL_ENGINES, ids=lambda e: "-".join(map(str, e.values())))
def test_a_model_is_reusable_after_an_exception_inside_it(engine):
    model, ids = tiny("llama"), prompt(150)
    built = build_session(model, Settings(threshold=0.5, **{**SMALL, **engine}))
    with bound(model, built) as cache:
        want = forward(model, built, cache, ids)
        norm = model.model.layers[1].post_attention_layernorm
        hook = norm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Boom))
        with pytest.raises(Boom):
            forward(model, built, cache, prompt(90, seed=1))
        hook.remove()
        attention_module = model.model.layers[1].self_attn
        hook = attention_module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Boom))
        with pytest.raises(Boom):
            forward(model, built, cache, prompt(90, seed=1))
        hook.remove()
        with (
            torch.inference_mode(),
            pytest.raises(ValueError, match="did not finish"),
        ):  # layer 0 has tokens that layer 1 has not
            model(input_ids=ids[:, :5], **{cache_argument(model): cache})
        assert torch.equal(forward(model, built, cache, ids), want)

"""Reductions against loops over members."""

import itertools

import pytest
import torch

from tests.ops import oracle
from xsparse.selectors.base import Selection
from xsparse.selectors.reduce import executed_mask, reduce_mask

BLOCK = 8
RULES = ("any", "vote", "mean_score")


def draw(seed=0, heads=6, first=7, own=3, start=None):
    """A selection of a chunk whose first own block is `first`."""
    generator = torch.Generator().manual_seed(seed)
    blocks = first + own
    scores = torch.rand(heads, own, blocks, generator=generator) ** 3
    scores = scores * (1 + 5 * torch.rand(heads, own, 1, generator=generator))
    causal = torch.arange(blocks) <= torch.arange(first, blocks)[:, None]
    scores = scores * causal
    mask = torch.rand(scores.shape, generator=generator) < 0.45
    mask[..., 0] = True
    mask[:, torch.arange(own), first + torch.arange(own)] = True
    return Selection(mask & causal, scores)


def at(first=7, ratio=4, kv_heads=2, threshold=0.7, **rules):
    return {
        "q_start": first * BLOCK,
        "block_size": BLOCK,
        "ratio": ratio,
        "kv_heads": kv_heads,
        "threshold": threshold,
        "transfer": "gather",
        **rules,
    }


def loop(selection, *, q_start, ratio, kv_heads, threshold, transfer, rules, **_):
    """The three steps with loops: tiles as sets of history blocks per group, pages as a set."""
    mask, first = selection.mask, q_start // BLOCK
    heads, own, blocks = mask.shape
    groups = 1 if transfer == "ring" else kv_heads
    size = heads // groups
    p = selection.scores / selection.scores.sum(-1, keepdim=True)

    def combine(rule, members, mean, forced, allowed):
        """members: one set of units per member; mean: score of each unit"""
        if rule == "any":
            return set().union(*members)
        if rule == "vote":
            return {u for u in allowed if 2 * sum(u in m for m in members) > len(members)}
        kept = set(forced)
        need = threshold * sum(mean[u] for u in allowed)
        for u in sorted(set(allowed) - kept, key=lambda u: (-mean[u], u)):
            if sum(mean[k] for k in kept) >= need:
                break
            kept.add(u)
        return kept

    tiles, chunk_mean = [], None
    for g in range(groups):
        rows, row_means = [], []
        for a in range(own):
            allowed = range(first + a + 1)
            forced = {0, *range(first, first + a + 1)}
            members = [
                set(mask[h, a].nonzero().flatten().tolist())
                for h in range(g * size, (g + 1) * size)
            ]
            mean = p[g * size : (g + 1) * size, a].mean(0).tolist()
            rows.append(combine(rules[0], members, mean, forced, allowed))
            row_means.append(mean)
        chunk_mean = torch.tensor(row_means, dtype=torch.float64).mean(0).tolist()
        forced = {0, *range(first, blocks)}
        kept = combine(rules[1], rows, chunk_mean, forced, range(blocks))
        tiles.append({b for b in kept if b < first} | ({0} if first else set()))
    pages = range(-(-first // ratio))
    if transfer == "gather":
        return tiles, {b // ratio for t in tiles for b in t}
    content = {page: [b for b in range(first) if b // ratio == page] for page in pages}
    mean = {page: sum(chunk_mean[b] for b in content[page]) / len(content[page]) for page in pages}
    mean["own"] = sum(chunk_mean[first:]) / ratio
    kept = {0} if first else set()
    if rules[2] == "mean_score":
        need = threshold * sum(mean.values())
        taken = {*kept, "own"}
        for page in sorted(set(pages) - kept, key=lambda page: (-mean[page], page)):
            if sum(mean[k] for k in taken) >= need:
                break
            taken.add(page)
        kept = taken - {"own"}
    else:
        for page in pages:
            votes = sum(b in tiles[0] for b in content[page])
            enough = votes > 0 if rules[2] == "any" else 2 * votes > len(content[page])
            if enough:
                kept.add(page)
    return [{b for page in kept for b in content[page]}], kept


@pytest.mark.parametrize("first", [0, 1, 7, 8])
@pytest.mark.parametrize(
    ("transfer", "rules"),
    [
        *(("ring", rules) for rules in itertools.product(RULES, RULES, RULES)),
        *(("gather", (*rules, "any")) for rules in itertools.product(RULES, RULES)),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_reduction_follows_its_rule(transfer, rules, first):
    keys = dict(zip(("reduce_heads", "reduce_queries", "reduce_sub_blocks"), rules, strict=True))
    for seed in range(4):
        selection = draw(seed, first=first)
        options = at(first, transfer=transfer)
        reduced = reduce_mask(selection, **options, **keys)
        tiles, pages = loop(selection, rules=rules, **options)
        got = [set(row[:first].nonzero().flatten().tolist()) for row in reduced.tiles]
        assert got == tiles
        assert set(reduced.pages.nonzero().flatten().tolist()) == pages
        assert len(reduced.pages) == -(-first // 4)
        assert reduced.tiles[:, first:].all()
        assert reduced.tiles.shape == (1 if transfer == "ring" else 2, first + 3)


@pytest.mark.parametrize("transfer", ["gather", "ring"])
def test_any_leaves_the_mask_alone(transfer):
    selection = draw()
    reduced = reduce_mask(selection, **at(transfer=transfer))
    assert executed_mask(selection.mask, reduced, "mask") is selection.mask
    heads = 6 // len(reduced.tiles)
    wide = reduced.tiles.repeat_interleave(heads, 0)[:, None]
    assert not (selection.mask & ~wide).any()


@pytest.mark.parametrize("transfer", ["gather", "ring"])
@pytest.mark.parametrize("rule", ["vote", "mean_score"])
def test_what_is_executed(transfer, rule):
    selection = draw()
    reduced = reduce_mask(selection, **at(transfer=transfer), reduce_queries=rule)
    wide = reduced.tiles.repeat_interleave(6 // len(reduced.tiles), 0)[:, None]
    executed = executed_mask(selection.mask, reduced, "mask")
    assert torch.equal(executed, selection.mask & wide)
    assert torch.equal(executed[..., 7:], selection.mask[..., 7:])
    assert executed[..., 0].all()
    causal = torch.arange(10) <= torch.arange(7, 10)[:, None]
    assert torch.equal(executed_mask(selection.mask, reduced, "set"), wide & causal)


def test_a_tie_drops():
    mask = torch.zeros(2, 2, 6, dtype=torch.bool)
    mask[..., 0] = mask[:, 0, 4] = mask[:, 1, 5] = True
    mask[0, :, 1] = True  # one head of two
    mask[:, :, 2] = True
    mask[:, 0, 3] = True  # one query block of two
    reduced = reduce_mask(
        Selection(mask),
        **at(4, kv_heads=1),
        reduce_heads="vote",
        reduce_queries="vote",
    )
    assert reduced.tiles[0].tolist() == [True, False, True, False, True, True]


def test_only_history_blocks_are_members_of_a_page():
    """Pages of 4, history of 6 blocks: the last page has two members, and one of two is a tie."""
    mask = torch.zeros(1, 2, 8, dtype=torch.bool)
    mask[..., 0] = mask[:, 0, 6] = mask[:, 1, 7] = mask[:, :, 4:6] = True
    options = at(6, transfer="ring", kv_heads=1)
    both = reduce_mask(Selection(mask), **options, reduce_sub_blocks="vote")
    assert both.pages.tolist() == [True, True]
    assert both.tiles[0].tolist() == [True] * 8
    mask[:, :, 4] = False
    one = reduce_mask(Selection(mask), **options, reduce_sub_blocks="vote")
    assert one.pages.tolist() == [True, False]
    assert one.tiles[0].tolist() == [True] * 4 + [False] * 2 + [True] * 2


def test_per_head_thresholds_average_over_a_group():
    selection = draw()
    rules = {"reduce_heads": "mean_score", "reduce_queries": "mean_score"}
    table = torch.tensor([0.6, 0.7, 0.8, 0.2, 0.3, 0.4], dtype=torch.float64)
    mixed = reduce_mask(selection, **at(threshold=table), **rules)
    for group, threshold in enumerate((0.7, 0.3)):
        alone = reduce_mask(selection, **at(threshold=threshold), **rules)
        assert torch.equal(mixed.tiles[group], alone.tiles[group])


def test_full_threshold_keeps_all():
    rules = dict.fromkeys(("reduce_heads", "reduce_queries", "reduce_sub_blocks"), "mean_score")
    reduced = reduce_mask(draw(), **at(threshold=1.0, transfer="ring"), **rules)
    assert reduced.tiles.all()
    assert reduced.pages.all()


def test_mean_score_is_the_rule_on_the_mean():
    """One row, one group: the mean of normalised rows goes through the rule of the threshold."""
    selection = draw(heads=3, own=1)
    reduced = reduce_mask(selection, **at(kv_heads=1), reduce_heads="mean_score")
    scores = selection.scores.double()
    mean = (scores / scores.sum(-1, keepdim=True)).mean(0)[0].tolist()
    assert set(reduced.tiles[0].nonzero().flatten().tolist()) == oracle.select_row(mean, 0.7, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce_heads": "all"}, "reduce_heads=all: allowed is any"),
        ({"reduce_queries": "mean_score"}, "reduce_queries=mean_score: needs a selector with"),
        ({"transfer": "copy"}, "transfer=copy: allowed is ring"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        reduce_mask(Selection(draw().mask), **{**at(), **options})


def test_unknown_attend_is_refused():
    selection = draw()
    with pytest.raises(ValueError, match="attend=both: allowed is mask"):
        executed_mask(selection.mask, reduce_mask(selection, **at()), "both")

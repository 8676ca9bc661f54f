"""Each method against its formula in fp64."""

import subprocess
import sys

import pytest
import torch

from tests.ops import oracle
from tests.ops.cases import Case, make
from tests.selectors.views import causal, select, site
from xsparse.ops import bounds
from xsparse.selectors import TensorKeys, build, get, names, register

CASES = [Case(700), Case(1001, 233), Case(650, 394, content="structured"), Case(700, 37)]


def kept_by(scores, threshold, case):
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for h in range(scores.shape[0]):
        for a in range(scores.shape[1]):
            diagonal = case.q_start // case.block_size + a
            mask[h, a, list(oracle.select_row(scores[h, a].tolist(), threshold, diagonal))] = True
    return mask


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("name", "formula"),
    [("xattention", oracle.antidiagonal_scores), ("oracle_topp", oracle.attention_mass)],
)
def test_mass(name, formula, case):
    q, k, _ = make(case)
    selection = select(build(name, threshold=0.8), case)
    want = formula(case, q, k)
    torch.testing.assert_close(selection.scores.double(), want, atol=3e-5, rtol=0)
    assert torch.equal(selection.mask, kept_by(selection.scores, 0.8, case))


def strided_k_scores(case, q, k, stride=8):
    q_at = [t for t in range(case.q_start, case.length) if t % stride == 0]
    k_at = list(range(0, case.length, stride))
    logits = oracle.logits(q[:, [t - case.q_start for t in q_at]], k[:, k_at], case.scaling)
    hidden = torch.tensor(k_at) > torch.tensor(q_at)[:, None]
    p = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)
    scores = torch.zeros(len(q), case.q_blocks, case.k_blocks, dtype=torch.float64)
    for i, t in enumerate(q_at):
        for j, u in enumerate(k_at):
            scores[:, t // 128 - case.q_start // 128, u // 128] += p[:, i, j]
    return scores


def minmax_scores(case, q, k):
    group = len(q) // len(k)
    bounds = torch.empty(len(q), case.queries, case.k_blocks, dtype=torch.float64)
    for h in range(len(q)):
        for b in range(case.k_blocks):
            block = k[h // group, b * 128 : (b + 1) * 128].double()
            products = torch.maximum(q[h] * block.amin(0), q[h] * block.amax(0))
            bounds[h, :, b] = products.sum(-1) * case.scaling
    row = torch.arange(case.q_start, case.length) // 128
    hidden = torch.arange(case.k_blocks) > row[:, None]
    p = torch.softmax(bounds.masked_fill(hidden, -torch.inf), -1)
    return torch.stack([p[:, row == a].mean(1) for a in row.unique()], 1)


def block_mean_scores(case, q, k):
    group = len(q) // len(k)
    logits = torch.empty(len(q), case.queries, case.k_blocks, dtype=torch.float64)
    for h in range(len(q)):
        for b in range(case.k_blocks):
            every = q[h] @ k[h // group, b * 128 : (b + 1) * 128].double().T
            logits[h, :, b] = every.mean(-1) * case.scaling
    row = torch.arange(case.q_start, case.length) // 128
    hidden = torch.arange(case.k_blocks) > row[:, None]
    p = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)
    return torch.stack([p[:, row == a].mean(1) for a in row.unique()], 1)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("name", "formula"), [("strided_k", strided_k_scores), ("minmax", minmax_scores)]
)
def test_digest(name, formula, case):
    q, k, _ = make(case, dtype=torch.float64)
    selection = select(build(name, threshold=0.8), case)
    torch.testing.assert_close(selection.scores.double(), formula(case, q, k), atol=3e-6, rtol=0)
    assert torch.equal(selection.mask, kept_by(selection.scores, 0.8, case))


@pytest.mark.parametrize("name", ["minmax", "block_mean"])
def test_strips_do_not_show(name, monkeypatch):
    case = Case(700, 650)
    whole = select(build(name), case).scores
    monkeypatch.setattr(bounds, "STRIP_NUMBERS", 1)
    torch.testing.assert_close(select(build(name), case).scores, whole)


@pytest.mark.parametrize("alpha", [0.05, 0.18, 1.0])
@pytest.mark.parametrize(("sink", "window"), [(2, 4), (1, 1), (3, 2)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_mean(case, alpha, sink, window):
    q, k, _ = make(case, dtype=torch.float64)
    selector = build("block_mean", alpha=alpha, sink_blocks=sink, window_blocks=window)
    selection = select(selector, case)
    scores = block_mean_scores(case, q, k)
    torch.testing.assert_close(selection.scores.double(), scores, atol=3e-6, rtol=0)
    for head, rows in enumerate(selection.scores.tolist()):
        for row, shares in enumerate(rows):
            diagonal = case.q_start // 128 + row
            need = alpha * max(shares)
            want = [
                b <= diagonal and (b < sink or diagonal - b < window or share >= need - 1e-9)
                for b, share in enumerate(shares)
            ]
            assert selection.mask[head, row].tolist() == want


def test_strided_k_without_a_sampled_query_keeps_everything():
    case = Case(515, 2)  # positions 513 and 514
    selection = select(build("strided_k"), case)
    assert torch.equal(selection.mask, causal(case).expand(3, -1, -1))


def test_strided_k_misses_what_antidiagonals_see():
    """Keys that every query of the last block needs, on a position that K[::8] skips."""
    case = Case(2048, 128, q_heads=1, head_dim=64)
    q, k, _ = make(case)
    q[..., 0] = 8
    k[:, 517] = 0
    k[:, 517, 0] = 64
    scores = {
        name: build(name).select(q, TensorKeys(k), site(case)).scores[0, 0]
        for name in ("strided_k", "xattention")
    }
    assert scores["xattention"][:-1].argmax() == 517 // 128
    assert scores["strided_k"][517 // 128] < 0.2 * scores["strided_k"].sum()


def test_full_is_dense():
    selector = build("full", threshold=0.1)
    assert selector.dense
    assert selector.threshold_of(0) == 1


# random


@pytest.mark.parametrize("density", [0.1, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("shared", [False, True])
def test_random_has_the_density_asked_for(density, shared):
    case = Case(8192, 1024, q_heads=32, kv_heads=32, head_dim=2)
    selector = build("random", density=density, per_kv_head_chunk=shared)
    mask = select(selector, case).mask
    got = mask.sum() / (causal(case).sum() * 32)
    assert abs(got.item() - density) < 0.02
    assert density < 1 or mask.all() == causal(case).all()


def test_random_depends_on_each_of_its_keys():
    case = Case(4096, 512, q_heads=4, head_dim=2)
    q, k, _ = make(case)

    def mask(seed=0, layer=0):
        selector = build("random", seed=seed, density=0.5)
        return selector.select(q, TensorKeys(k), site(case, layer)).mask

    base = mask()
    for other in (mask(seed=1), mask(layer=1), base.roll(1, 0), base.roll(1, 1), mask(1, 0)):
        assert 0.3 < (other != base).float().mean() < 0.6
    assert (mask(seed=1, layer=0) != mask(seed=0, layer=1)).any()
    draws = base[..., 1:-5].float()
    assert draws.mean(-1).std() < 0.12


def test_random_shared_draws_unite_to_themselves():
    case = Case(4096, 512, q_heads=9, kv_heads=3, head_dim=2)
    mask = select(build("random", density=0.3, per_kv_head_chunk=True), case).mask
    history = mask[..., : case.q_start // 128]
    union = history.unflatten(0, (3, 3)).any(1).any(1)
    assert torch.equal(history.unflatten(0, (3, 3))[:, 0, -1], union)
    assert union.float().mean() < 0.45


# registry and parameters


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"selector=xattn: allowed is full \| xattention"):
        build("xattn")
    with pytest.raises(ValueError, match=r"selector.densty: parameters of random are: density"):
        build("random", densty=0.5)
    with pytest.raises(ValueError, match="parameters of full are: none"):
        build("full", density=0.5)


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="selector=full: taken by xsparse.selectors.full"):
        register(get("full"))


def test_build_ignores_what_belongs_to_all_methods():
    assert build("xattention", threshold=0.5, stride=16, seed=3).stride == 16
    assert build("random", threshold=0.5, stride=16, seed=3).seed == 3


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("random", {"density": 0}, r"density=0: allowed is a number in \(0, 1\]"),
        ("random", {"density": float("nan")}, "density=nan: allowed"),
        ("block_mean", {"alpha": 1.5}, r"alpha=1.5: allowed is a number in \[0, 1\]"),
        ("block_mean", {"alpha": float("nan")}, "alpha=nan: allowed"),
        ("block_mean", {"sink_blocks": 0}, "sink_blocks=0: allowed is an integer >= 1"),
        ("block_mean", {"window_blocks": 1.5}, "window_blocks=1.5: allowed"),
        ("xattention", {"stride": 0}, "stride=0: allowed is an integer >= 1"),
        ("strided_k", {"stride": 2.5}, "stride=2.5: allowed"),
        *[
            (name, {"threshold": bad}, rf"threshold={bad}: allowed is a number in \[0, 1\]")
            for name in ("xattention", "strided_k", "minmax", "oracle_topp")
            for bad in (1.5, -1, float("nan"))
        ],
    ],
)
def test_parameters_out_of_range_are_refused(name, params, message):
    with pytest.raises(ValueError, match=message):
        build(name, **params)


@pytest.mark.parametrize("name", ["xattention", "strided_k"])
def test_a_stride_that_does_not_divide_the_block_is_refused(name):
    with pytest.raises(ValueError, match="stride=7: allowed is a divisor of block_size=128"):
        select(build(name, stride=7), Case(300))


def test_configuration_does_not_import_torch():
    code = (
        "import sys, xsparse.selectors as s; [s.build(n, threshold=0.5) for n in s.names()];"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names():
    own = {"full", "xattention", "strided_k", "minmax", "block_mean", "random", "oracle_topp"}
    assert own <= set(names())

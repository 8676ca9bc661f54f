"""Digests alone: what they hold against plain loops, and how far each is from exact on a prompt.

The table of docs/selectors.md is measured here, on the queries and keys of the default model.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
import torch

from xsparse.kv import digests
from xsparse.kv.digests import DIGESTS, FORMATS, BlockStats, QuantisedK
from xsparse.kv.shape import CacheShape
from xsparse.ops import torch_backend
from xsparse.selectors import Site, TensorKeys, build

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LAYERS, HEADS, D, BLOCK, STRIDE = 2, 3, 6, 8, 4
SHAPE = CacheShape(LAYERS, HEADS, HEADS, D, BLOCK, 4, 32, torch.float32, CPU)
EVERY = [(name, "int8") for name in DIGESTS] + [("quantised_k", f) for f in FORMATS[1:]]
every = pytest.mark.parametrize(("name", "format"), EVERY)


def make(name, format="int8", shape=SHAPE, tokens=128):
    digest = DIGESTS[name](shape, STRIDE, format)
    digest.reserve(tokens)
    return digest


def keys(tokens, seed=0):
    """[layers, heads, tokens, D], some features large, off-centre or constant"""
    k = torch.randn(LAYERS, HEADS, tokens, D, generator=torch.Generator().manual_seed(seed))
    return k * torch.tensor([1, 1, 20, 1, 0.01, 0]) + torch.tensor([0, 50, 0, -3, 0, 7])


def write(digest, k, sizes):
    """Append pieces of the given sizes, as an engine does: each from the start of its block."""
    end = 0
    for size in sizes:
        start, end = end // BLOCK * BLOCK, end + size
        for layer in range(LAYERS):
            digest.store(layer, start, k[layer, :, start:end])


def tensors(digest):
    return [t for parts in digest.layers for t in parts]


@every
@pytest.mark.parametrize("sizes", [[1], [8, 8], [13, 20, 3], [32, 31, *[1] * 20], [5] * 9], ids=str)
def test_pieces_of_any_size_leave_what_one_piece_leaves(name, format, sizes):
    k = keys(sum(sizes))
    parts, whole = make(name, format), make(name, format)
    write(parts, k, sizes)
    write(whole, k, [sum(sizes)])
    for a, b in zip(tensors(parts), tensors(whole), strict=True):
        assert torch.equal(a, b)


@every
def test_growth_keeps_what_is_held_and_reset_clears_it(name, format):
    k = keys(61)
    digest, large = make(name, format, tokens=64), make(name, format, tokens=256)
    write(digest, k, [61])
    write(large, k, [61])
    digest.reserve(256)
    assert digest.nbytes == large.nbytes == sum(t.nbytes for t in tensors(large))
    for a, b in zip(tensors(digest), tensors(large), strict=True):
        assert torch.equal(a, b)
    digest.reset()
    assert not any(t.any() for t in tensors(digest))


@every
def test_growth_that_fails_leaves_all_as_it_was(name, format, monkeypatch):
    digest = make(name, format)
    write(digest, keys(61), [61])
    before, values = digest.layers, [t.clone() for t in tensors(digest)]
    if not values:
        return
    allocate, calls = torch.zeros, []

    def zeros(*args, **kwargs):
        calls.append(args)
        if len(calls) == len(values):
            raise torch.OutOfMemoryError("no room")
        return allocate(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(torch.OutOfMemoryError):
        digest.reserve(1024)
    assert digest.layers is before
    assert all(torch.equal(a, b) for a, b in zip(tensors(digest), values, strict=True))


def test_a_digest_costs_nothing_before_it_is_needed():
    assert all(d(SHAPE, STRIDE).nbytes == 0 for d in DIGESTS.values())


@pytest.mark.parametrize("name", ["minmax", "block_mean"])
def test_stats_are_those_of_each_block(name):
    shape = CacheShape(LAYERS, HEADS, HEADS, D, BLOCK, 4, 32, torch.float16, CPU)
    digest = make(name, shape=shape)
    k = keys(45).half()
    write(digest, k, [45])
    assert isinstance(digest, BlockStats)
    stats = digest.stats(1)
    rules = {"minmax": ("amin", "amax"), "block_mean": ("mean",)}[name]
    assert stats.shape == (len(rules), HEADS, 128 // BLOCK, D)
    assert stats.dtype == (torch.float16 if name == "minmax" else torch.float32)
    for block in range(6):
        rows = k[1, :, block * BLOCK : (block + 1) * BLOCK].double()
        want = torch.stack([getattr(rows, rule)(1) for rule in rules])
        torch.testing.assert_close(stats[:, :, block].double(), want, atol=1e-5, rtol=0)
    shown = digest.bounds(1, 45) if name == "minmax" else (digest.means(1, 45),)
    assert torch.equal(torch.stack(shown), stats[:, :, :6])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("length", [1, 8, 61, 128])
def test_quantised_keys_are_within_a_step(format, length):
    k = keys(length)
    digest = make("quantised_k", format)
    write(digest, k, [length])
    ((start, got),) = digest.pieces(1, length)
    assert start == 0
    assert got.shape == k[1].shape
    assert got.dtype == SHAPE.dtype
    for first in range(0, length, BLOCK):
        exact = k[1, :, first : first + BLOCK].double()
        error = (got[:, first : first + BLOCK].double() - exact).abs()
        low, high = exact.amin(1, keepdim=True), exact.amax(1, keepdim=True)
        if format == "fp8":  # three bits behind the leading one
            step = (exact - (low + high) / 2).abs() / 16 + (high - low) / 896 * 2**-10
        else:
            step = (high - low) / {"int8": 255, "int4": 15}[format] / 2
        assert (error <= step * 1.001 + 1e-5).all()
        assert (error[..., 5] == 0).all()  # constant


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("length", [16, 61, 96])
def test_quantised_keys_come_in_pieces(format, length, monkeypatch):
    digest = make("quantised_k", format)
    write(digest, keys(length), [length])
    ((_, whole),) = digest.pieces(0, length)
    monkeypatch.setattr(digests, "PIECE_TOKENS", 20)
    got = list(digest.pieces(0, length))
    assert [start for start, _ in got] == list(range(0, length, 16))
    assert torch.equal(torch.cat([k for _, k in got], 1), whole)


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(ValueError, match=r"format=int3: allowed is int8 \| int4 \| fp8"):
        QuantisedK(SHAPE, STRIDE, "int3")
    odd = CacheShape(LAYERS, HEADS, HEADS, 5, BLOCK, 4, 32, torch.float32, CPU)
    with pytest.raises(ValueError, match="format=int4: head_dim=5"):
        QuantisedK(odd, STRIDE, "int4")


# Distance from exact


@dataclass(frozen=True)
class DigestKeys(TensorKeys):
    """The keys of one layer as a digest shows them. k, the exact ones, only tells the length."""

    digest: digests.Digest
    resident = False

    def pieces(self):
        yield from self.digest.pieces(0, self.length)

    def strided(self, stride):
        return self.digest.keys(0, self.length)

    def minmax(self, block_size):
        return self.digest.bounds(0, self.length)

    def mean(self, block_size):
        return self.digest.means(0, self.length)


@dataclass(frozen=True)
class Sample:
    """q [9, 1850, 64] and k [3, 1850, 64] of a layer of the default model, after RoPE."""

    q: torch.Tensor
    k: torch.Tensor
    site: Site

    def select(self, selector, digest=None, format="int8"):
        keys = TensorKeys(self.k)
        if digest:
            kept = DIGESTS[digest](real_shape(torch.float32), 8, format)
            kept.reserve(2048)
            kept.store(0, 0, self.k)
            keys = DigestKeys(self.k, kept)
        return build(selector, threshold=0.9, stride=8).select(self.q, keys, self.site)


def real_shape(dtype):
    return CacheShape(1, 9, 3, 64, 128, 4, 512, dtype, CPU)


@pytest.fixture(scope="module")
def samples():
    """Every sixth layer, on one needle prompt; skipped where the default model is not at hand."""
    from omegaconf import OmegaConf
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from xsparse import models, tasks

    if not list(models.cache_dir().rglob("tokenizer.json")):
        pytest.skip("the default model is not in the cache")
    node = OmegaConf.load(ROOT / "conf/model/smollm2-135m.yaml")
    loaded = models.load(node, dtype="float32", device="cpu")
    name = "niah_single_1"
    task = tasks.build(name, loaded.tokenizer, length=2000, seed=0, node={"name": name})
    seen = {}

    def record(module, q, k, v, mask, **kwargs):
        site = Site(module.layer_idx, 0, 128, kwargs["scaling"], torch_backend)
        seen[module.layer_idx] = Sample(q[0].clone(), k[0].clone(), site)
        return sdpa_attention_forward(module, q, k, v, None, **kwargs)

    AttentionInterface.register("record", record)
    loaded.model.set_attn_implementation("record")
    with torch.inference_mode():
        loaded.model(torch.tensor([task.sample(0).input_ids]), logits_to_keep=1)
    assert len(seen) == 30
    return [seen[layer] for layer in range(0, 30, 6)]


def shares(scores):
    return scores / scores.sum(-1, keepdim=True)


def recall(selection, mass, blocks=4):
    """Share of true mass in that many blocks of a row: block 0, the diagonal, the best others."""
    block = torch.arange(mass.shape[-1])
    forced = (block == 0) | (block == block[:, None])
    rank = selection.scores.masked_fill(block > block[:, None], -1).masked_fill(forced, torch.inf)
    best = rank.topk(blocks, -1).indices
    return mass.gather(-1, best).sum(-1).mean()


def measured(samples, selector, digest, format="int8"):
    """(largest and mean error of a block's share of its row, share of the mask's triples that
    differ, true mass in four blocks)"""
    most, mean, differ, kept = [], [], [], []
    for sample in samples:
        exact, got = sample.select("xattention"), sample.select(selector, digest, format)
        mass = shares(sample.select("oracle_topp").scores)
        causal = torch.ones_like(mass[0]).tril().bool()
        error = (shares(got.scores) - shares(exact.scores)).abs()[:, causal]
        most.append(error.max().item())
        mean.append(error.mean().item())
        differ.append((got.mask != exact.mask)[:, causal].double().mean().item())
        kept.append(recall(got, mass).item())
    return max(most), fmean(mean), fmean(differ), fmean(kept)


def section():
    text = (ROOT / "docs/selectors.md").read_text(encoding="utf-8")
    return text.partition("## How far a digest is from exact")[2].partition("\n## ")[0]


def rows():
    for line in re.findall(r"^\| `.*", section(), re.MULTILINE):
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        digest, _, format = label.replace("`", "").partition(" ")
        yield pytest.param(digest, format or "int8", cells, id=label.replace("`", ""))


def percent(cell):
    return pytest.approx(float(cell.removesuffix(" %")) / 100, abs=0.002)


@pytest.mark.parametrize(("digest", "format", "cells"), rows())
def test_the_documentation_states_each_distance_from_exact(samples, digest, format, cells):
    nbytes, most, mean, differ, kept = cells
    bf16 = DIGESTS[digest](real_shape(torch.bfloat16), 8, format)
    bf16.reserve(128)
    assert int(nbytes) == bf16.nbytes / (128 * 3)

    selector = "xattention" if digest in ("resident_k", "quantised_k") else digest
    view = None if digest == "resident_k" else digest
    got = measured(samples, selector, view, format)
    assert got[3] == percent(kept)
    if most:
        assert got[0] == pytest.approx(float(most), rel=0.2)
        assert got[1] == pytest.approx(float(mean), rel=0.2)
        assert got[2] == percent(differ)


def test_the_documentation_states_what_the_best_blocks_hold(samples):
    (stated,) = re.findall(r"best four hold\s+(\S+ %)", section())
    assert measured(samples, "oracle_topp", None)[3] == percent(stated)


def test_the_documentation_has_every_digest_that_keeps_something():
    stated = {tuple(row.values[:2]) for row in rows()}
    assert stated == {(n, f) for n, f in EVERY if n not in ("none", "streamed")}

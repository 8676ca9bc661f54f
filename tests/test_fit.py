"""What is refused before a model is loaded, and that what a refusal allows is allowed."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xsparse import fit
from xsparse.build import make_engine
from xsparse.kv.gigabytes import from_gb, gb_down, gb_up
from xsparse.kv.offload import OffloadEngine
from xsparse.kv.shape import CacheShape
from xsparse.models.shapes import ModelShape
from xsparse.settings import ConfigError, Settings

SHAPE = ModelShape(
    layers=30,
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    hidden=576,
    vocab=49152,
    params=0,
    max_length=8192,
)
OFFLOAD: dict[str, Any] = {"engine": "offload", "chunk_size": 512, "block_size_ratio": 4}
CACHED = dict(OFFLOAD, decode_selector="minmax", decode_budget_tokens=512)


def check(tokens: int = 2048, device: str = "cpu", dtype: str = "float32", **changes: Any) -> None:
    fit.check(Settings(**changes), SHAPE, device=device, dtype=dtype, tokens=tokens, model_name="m")


def allowed(error: pytest.ExceptionInfo) -> str:
    found = re.search(r">= ([0-9.]+)", str(error.value))
    assert found, error.value
    return found[1]


@given(st.integers(1, 10**13))
@settings(max_examples=300)
def test_gb_are_rounded_to_the_safe_side_and_never_to_zero(nbytes):
    up, down = gb_up(nbytes), gb_down(nbytes)
    assert 0 < from_gb(float(down)) <= nbytes <= from_gb(float(up))
    assert from_gb(float(up)) <= nbytes * 1.011 + 1  # three digits


@pytest.mark.parametrize("graph", ["step", "pair"])
def test_graphs_need_a_gpu(graph):
    engine: dict[str, Any] = OFFLOAD if graph == "pair" else {}
    check(device="cuda:1", cuda_graph=graph, **engine)
    with pytest.raises(ConfigError, match=rf"^cuda_graph={graph}: allowed is none on cpu$"):
        check(cuda_graph=graph, **engine)


@pytest.mark.parametrize("digest", ["resident_k", "streamed"])
@pytest.mark.parametrize("tokens", [513, 2048, 5000])
def test_the_host_memory_that_is_asked_for_is_what_the_engine_takes(digest, tokens):
    words = dict(OFFLOAD, digest=digest)
    with pytest.raises(
        ConfigError, match=r"^engine\.host_memory_gb=1e-06: allowed is >= "
    ) as error:
        check(tokens, host_memory_gb=1e-6, **words)
    assert f"{tokens} tokens" in str(error.value)
    enough = float(allowed(error))
    check(tokens, host_memory_gb=enough, **words)
    with pytest.raises(ConfigError):
        check(tokens, host_memory_gb=enough * 0.985, **words)
    shape = CacheShape(30, 9, 3, 64, 128, 4, 512, torch.float32, torch.device("cpu"))
    for given_gb, fits in ((enough, True), (enough * 0.985, False)):
        s = Settings(host_memory_gb=given_gb, **words)
        engine = make_engine(s, shape, None)
        if fits:
            engine.reserve(tokens)
            assert isinstance(engine, OffloadEngine)
            assert engine.store is not None
            assert from_gb(enough * 0.985) < engine.store.nbytes <= from_gb(enough)
            engine.close()
        else:
            with pytest.raises(MemoryError, match=r"^engine\.host_memory_gb=.*: allowed is >= "):
                engine.reserve(tokens)


def test_free_host_memory_is_not_a_setting():
    check(10**7, **OFFLOAD)


@pytest.mark.parametrize("digest", ["resident_k", "streamed"])
@pytest.mark.parametrize("budget", [384, 512, 4096])
def test_the_decode_cache_that_is_asked_for_is_allowed(digest, budget):
    words = dict(CACHED, digest=digest, decode_budget_tokens=budget)
    with pytest.raises(ConfigError, match=rf"decode_budget_tokens={budget}") as error:
        check(decode_cache_gb=1e-5, **words)
    check(decode_cache_gb=float(allowed(error)), **words)
    with pytest.raises(ConfigError):
        check(decode_cache_gb=float(allowed(error)) * 0.985, **words)


def test_more_tiles_a_step_than_a_cache_can_rank():
    most = (fit.MOST_SLOTS + 2) * 128
    check(decode_cache_gb=64, **dict(CACHED, decode_budget_tokens=most - 1))
    check(decode_cache_gb=0.0, **dict(CACHED, decode_budget_tokens=most))
    with pytest.raises(ConfigError) as error:
        check(decode_cache_gb=64, **dict(CACHED, decode_budget_tokens=most))
    assert str(error.value).startswith(f"decode_budget_tokens={most}: allowed is < {most} ")
    assert "decode_cache_gb=64" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "given", "unused"),
    [
        ({}, ["threshold=0.5", "stride=8", "chunk_size=512", "seed=1", "length=9"], []),
        ({}, ["ring_slots=8", "digest_format=int4"], ["ring_slots", "digest_format"]),
        ({}, ["decode_budget_tokens=512", "decode_selector=full"], ["decode_budget_tokens"]),
        ({"selector": "random"}, ["threshold=0.5"], ["threshold"]),
        ({"selector": "full"}, ["threshold=0.5", "attend=set"], ["threshold", "attend"]),
        ({}, ["engine.host_memory_gb=8"], ["engine.host_memory_gb"]),
        (OFFLOAD, ["engine=offload", "engine.host_memory_gb=8", "ring_slots=8"], []),
        (OFFLOAD | {"digest": "quantised_k"}, ["digest_format=int4"], []),
        # The baseline reads through the ring, so its slots change the speed-up.
        (CACHED | {"transfer": "gather"}, ["ring_slots=8", "decode_cache_gb=0.2"], []),
        (CACHED | {"transfer": "gather"}, ["reduce_sub_blocks=vote"], ["reduce_sub_blocks"]),
        ({}, ["+selector.density=0.5", "~tracker", "+digest_format=int4"], ["digest_format"]),
    ],
)
def test_keys_that_were_given_and_change_nothing(settings, given, unused):
    assert fit.without_effect(Settings(**settings), given) == unused


@pytest.mark.parametrize(("budget", "selects"), [(384, False), (511, False), (512, True)])
def test_a_decode_budget_that_selects_nothing_is_said(caplog, budget, selects):
    shape = CacheShape(2, 9, 3, 64, 128, 4, 512, torch.float32, torch.device("cpu"))
    make_engine(Settings(**dict(CACHED, decode_budget_tokens=budget)), shape, None)
    assert bool(caplog.messages) != selects
    if not selects:
        [line] = caplog.messages
        assert line.startswith(f"decode_budget_tokens={budget}: ")
        assert ">= 512" in line

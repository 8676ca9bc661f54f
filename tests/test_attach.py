"""`attach` as a library: whose cache continues which sequence, and values that are refused."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import xsparse
from tests.families import prompt, tiny
from xsparse.build import build
from xsparse.hf import bound, cache_argument
from xsparse.settings import ConfigError, Settings

SMALL: dict[str, Any] = {"block_size": 16, "block_size_ratio": 4, "chunk_size": 64, "stride": 4}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
OFFLOAD = pytest.mark.parametrize("offload", [False, True])


def generate(model, ids, **more):
    return model.generate(ids, **GREEDY, return_dict_in_generate=True, **more)


def turn(model, ids, made, length, seed):
    """Another user turn behind an answer; the whole conversation, its continuation by the cache."""
    longer = torch.cat([made.sequences, prompt(length, seed)], 1)
    return longer, generate(model, longer, **{cache_argument(model): made.past_key_values})


@OFFLOAD
def test_the_current_sequence_goes_on_with_its_own_cache(offload):
    model = tiny("llama", "sdpa")
    with xsparse.attach(model, "full", offload=offload, **SMALL):
        generate(model, prompt(40, 1))
        made = generate(model, prompt(90))
        longer, made = turn(model, prompt(90), made, 30, 2)
        longest, made = turn(model, longer, made, 70, 3)
    assert torch.equal(model.generate(longest, **GREEDY), made.sequences)


@OFFLOAD
def test_the_cache_of_an_earlier_sequence_is_refused(offload):
    model = tiny("llama", "sdpa")
    with xsparse.attach(model, "full", offload=offload, **SMALL):
        first = generate(model, prompt(90))
        second = generate(model, prompt(50, 1))
        with pytest.raises(ValueError, match="earlier sequence"):
            turn(model, prompt(90), first, 30, 2)
        for call in ("get_seq_length", "reset"):  # of nobody else's sequence either
            with pytest.raises(ValueError, match="earlier sequence"):
                getattr(first.past_key_values, call)()
        longer, made = turn(model, prompt(50), second, 30, 2)  # nothing was lost by asking
    assert torch.equal(model.generate(longer, **GREEDY), made.sequences)


def test_a_cache_is_refused_outside_its_block():
    model = tiny("llama", "sdpa")
    with xsparse.attach(model, "full", **SMALL):
        made = generate(model, prompt(90))
    with pytest.raises(ValueError, match="block"):
        turn(model, prompt(90), made, 30, 2)
    with pytest.raises(ValueError, match="block"):
        model(prompt(1), **{cache_argument(model): made.past_key_values})
    with (
        xsparse.attach(model, "full", **SMALL),
        pytest.raises(ValueError, match="block"),
    ):
        turn(model, prompt(90), made, 30, 2)


def test_a_cache_of_another_kind_holds_nothing_to_go_on_from():
    model = tiny("llama", "sdpa")
    key, own = cache_argument(model), DynamicCache()
    with torch.inference_mode(), xsparse.attach(model, "full", **SMALL):
        model(prompt(40), **{key: own})
        with pytest.raises(ValueError, match="returned"):
            model(prompt(1), **{key: own})
    with torch.inference_mode(), pytest.raises(ValueError, match="block"):
        model(prompt(1), **{key: own})


def test_a_cache_serves_its_own_model_alone_and_has_no_copies():
    model, other = tiny("llama", "sdpa"), tiny("llama", "sdpa")
    key, ids = cache_argument(model), prompt(40)
    filled = DynamicCache()
    filled.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), 0)
    with torch.inference_mode():
        want = model(torch.cat([ids, prompt(1, 1)], 1)).logits[0, -1]
        with xsparse.attach(model, "full", **SMALL):
            kept = model(ids).past_key_values
            with pytest.raises(ValueError, match="another model"):
                other(prompt(1, 1), **{key: kept})
            with pytest.raises(ValueError, match="inner module"):
                model.model(prompt(1, 1), **{cache_argument(model.model): kept})
            with pytest.raises(ValueError, match="copied"):
                copy.deepcopy(kept)
            with pytest.raises(ValueError, match="filled cache of another"):
                model(prompt(1, 1), **{key: filled})
            with pytest.raises(ValueError, match="type tuple"):
                model(prompt(1, 1), **{key: ()})
            with (
                xsparse.attach(other, "full", **SMALL),
                pytest.raises(ValueError, match="filled cache of another"),
            ):
                other(prompt(1, 1), **{key: kept})
            got = model(prompt(1, 1), **{key: kept}).logits[0, -1]  # none of that touched it
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_who_resets_the_session_keeps_its_cache():
    model = tiny("llama", "sdpa")
    session = build(model, Settings("full", **SMALL))
    with torch.inference_mode(), bound(model, session) as cache:
        kept = {cache_argument(model): cache}
        first = model(prompt(45), **kept).logits
        for reset in (session.reset, cache.reset):
            reset()
            assert torch.equal(model(prompt(45), **kept).logits, first)


@OFFLOAD
def test_a_sequence_that_was_lost_is_not_continued(offload, monkeypatch):
    model = tiny("llama", "sdpa")
    zeros = torch.zeros

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory left")

    with torch.inference_mode(), xsparse.attach(model, "full", offload=offload, **SMALL) as stats:
        kept = model(prompt(64)).past_key_values
        monkeypatch.setattr(torch, "zeros", full)
        with pytest.raises(torch.OutOfMemoryError):
            model(prompt(900, 1), **{cache_argument(model): kept})
        monkeypatch.setattr(torch, "zeros", zeros)
        engine = stats._session.engine
        if engine.length:  # the engine kept what it had, so it may go on
            assert engine.length == 64
        else:
            with pytest.raises(ValueError, match="earlier sequence"):
                model(prompt(1, 2), **{cache_argument(model): kept})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chunk_size", "512"),
        ("block_size", True),
        ("decode_budget_tokens", 1000.5),
        ("decode_budget_tokens", "abc"),
        ("decode_cache_gb", "1"),
        ("mass_recall", "yes"),
        ("offload", "yes"),
        ("decode_cache_gb", True),
        ("host_memory_gb", "all"),
    ],
)
def test_a_value_of_another_type_is_refused_in_one_line(key, value):
    model = tiny("llama", "sdpa")
    with (
        pytest.raises(ValueError, match=rf"{key}={value}: allowed is [^\n]*$"),
        xsparse.attach(model, **{key: value}),
    ):
        pass


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("transfer", 3, r"ring \| gather"),
        ("attend", None, r"mask \| set"),
        ("reduce_heads", False, r"any \| vote \| mean_score"),
        ("chunk_size", "512", "an integer, not str"),
    ],
)
def test_what_is_allowed_does_not_depend_on_the_type_of_what_is_given(key, value, allowed):
    with pytest.raises(ConfigError, match=rf"^{key}={value}: allowed is {allowed}$"):
        Settings(**{key: value})


@pytest.mark.parametrize(
    ("selector", "key", "value"),
    [
        ("random", "density", "x"),
        ("random", "per_kv_head_chunk", "yes"),
        ("block_mean", "alpha", "0.2"),
        ("block_mean", "alpha", True),
        ("block_mean", "sink_blocks", 1.5),
    ],
)
def test_parameters_of_a_selector_have_types_too(selector, key, value):
    with pytest.raises(ConfigError, match=rf"^selector\.{key}={value}: allowed is [^\n]*$"):
        Settings(selector, selector_options={key: value})


def test_whole_numbers_pass_for_numbers():
    sparse: dict[str, Any] = {"engine": "offload", "decode_selector": "minmax"}
    assert Settings(**sparse, decode_cache_gb=1, host_memory_gb=2, threshold=1).threshold == 1


@pytest.mark.parametrize("graph", ["pair", "step", "all", None, True])
@OFFLOAD
def test_graphs_are_refused_on_a_cpu_before_anything_is_built(graph, offload, monkeypatch):
    monkeypatch.setattr("xsparse.attached.build", None)
    changed: dict[str, Any] = {"offload": offload, "cuda_graph": graph}
    with (
        pytest.raises(ValueError, match=f"^cuda_graph={graph}: allowed is none on cpu$"),
        xsparse.attach(tiny("llama", "sdpa"), **changed),
    ):
        pass


def test_a_host_with_too_little_memory_is_a_memory_error():
    model = tiny("llama", "sdpa")
    with (
        pytest.raises(MemoryError),
        xsparse.attach(model, offload=True, host_memory_gb=1e-6, **SMALL),
    ):
        generate(model, prompt(500))
    assert "MemoryError" in str(xsparse.attach.__doc__)
    assert model.config._attn_implementation == "sdpa"

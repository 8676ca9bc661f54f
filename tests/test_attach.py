"""`attach` as a library: whose cache continues which sequence, and values that are refused."""

import pytest
import torch
from transformers import DynamicCache

import xsparse
from tests.families import prompt, tiny
from xsparse.hf import cache_argument

SMALL = {"block_size": 16, "block_size_ratio": 4, "chunk_size": 64, "stride": 4}
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
        ("transfer", 3),
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


@pytest.mark.parametrize("graph", ["pair", "step"])
def test_graphs_need_a_gpu(graph):
    model = tiny("llama", "sdpa")
    with (
        pytest.raises(ValueError, match=f"cuda_graph={graph}: allowed is none"),
        xsparse.attach(model, offload=graph == "pair", cuda_graph=graph),
    ):
        pass

"""The model through our attention equals the model's own eager attention."""

import pytest
import torch

import xsparse
from tests.families import FAMILIES, prompt, tiny
from xsparse.build import build
from xsparse.hf import bound, cache_argument
from xsparse.settings import Settings

# No length is a multiple of anything here; block 16, page 64, chunk 64.
LENGTHS = [1, 15, 16, 17, 63, 65, 131, 197]
SMALL = {"block_size": 16, "block_size_ratio": 4, "chunk_size": 64, "stride": 4}
ENGINES = [
    {"engine": "resident"},
    {"engine": "offload", "transfer": "ring", "ring_slots": 2},
    {"engine": "offload", "transfer": "ring", "digest": "resident_k"},
    {"engine": "offload", "transfer": "gather"},
]
KEEP_ALL = {"full": {}, "xattention": {"threshold": 1.0}}


def chunked(model, ids, **settings):
    """Logits of every position, prefilled chunk by chunk, and eight greedy tokens after it."""
    session = build(model, Settings(**{**SMALL, **settings}))
    logits, new = [], []
    with torch.inference_mode(), bound(model, session) as cache:
        kept = {cache_argument(model): cache}
        session.phase = "prefill"
        for piece in ids.split(SMALL["chunk_size"], dim=1):
            logits.append(model(input_ids=piece, **kept).logits[0])
        session.phase = "auto"
        token = logits[-1][-1].argmax()
        for _ in range(8):
            new.append(int(token))
            token = model(input_ids=token.view(1, 1), **kept).logits[0, -1].argmax()
    return torch.cat(logits), new, session


def eager(model, ids):
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0]
        new = []
        for _ in range(8):
            new.append(int(model(input_ids=ids).logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([[new[-1]]])], 1)
    return logits, new


# Every length and engine on one family; on the others what differs between families.
CASES = [(f, e, n) for f in FAMILIES for e in ENGINES for n in LENGTHS]
CASES = [c for c in CASES if c[0] == "llama" or (c[1] in ENGINES[:2] and c[2] in (17, 131))]


@pytest.mark.parametrize(("family", "engine", "length"), CASES)
@pytest.mark.parametrize("selector", KEEP_ALL)
def test_keeping_everything_equals_eager(family, selector, engine, length):
    if selector == "xattention" and engine == ENGINES[1]:
        engine = {**engine, "digest": "streamed"}
    ids = prompt(length)
    want, want_new = eager(tiny(family), ids)
    got, got_new, session = chunked(
        tiny(family), ids, selector=selector, **KEEP_ALL[selector], **engine
    )
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert got_new == want_new
    counters = session.counters.read()
    assert counters["mask_kept"] == counters["mask_causal"] == counters["executed"]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_inside_attach_equals_generate_outside(family, offload):
    model = tiny(family, "sdpa")
    ids = prompt(150)
    kwargs = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **kwargs)
    with xsparse.attach(model, "full", offload=offload, **SMALL) as stats:
        got = model.generate(ids, **kwargs)
        again = model.generate(ids, **kwargs)
    assert torch.equal(got, want)
    assert torch.equal(again, want)
    assert stats.mask_density == 1.0
    assert stats.decode_density == 1.0
    assert (stats.transfer_ratio == 1.0) if offload else (stats.transfer_ratio is None)
    assert torch.equal(model.generate(ids, **kwargs), want)


def test_a_sparse_mask_is_really_sparse_and_reported():
    model = tiny("llama", "sdpa")
    with xsparse.attach(model, threshold=0.3, **SMALL) as stats:
        model.generate(prompt(500), max_new_tokens=2, do_sample=False)
    assert stats.mask_density is not None
    assert 0 < stats.mask_density < 0.9
    assert stats.executed_density == stats.mask_density


def test_the_model_is_restored_after_an_exception():
    model = tiny("llama", "sdpa")
    before = set(model.__dict__)
    with pytest.raises(RuntimeError, match="boom"), xsparse.attach(model, **SMALL):
        raise RuntimeError("boom")
    assert model.config._attn_implementation == "sdpa"
    assert set(model.__dict__) == before
    assert not model._forward_pre_hooks
    model.generate(prompt(9), max_new_tokens=1)


def test_what_is_not_supported_is_refused():
    model = tiny("llama", "sdpa")
    ids = prompt(20)
    with xsparse.attach(model, **SMALL):
        with pytest.raises(ValueError, match="batch size 2"):
            model.generate(ids.repeat(2, 1), max_new_tokens=1)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        with pytest.raises(ValueError, match="padded"):
            model.generate(ids, attention_mask=mask, max_new_tokens=1)
        with pytest.raises(ValueError, match="attached already"), xsparse.attach(model, **SMALL):
            pass
        with pytest.raises(ValueError, match="inner module"):
            model.model(ids)
    with (
        pytest.raises(ValueError, match="sliding"),
        xsparse.attach(tiny("mistral", sliding_window=32), **SMALL),
    ):
        pass


def test_a_conversation_continues_in_the_same_cache():
    """A second turn starts inside a block."""
    model = tiny("qwen3", "sdpa")
    first, second = prompt(45), prompt(70, seed=1)
    ids = torch.cat([first, second], 1)
    with torch.inference_mode():
        want = model(input_ids=ids).logits[0, -1]
        for offload in (False, True):
            with xsparse.attach(model, threshold=1.0, offload=offload, **SMALL):
                cache = model(input_ids=first)
                kept = {cache_argument(model): cache[cache_argument(model)]}
                got = model(input_ids=second, **kept).logits[0, -1]
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)

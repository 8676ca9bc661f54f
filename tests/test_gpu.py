"""Engines and the whole way of a prompt on a CUDA device: streams, pinned memory, bf16."""

import random
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import xsparse
from tests.families import prompt, tiny
from xsparse import ops
from xsparse.attention import Rules, Session
from xsparse.build import build as build_session
from xsparse.hf import bound, cache_argument
from xsparse.kv.offload import OffloadEngine
from xsparse.kv.resident import ResidentEngine
from xsparse.kv.shape import CacheShape
from xsparse.kv.streams import CopyLane
from xsparse.selectors import build
from xsparse.settings import Settings
from xsparse.step_graph import StepGraph
from xsparse.steps import Steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LAYERS, Q_HEADS, KV_HEADS, D = 3, 8, 2, 64
BLOCK, RATIO, CHUNK = 128, 4, 512
TOKENS, STEPS = 3000, 5


def session(
    engine_name,
    backend,
    *,
    selector="xattention",
    decode=None,
    budget=1024,
    keep=False,
    dtype=torch.bfloat16,
    **k,
):
    """decode: the statistics a decode step judges blocks by; None reads everything."""
    device = torch.device("cuda")
    shape = CacheShape(LAYERS, Q_HEADS, KV_HEADS, D, BLOCK, RATIO, CHUNK, dtype, device)
    made = ops.get(backend, device)
    rules = Rules(transfer=k.get("transfer", "ring"))
    if engine_name == "resident":
        engine = ResidentEngine(shape, decode)
    else:
        room = (2 if keep else 1) * (budget // BLOCK - 1) if decode else 0
        engine = OffloadEngine(shape, ops=made, stats=decode, step_slots=room, **k)
    options = {} if selector == "full" else {"threshold": 0.6, "stride": 8}
    steps = partial(Steps, budget_tokens=budget, keep=keep) if decode else None
    return Session(engine, build(selector, **options), made, rules=rules, steps=steps)


def run(s, seed=0, tokens=TOKENS, steps=STEPS):
    """Prefill and decode random tokens; outputs [layers][q_heads, tokens, d] and the counters."""
    generator = torch.Generator("cuda").manual_seed(seed)
    s.reset()
    outs = [[] for _ in range(LAYERS)]
    rest = [tokens % CHUNK] if tokens % CHUNK else []
    sizes = [CHUNK] * (tokens // CHUNK) + rest + [1] * steps
    for step, size in enumerate(sizes):
        s.decoding = step >= len(sizes) - steps
        for layer in range(LAYERS):
            q, k, v = (
                torch.randn(h, size, D, generator=generator, device="cuda", dtype=torch.float32)
                for h in (Q_HEADS, KV_HEADS, KV_HEADS)
            )
            q[:, :, :8] += 3 * k.repeat_interleave(Q_HEADS // KV_HEADS, 0)[:, :, :8]
            kv_type = s.engine.shape.dtype
            outs[layer].append(
                s.attend(layer, q.to(kv_type), k.to(kv_type), v.to(kv_type), D**-0.5)
            )
    torch.cuda.synchronize()
    return [torch.cat(o, 1).float() for o in outs], s.counters.read()


OFFLOADS = [
    {"transfer": "ring", "ring_slots": 2},
    {"transfer": "ring", "ring_slots": 8},
    {"transfer": "ring", "ring_slots": 3, "digest": "streamed"},
    {"transfer": "gather"},
    {"transfer": "gather", "digest": "streamed"},
    {"transfer": "gather", "keep": True},
    {"transfer": "gather", "digest": "streamed", "keep": True},
]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("selector", ["full", "xattention", "minmax"])
def test_offload_equals_resident(selector, offload, backend):
    if offload.get("digest") == "streamed" and selector != "xattention":
        pytest.skip("streamed is xattention's")
    decode = "block_mean" if offload.get("digest") == "streamed" else "minmax"
    want, counted = run(session("resident", backend, selector=selector, decode=decode))
    engine = session("offload", backend, selector=selector, decode=decode, **offload)
    for seed in (0, 1, 0):  # a second sequence in between leaves nothing behind
        got, again = run(engine, seed)
    for a, b in zip(want, got, strict=True):
        assert torch.isfinite(b).all()
        # Windows are merged in fp32, so only the rounding of one bf16 output differs.
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    for name in ("mask_kept", "mask_causal", "decode_tiles_kept", "pages_history"):
        assert counted[name] == again[name], name
    if selector != "full":
        assert counted["mask_kept"] < counted["mask_causal"]


@pytest.mark.parametrize("transfer", ["ring", "gather"])
def test_slots_and_repeats_change_no_bit(transfer):
    runs = [
        run(session("offload", "triton", transfer=transfer, ring_slots=slots))[0]
        for slots in (2, 4, 8, 2)
    ]
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("selector", ["full", "xattention"])
def test_delayed_copies_change_no_bit(selector, offload, monkeypatch):
    """Copy streams that run late at random: what is read before it came would show."""
    if offload.get("digest") == "streamed" and selector == "full":
        offload = offload | {"digest": "none"}
    want, counted = run(session("offload", "triton", selector=selector, decode="minmax", **offload))
    running, draw = CopyLane.running, random.Random(0)

    @contextmanager
    def late(lane):
        with running(lane):
            torch.cuda._sleep(draw.choice([0, 0, 20_000, 400_000]))
            yield
            torch.cuda._sleep(draw.choice([0, 0, 20_000, 400_000]))

    monkeypatch.setattr(CopyLane, "running", late)
    got, again = run(session("offload", "triton", selector=selector, decode="minmax", **offload))
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)
    assert counted == again


@pytest.mark.parametrize("transfer", ["ring", "gather"])
def test_two_hundred_prompts_leave_nothing_behind(transfer):
    """Mixed lengths through one engine: each as if alone, and memory does not grow."""
    draw = random.Random(1)
    lengths = [draw.choice([1, 127, 128, 129, 500, 1000, 1663, 2600]) for _ in range(200)]
    one = session("offload", "triton", decode="minmax", keep=True, transfer=transfer)
    alone, held = {}, []
    for i, n in enumerate(lengths):
        # Ten seeds per length, so that twins come far apart.
        outs, counted = run(one, seed=i % 10, tokens=n, steps=3)
        key = n, i % 10
        if key not in alone and i % 7 == 0:
            fresh = session("offload", "triton", decode="minmax", keep=True, transfer=transfer)
            ours, numbers = run(fresh, seed=i % 10, tokens=n, steps=3)
            alone[key] = [x.cpu() for x in ours], numbers
            fresh.engine.close()
            del ours
            del fresh
        if key in alone:
            assert all(map(torch.equal, (x.cpu() for x in outs), alone[key][0])), (i, n)
            assert counted == alone[key][1]
        if i in (60, 199):
            del outs
            held.append((torch.cuda.memory_allocated(), one.engine.memory()))
    assert held[0][1] == held[1][1]
    assert abs(held[1][0] - held[0][0]) < 16 << 20


SMALL = {"block_size": 16, "block_size_ratio": 4, "chunk_size": 64, "stride": 4}
STEP_CASES = [
    {"engine": "resident"},
    {"engine": "resident", "decode_selector": "minmax"},
    {"engine": "resident", "decode_selector": "block_mean"},
    {"engine": "offload", "decode_selector": "minmax"},
    {"engine": "offload", "decode_selector": "minmax", "digest": "none", "selector": "full"},
    {"engine": "offload", "decode_selector": "block_mean", "decode_cache_gb": 0.001},
]


@pytest.mark.parametrize("case", STEP_CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_a_captured_step_decodes_what_eager_steps_do(case):
    """Across three page edges, twice, with a shorter prompt in between."""
    model = tiny("llama", head_dim=16).cuda()
    settings = {**SMALL, "decode_budget_tokens": 96, "transfer": "gather", **case}

    def decode(whole_steps, n, tokens):
        graph = "step" if whole_steps else "none"
        built = build_session(model, Settings(**settings, cuda_graph=graph))
        with torch.inference_mode(), bound(model, built) as cache:
            kept = {cache_argument(model): cache}
            steps = StepGraph(model, built, kept) if whole_steps else None
            found = []
            for length in n:
                built.reset()
                built.engine.reserve(512)
                built.phase = "prefill"
                logits = model(input_ids=prompt(length).cuda(), **kept).logits
                built.phase = "auto"
                token = logits[0, -1].argmax()
                if steps:
                    found.append(steps.generate(token, tokens, ()))
                    counted = built.counters.read()
                    continue
                new = []
                for _ in range(tokens):
                    token = model(input_ids=token.view(1, 1), **kept).logits[0, -1].argmax()
                    new.append(int(token))
                found.append(new)
                counted = built.counters.read()
        built.engine.close()
        return found, counted

    want, counted = decode(False, (197, 30, 190), 210)
    got, again = decode(True, (197, 30, 190), 210)
    assert got == want
    for name in ("decode_tiles", "decode_tiles_kept", "decode_bytes_h2d", "decode_bytes_d2h"):
        assert counted.get(name, 0) == again.get(name, 0), name


def test_two_graphs_of_attention_equal_eager():
    model = tiny("llama", head_dim=16).cuda()
    ids = prompt(300).cuda()
    results = []
    for graph in ("none", "pair"):
        settings = Settings(selector="full", engine="offload", cuda_graph=graph, **SMALL)
        built = build_session(model, settings)
        with torch.inference_mode(), bound(model, built) as cache:
            kept = {cache_argument(model): cache}
            built.phase = "prefill"
            for piece in ids.split(64, dim=1):
                logits = model(input_ids=piece, **kept).logits
            built.phase = "auto"
            new = []
            for _ in range(70):
                token = logits[0, -1].argmax()
                new.append(int(token))
                logits = model(input_ids=token.view(1, 1), **kept).logits
        results.append(new)
        built.engine.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_backends_agree_in_fp32(backend):
    want, counted = run(session("resident", "naive", dtype=torch.float32))
    got, again = run(session("resident", backend, dtype=torch.float32))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, atol=5e-3, rtol=5e-3)
    assert abs(counted["mask_kept"] - again["mask_kept"]) <= 1e-3 * counted["mask_kept"]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_generate_on_cuda_equals_eager(family, offload):
    model = tiny(family, head_dim=16).cuda()
    ids = prompt(197).cuda()
    kwargs = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **kwargs)
    for selector, more in (("full", {}), ("xattention", {"threshold": 1.0})):
        with xsparse.attach(
            model, selector, offload=offload, ops_backend="torch", **SMALL, **more
        ) as stats:
            got = model.generate(ids, **kwargs)
        assert torch.equal(got, want)
        assert stats.mask_density == 1


def test_no_host_read_in_the_layer_loop_of_a_resident_prefill():
    s = session("resident", "triton")
    run(s)  # compiles, and probes the dense kernels
    s.reset()
    q, k, v = (
        torch.randn(h, CHUNK, D, device="cuda", dtype=torch.bfloat16)
        for h in (Q_HEADS, KV_HEADS, KV_HEADS)
    )
    s.engine.reserve(4 * CHUNK)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            for layer in range(LAYERS):
                s.attend(layer, q, k, v, D**-0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")

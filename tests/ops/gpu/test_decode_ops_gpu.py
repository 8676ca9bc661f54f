"""The operators of a decode step on a GPU, with a store in pinned host memory (pytest -m gpu)."""

import pytest
import torch

from tests.ops import decode_checks as checks
from xsparse.ops import torch_backend, triton_backend
from xsparse.ops.decode import RowPlace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or triton_backend.why_not("cuda") is not None,
        reason="no GPU for the Triton kernels",
    ),
]

FORMS = pytest.mark.parametrize("ops", [triton_backend, torch_backend], ids=lambda o: o.name)
FLOATS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
EDGES = [p for b in range(1, 40) for p in (b * 4 - 1, b * 4)]


@FORMS
@FLOATS
def test_tokens_land_in_every_place(ops, dtype):
    checks.put(ops, "cuda", dtype, pinned=True)


@FORMS
@FLOATS
def test_statistics_follow_the_tokens(ops, dtype):
    checks.fold(ops, "cuda", dtype)


@FORMS
@FLOATS
@pytest.mark.parametrize("kind", ["minmax", "block_mean"])
@pytest.mark.parametrize("position", [0, 3, 4, 8, 70 * 4, 72 * 4 + 3])
def test_scores(ops, dtype, kind, position):
    checks.scores(ops, "cuda", dtype, kind=kind, position=position, blocks=73, head_dim=128)


@FORMS
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("budget", "slots"), [(1, 1), (3, 5), (8, 64), (20, 32)])
def test_choice(ops, halves, keep, budget, slots):
    checks.choose(
        ops,
        "cuda",
        budget=budget,
        slots=slots,
        blocks=41,
        positions=[0, 1, *EDGES],
        ratio=3,
        halves=halves,
        keep=keep,
    )


@FORMS
@pytest.mark.parametrize(
    ("budget", "slots", "blocks"), [(16, 64, 1024), (16, 16, 4096), (128, 512, 8192)]
)
def test_choice_among_many_blocks(ops, budget, slots, blocks):
    positions = [4 * (blocks - 20) + i for i in range(60)]
    checks.choose(
        ops,
        "cuda",
        budget=budget,
        slots=slots,
        blocks=blocks,
        positions=positions,
        heads=8,
        group=4,
    )


@FORMS
def test_gather_to_places(ops):
    source = torch.randn(6, 128, 128).bfloat16()
    checks.gather_to(ops, source.pin_memory(), "cuda")
    checks.gather_to(ops, source.cuda(), "cuda")


def test_pageable_memory_is_refused():
    place = RowPlace(torch.zeros(8, 16), 8, 0, 8, 0)
    token = torch.zeros(1, 1, 16, device="cuda")
    with pytest.raises(ValueError, match="pinned"):
        triton_backend.put_token(token, token, checks.at(0, "cuda"), [place], [])


@pytest.mark.parametrize("kind", ["minmax", "block_mean"])
def test_a_step_in_a_graph_is_the_step_outside(kind):
    """300 replays; the position moves on the device. Extremes of whole numbers are exact in every
    form, so there the torch form is the twin."""
    twin_ops = torch_backend if kind == "minmax" else triton_backend
    steps = [checks.Step(ops, "cuda", kind, capacity=320) for ops in (triton_backend, twin_ops)]
    replayed, twin = steps
    for step in steps:  # compile before the capture
        step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.run()
    for i in range(300):
        graph.replay()
        twin.run()
        if i % 50 == 49 or i < 3:
            torch.cuda.synchronize()
            replayed.same_as(twin)
            replayed.holds_what_it_names()
    assert replayed.position.item() == 301
    assert replayed.out.moved.item() > 0

"""The operators of a decode step on the CPU: the torch form, and the kernels in the interpreter.

The interpreter is chosen when Triton is first imported, so the kernels run in a process of their
own, started by the last test that an ordinary run sees.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops import decode_checks as checks
from xsparse import ops as backends
from xsparse.ops.decode import Chosen, RowPlace, TileGeometry, empty_state

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ops = backends.get("triton" if INTERPRETED else "torch", "cpu")
SIZE = 4

if not INTERPRETED:

    def test_the_kernels_in_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(
            command,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
    def test_other_types(dtype):
        checks.put(ops, "cpu", dtype)
        checks.fold(ops, "cpu", dtype)
        checks.scores(ops, "cpu", dtype, kind="minmax", position=14)

    @pytest.mark.parametrize("kind", ["minmax", "block_mean"])
    def test_a_sequence_of_whole_steps(kind):
        step = checks.Step(ops, "cpu", kind, capacity=320)
        for _ in range(320):
            step.run()
            step.holds_what_it_names()
        assert 0 < step.out.moved.item() < 320 * 2 * 2 * 4  # some were there already


def test_tokens_land_in_every_place():
    checks.put(ops, "cpu", torch.float32)


def test_statistics_follow_the_tokens():
    checks.fold(ops, "cpu", torch.float32)


@pytest.mark.parametrize("kind", ["minmax", "block_mean"])
@pytest.mark.parametrize("position", [0, 3, 4, 7, 8, 14, 19])
def test_scores(kind, position):
    checks.scores(ops, "cpu", torch.float32, kind=kind, position=position)


def test_scores_of_more_blocks_than_a_program_takes():
    checks.scores(ops, "cpu", torch.float32, kind="minmax", position=70 * SIZE, blocks=73)


ALL = list(range(0, 9 * SIZE))
EDGES = [p for b in range(0, 40, 2) for p in (b * SIZE - 1, b * SIZE)][1:]


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("keep", [True, False])
def test_choice_from_the_first_token_on(halves, keep):
    checks.choose(ops, "cpu", budget=3, slots=5, blocks=10, positions=ALL, halves=halves, keep=keep)


@pytest.mark.parametrize(("budget", "slots"), [(1, 1), (2, 2), (4, 9), (8, 64)])
def test_choice_at_the_edges_of_blocks(budget, slots):
    checks.choose(ops, "cpu", budget=budget, slots=slots, blocks=41, positions=EDGES, ratio=3)


def test_a_budget_larger_than_the_sequence():
    checks.choose(ops, "cpu", budget=20, slots=32, blocks=6, positions=[0, 3, 4, 11, 12, 23])


def test_a_position_chosen_again():
    """A warm-up before a capture repeats a position, and may leave later ones in the cache."""
    positions = [50, 50, 50, 51, 70, 40, 41]
    checks.choose(ops, "cpu", budget=3, slots=4, blocks=20, positions=positions)


@settings(deadline=None, max_examples=5 if INTERPRETED else 60)
@given(
    budget=st.integers(1, 6),
    more_slots=st.integers(0, 6),
    start=st.integers(0, 60),
    strides=st.lists(st.integers(0, 3), max_size=12),
    halves=st.integers(1, 2),
    ratio=st.integers(1, 4),
    group=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_choice_of_any_sequence(budget, more_slots, start, strides, halves, ratio, group, seed):
    positions = [start]
    for stride in strides:
        positions.append(positions[-1] + stride)
    checks.choose(
        ops,
        "cpu",
        budget=budget,
        slots=budget + more_slots,
        blocks=25,
        positions=positions,
        halves=halves,
        ratio=ratio,
        group=group,
        seed=seed,
    )


def test_many_blocks_and_slots():
    checks.choose(
        ops, "cpu", budget=128, slots=512, blocks=2048, positions=[8190, 8191], heads=1, group=1
    )


def test_gather_to_places():
    checks.gather_to(ops, torch.randn(6, 4, 8), "cpu")


def test_wrong_arguments_are_refused():
    place = RowPlace(torch.zeros(8, 2), 8, 0, 8, 0)
    token, position = torch.zeros(1, 1, 2), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 places of one tensor: allowed is at most 2"):
        ops.put_token(token, token, position, [place] * 3, [])
    with pytest.raises(ValueError, match=r"rows of shape \(2, 8\): allowed is"):
        RowPlace(torch.zeros(8, 2).T, 8, 0, 8, 0)
    stats = torch.zeros(1, 1, 2, 2)
    with pytest.raises(ValueError, match=r"kind=mean: allowed is minmax \| block_mean"):
        ops.fold_token(token, position, stats, kind="mean", block_size=4)
    with pytest.raises(ValueError, match=r"kind=mean: allowed is minmax \| block_mean"):
        ops.step_scores(token, stats, position, kind="mean", block_size=4, scaling=1.0)
    with pytest.raises(ValueError, match=r"halves=3: allowed is 1 \| 2"):
        TileGeometry(4, 1, 3, 4)
    with pytest.raises(ValueError, match="slots=0: allowed is >= 1"):
        TileGeometry(4, 1, 2, 0)
    with pytest.raises(ValueError, match="resident_blocks=0 with halves=1"):
        TileGeometry(4, 1, 1, 4)
    out = Chosen.allocate(1, 1, 5, 2, "cpu")
    with pytest.raises(ValueError, match="slots=4: allowed is >= 5"):
        ops.choose_tiles(
            torch.zeros(1, 8),
            position,
            empty_state(1, 4, "cpu"),
            out,
            geometry=TileGeometry(4, 1, 2, 4),
        )

"""The Triton operators on the CPU, in Triton's interpreter: fp32 and fp16, small shapes.

The interpreter is chosen when Triton is first imported, so these tests run in a process of their
own, started by the one test that an ordinary run sees.
"""

import os
import subprocess
import sys

import pytest
import torch

from tests.ops.cases import Case

SMALL = [
    Case(1, block_size=32),
    Case(33, block_size=32),
    Case(64, 32, block_size=32, q_heads=4, kv_heads=2),
    Case(100, 67, block_size=32, head_dim=80),  # q_start divides by neither block nor stride
    Case(97, 1, block_size=32, q_heads=4, kv_heads=2),
    Case(70, 54, block_size=16, stride=16, q_heads=7, kv_heads=1, content="structured"),
    Case(129, 9, q_heads=2, content="huge"),
    Case(130, 130, q_heads=1, content="equal"),
    Case(40, 20, block_size=16, stride=4, content="zeros"),
]

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(
            command,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

else:
    from tests.ops import triton_checks as checks

    FLOATS = [torch.float32, torch.float16]

    @pytest.mark.parametrize("case", SMALL, ids=str)
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_scores(case, dtype):
        checks.scores(case, "cpu", dtype)

    @pytest.mark.parametrize(
        "case",
        [Case(150, 61, block_size=32, q_heads=2), Case(96, 32, block_size=16, stride=4)],
        ids=str,
    )
    def test_streamed_scores(case):
        checks.streamed_scores(case, 64, "cpu")

    def test_scores_of_any_strides():
        from xsparse.ops import triton_backend

        case = Case(96, 64, block_size=32, q_heads=4, kv_heads=2)
        from tests.ops.cases import make

        q, k, _ = make(case)
        kwargs = {"block_size": case.block_size, **checks.place(case)}
        want = triton_backend.antidiagonal_scores(q, k, **kwargs)
        token_major = q.transpose(0, 1).contiguous().transpose(0, 1)
        cache = torch.zeros(2, 500, 16)
        cache[:, :96] = k
        got = triton_backend.antidiagonal_scores(token_major, cache[:, :96], **kwargs)
        assert torch.equal(got, want)

    @pytest.mark.parametrize("threshold", [0.0, 0.3, 0.9, 1.0, torch.tensor([0.2, 0.9, 1.0])])
    def test_selection(threshold):
        checks.selection(checks.causal_scores(3, 4, 9), threshold, 5)
        checks.selection(checks.causal_scores(3, 3, 3), threshold, 0)

    @pytest.mark.parametrize("threshold", [0.5, 0.95])
    def test_selection_of_rows_longer_than_a_step(threshold):
        checks.selection(checks.causal_scores(1, 2, 600), threshold, 598)

    def test_selection_of_ties():
        checks.selection(torch.full((1, 3, 40), 1 / 3), 0.5, 37)
        checks.selection(torch.zeros(1, 2, 8), 0.5, 6)

    def test_thresholds_of_a_wrong_shape_are_refused():
        from xsparse.ops import triton_backend

        with pytest.raises(ValueError, match="threshold of shape"):
            triton_backend.select_blocks(torch.ones(3, 1, 1), torch.ones(2), q_block_start=0)

    @pytest.mark.parametrize("case", SMALL, ids=str)
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_attention(case, dtype):
        checks.attention(case, 0.5, "cpu", dtype)

    @pytest.mark.parametrize(
        "case",
        [
            Case(150, 61, block_size=32, q_heads=4, kv_heads=2),
            Case(150, 1, block_size=32, q_heads=4, kv_heads=2),
        ],
        ids=str,
    )
    def test_attention_in_windows(case):
        checks.attention_in_windows(case, "cpu", torch.float32)

    def test_decode_with_the_position_on_the_device():
        case = Case(150, 1, block_size=32, q_heads=4, kv_heads=2)
        from tests.ops.cases import make, random_mask, tiles
        from xsparse.ops import triton_backend

        q, k, v = make(case)
        lists = triton_backend.block_lists(random_mask(case, 0.5))
        kv = tiles(k, v, 32)
        want = triton_backend.block_sparse_attention(q, kv, lists, q_start=149, scaling=0.2)
        got = triton_backend.block_sparse_attention(
            q, kv, lists, q_start=torch.tensor(149), scaling=0.2
        )
        assert torch.equal(got[0], want[0])

    @pytest.mark.parametrize("queries", [1, 5])
    def test_empty_rows(queries):
        checks.empty_rows("cpu", torch.float32, queries)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_merge(dtype):
        checks.merging("cpu", dtype)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_gather(dtype):
        checks.gathering(torch.randn(6, 16, 24).to(dtype), "cpu")

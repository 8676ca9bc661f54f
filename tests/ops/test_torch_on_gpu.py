"""The torch forms and the dense kernels on a CUDA device (run with: pytest -m gpu)."""

import pytest
import torch

from tests.ops import oracle
from tests.ops.cases import Case, make, random_mask, tiles
from xsparse.ops import naive_backend, torch_backend
from xsparse.ops.tiles import block_lists

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CASES = [
    Case(1025, 129, 8, 2, head_dim=128),
    Case(1024, 1, 8, 2, head_dim=128),
    Case(1000, 360, 9, 3, head_dim=64),
    Case(700, 37, 28, 4, head_dim=80),
    Case(513, 513, 4, 1, head_dim=256, content="structured"),
]
HALF = [torch.bfloat16, torch.float16]


def check(case, got, want, dtype):
    out, lse = (t.double().cpu() for t in got)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    assert not out.isnan().any()
    torch.testing.assert_close(out, want[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, want[1], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense(case, dtype):
    q, k, v = make(case, device="cuda", dtype=dtype)
    u = torch.arange(case.length)
    for causal in (True, False):
        visible = ((u <= u[case.q_start :, None]) | (not causal)).expand(case.q_heads, -1, -1)
        want = oracle.attention(q.cpu(), k.cpu(), v.cpu(), scaling=case.scaling, visible=visible)
        got = torch_backend.dense_attention(q, k, v, scaling=case.scaling, causal=causal)
        check(case, got, want, dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_fused_kernel_runs(dtype, head_dim):
    prefill = torch.zeros(8, 512, head_dim, device="cuda", dtype=dtype)
    assert torch_backend.dense_kernel(prefill) in ("cudnn", "flash2")
    assert torch_backend.dense_kernel(prefill[:, :1]) in ("cudnn", "flash2")
    assert torch_backend.dense_kernel(prefill.float()) == "efficient"


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_sparse(case, dtype):
    q, k, v = make(case, device="cuda", dtype=dtype)
    mask = random_mask(case, 0.4, device="cuda")
    got = torch_backend.block_sparse_attention(
        q, tiles(k, v, 128), block_lists(mask), q_start=case.q_start, scaling=case.scaling
    )
    visible = oracle.token_mask(case, mask.cpu())
    want = oracle.attention(q.cpu(), k.cpu(), v.cpu(), scaling=case.scaling, visible=visible)
    check(case, got, want, dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_and_selection(case):
    q, k, _ = make(case, device="cuda")
    at = {"stride": 8, "block_size": 128, "q_start": case.q_start, "scaling": case.scaling}
    scores = torch_backend.antidiagonal_scores(q, k, **at)
    torch.testing.assert_close(
        scores.double().cpu(),
        oracle.antidiagonal_scores(case, q.cpu(), k.cpu()),
        atol=4e-6,
        rtol=1e-6,
    )
    start = case.q_start // 128
    fast = torch_backend.select_blocks(scores, 0.8, q_block_start=start)
    assert torch.equal(fast, naive_backend.select_blocks(scores, 0.8, q_block_start=start))


def test_gather_from_host_memory():
    source = torch.randn(9, 4, 3).pin_memory()
    index = torch.tensor([7, 0, 7], dtype=torch.int32, device="cuda")
    out = torch.empty(3, 4, 3, device="cuda")
    torch_backend.gather_tiles(source, index, out)
    assert torch.equal(out.cpu(), source[[7, 0, 7]])

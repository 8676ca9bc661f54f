"""FlexAttention and FlashAttention-4 as backends: equal masks give equal output (pytest -m gpu)."""

import pytest
import torch

from tests.ops import oracle
from tests.ops import triton_checks as checks
from tests.ops.cases import Case, make, random_mask, tiles
from tests.ops.test_peer_backends import resident
from xsparse import ops
from xsparse.ops.tiles import block_lists

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

CASES = [
    Case(1024, q_heads=8, kv_heads=2, head_dim=64),
    Case(1000, 360, q_heads=9, kv_heads=3, head_dim=64),
    Case(1001, 233, q_heads=4, kv_heads=1, head_dim=128),
    Case(700, 37, q_heads=2, kv_heads=2, head_dim=128),
    Case(1025, q_heads=4, kv_heads=2, head_dim=128, content="structured"),
]


@pytest.fixture(params=["flex", "fa4"])
def backend(request):
    try:
        return ops.get(request.param, "cuda")
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_output_and_lse(backend, case, dtype):
    q, k, v = make(case, dtype=dtype)
    mask = random_mask(case, 0.4)
    want, want_lse = oracle.attention(
        q, k, v, scaling=case.scaling, visible=oracle.token_mask(case, mask)
    )
    out, lse = backend.block_sparse_attention(
        q.cuda(),
        resident(k.cuda(), v.cuda(), 128),
        block_lists(mask.cuda()),
        q_start=case.q_start,
        scaling=case.scaling,
    )
    assert out.dtype == dtype
    assert not out.isnan().any()
    tolerance = checks.OUTPUT_TOLERANCE[dtype]
    torch.testing.assert_close(out.double().cpu(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=1e-3, rtol=0)


def test_empty_rows(backend):
    case = Case(512, 256, q_heads=4, kv_heads=2, head_dim=64)
    q, k, v = (x.cuda() for x in make(case, dtype=torch.bfloat16))
    mask = random_mask(case, 1.0)
    mask[1] = False
    out, lse = backend.block_sparse_attention(
        q,
        resident(k, v, 128),
        block_lists(mask.cuda()),
        q_start=case.q_start,
        scaling=case.scaling,
    )
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    assert lse[0].isfinite().all()


def test_one_query_token(backend):
    case = Case(300, 1, q_heads=4, kv_heads=2, head_dim=64)
    q, k, v = make(case, dtype=torch.bfloat16)
    mask = random_mask(case, 0.5)
    want, want_lse = oracle.attention(
        q, k, v, scaling=case.scaling, visible=oracle.token_mask(case, mask)
    )
    out, lse = backend.block_sparse_attention(
        q.cuda(),
        resident(k.cuda(), v.cuda(), 128),
        block_lists(mask.cuda()),
        q_start=case.q_start,
        scaling=case.scaling,
    )
    checks.close(case, out, lse, want, want_lse, torch.bfloat16)


def test_scattered_tiles_are_refused(backend):
    case = Case(512, 256, q_heads=4, kv_heads=2, head_dim=64)
    q, k, v = (x.cuda() for x in make(case, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="only where they are whole and in order"):
        backend.block_sparse_attention(
            q,
            tiles(k, v, 128),
            block_lists(random_mask(case, 1.0, device="cuda")),
            q_start=case.q_start,
            scaling=case.scaling,
        )

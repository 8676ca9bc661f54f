import pytest
import torch

from xsparse import ops
from xsparse.ops import bounds

FUNCTIONS = [
    "antidiagonal_scores",
    "antidiagonal_stats",
    "antidiagonal_block_sums",
    "merge_stats",
    "select_blocks",
    "attention_mass",
    "block_sparse_attention",
    "dense_attention",
    "dense_kernel",
    "merge_states",
    "gather_tiles",
    "block_lists",
]


@pytest.mark.parametrize("name", ["torch", "naive"])
def test_a_backend_has_every_operator(name):
    backend = ops.get(name, "cpu")
    assert backend.name == name
    assert all(callable(getattr(backend, f)) for f in FUNCTIONS)


def test_auto_is_torch_on_a_cpu():
    assert ops.get("auto", "cpu").name == "torch"
    assert ops.get().name == "torch"


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"ops_backend=cutlass: allowed is auto \| triton"):
        ops.get("cutlass", "cpu")


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"ops_backend=triton cannot run on cpu: .+"):
        ops.get("triton", "cpu")


@pytest.mark.parametrize("reason", [None, "it is too old"])
def test_auto_asks_what_the_device_can_do(monkeypatch, reason):
    monkeypatch.setattr(ops, "_why_not", lambda name, device: reason if name == "triton" else None)
    monkeypatch.setattr(ops, "_module", lambda name: name)
    assert ops.get("auto", "cuda") == ("triton" if reason is None else "torch")


@pytest.mark.parametrize("length", [1, 127, 128, 300])
def test_block_minmax_and_bounds(length):
    k = torch.randn(2, length, 8)
    low, high = bounds.block_minmax(k, 128)
    q = torch.randn(6, 5, 8)
    bound = bounds.block_bounds(q, low, high, scaling=0.3)
    assert bound.shape == (6, 5, -(-length // 128))
    for b in range(low.shape[1]):
        block = k[:, b * 128 : (b + 1) * 128]
        assert torch.equal(low[:, b], block.amin(1))
        assert torch.equal(high[:, b], block.amax(1))
        kk = block.repeat_interleave(3, 0)
        best = torch.maximum(q * kk.amin(1)[:, None], q * kk.amax(1)[:, None]).sum(-1) * 0.3
        torch.testing.assert_close(bound[..., b], best)
        assert (bound[..., b] >= (q @ kk.mT * 0.3).amax(-1) - 1e-5).all()

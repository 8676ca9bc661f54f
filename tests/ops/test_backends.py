import pytest
import torch

from xsparse import ops
from xsparse.ops import bounds


@pytest.mark.parametrize("name", ops.BACKENDS)
def test_a_backend_has_every_operator(name):
    backend = ops._module(name)  # also those that cannot run here
    assert backend.name == name
    assert not [f for f in ops.OPERATORS if not callable(getattr(backend, f, None))]


@pytest.mark.parametrize("name", ["torch", "naive"])
def test_these_backends_run_on_a_cpu(name):
    assert ops.get(name, "cpu").name == name


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
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_block_mean_and_logits(length, dtype):
    k = (torch.randn(2, length, 8) + 30).to(dtype)
    mean = bounds.block_mean(k, 128)
    assert mean.dtype == torch.float32
    q = torch.randn(6, 5, 8)
    logits = bounds.block_logits(q, mean, scaling=0.3)
    assert logits.shape == (6, 5, -(-length // 128))
    for b in range(mean.shape[1]):
        block = k[:, b * 128 : (b + 1) * 128].float()
        torch.testing.assert_close(mean[:, b], block.mean(1))
        every = q @ block.repeat_interleave(3, 0).mT * 0.3
        torch.testing.assert_close(logits[..., b], every.mean(-1), atol=1e-4, rtol=1e-5)


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

"""Dense attention by the fastest kernel at hand, with its log-sum-exp.

The kernels are torch's own, called below `scaled_dot_product_attention` because that does not
return the log-sum-exp. Each is tried once per (device, dtype, head_dim) on a small input and used
only if it runs and is right, so what a build or a chip lacks is found by asking, not by name.

Where causality cuts only the end, history goes through the kernel uncut with the query heads of a
KV head folded into rows (so K is read once per group), the last C x C square causally, and the two
are merged: this needs no kernel to agree on where a rectangular causal mask is anchored.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from xsparse.ops.attention import naive
from xsparse.ops.merge.naive import merge_states

aten = torch.ops.aten
PREFILL_QUERIES = 128  # below this FA2, which splits over keys, beats cuDNN
MATH_NUMBERS = 16 << 20  # logits the math form holds at once


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    causal: bool,
    out_dtype: torch.dtype | None = None,
    merge: Callable = merge_states,
) -> tuple[Tensor, Tensor]:
    """See naive.dense_attention. merge: a backend's own form of merge_states."""
    kernel = dense_kernel(q)
    queries, keys = q.shape[1], k.shape[1]
    history = keys - queries if causal else keys
    if queries == 1:
        history = keys  # one query sees every key
    parts = []
    if history:
        parts.append(_folded(kernel, q, k[:, :history], v[:, :history], scaling))
    if history < keys:
        parts.append(_square(kernel, q, k[:, history:], v[:, history:], scaling))
    out, lse = parts[0] if len(parts) == 1 else merge(*zip(*parts, strict=True))
    return out.to(out_dtype or q.dtype), lse


def dense_kernel(q: Tensor) -> str:
    """Name of the kernel dense_attention runs: cpu-flash, cudnn, flash2, efficient or math.

    The first call for a (device, dtype, head_dim) tries kernels, which must not happen while a
    CUDA graph is being captured.
    """
    if q.device.type == "cpu":
        names = ("cpu-flash",)
    elif q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16):
        names = ("cudnn", "flash2") if q.shape[1] >= PREFILL_QUERIES else ("flash2", "cudnn")
    elif q.device.type == "cuda":
        names = ("efficient",)
    else:
        names = ()
    for name in names:
        if _works(name, q.device, q.dtype, q.shape[-1]):
            return name
    return "math"


def _folded(kernel: str, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key."""
    rows = q.reshape(len(k), -1, q.shape[-1])
    out, lse = _KERNELS[kernel](rows[None], k[None], v[None], False, scaling)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def _square(kernel: str, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Causal, as many queries as keys."""
    if kernel in ("cudnn", "flash2"):  # they pair query heads with KV heads themselves
        out, lse = _KERNELS[kernel](q[None], k[None], v[None], True, scaling)
    else:  # KV heads as batch, the query heads of each share K with stride 0
        group = len(q) // len(k)
        q4 = q.unflatten(0, (len(k), group))
        k4, v4 = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
        out, lse = _KERNELS[kernel](q4, k4, v4, True, scaling)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


# Each: q [b, heads, C, d], k and v [b, kv_heads, N, d] -> out like q, lse [b, heads, C]


def _cpu_flash(q, k, v, causal, scaling):
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scaling)


def _cudnn(q, k, v, causal, scaling):
    out, lse = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scaling
    )[:2]
    return out, lse.reshape(q.shape[:-1])  # some versions add a dimension of one


def _flash2(q, k, v, causal, scaling):
    out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scaling)[
        :2
    ]
    return out, lse[..., : q.shape[2]]


def _efficient(q, k, v, causal, scaling):
    out, lse = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scaling
    )[:2]
    return out, lse[..., : q.shape[2]]  # padded to a multiple of 32


def _math(q, k, v, causal, scaling):
    parts = []
    step = max(1, MATH_NUMBERS // (q.shape[0] * q.shape[1] * k.shape[2]))
    dtype = torch.promote_types(q.dtype, torch.float32)
    for begin in range(0, q.shape[2], step):
        rows = q[:, :, begin : begin + step]
        seen = begin + rows.shape[2] if causal else k.shape[2]
        logits = rows.to(dtype) @ k[:, :, :seen].to(dtype).mT * scaling
        if causal:
            t = begin + torch.arange(rows.shape[2], device=q.device)[:, None]
            logits.masked_fill_(torch.arange(seen, device=q.device) > t, -torch.inf)
        lse = torch.logsumexp(logits, -1)
        out = (logits - lse[..., None]).exp_() @ v[:, :, :seen].to(dtype)
        parts.append((out.to(q.dtype), lse))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


_KERNELS = {
    "cpu-flash": _cpu_flash,
    "cudnn": _cudnn,
    "flash2": _flash2,
    "efficient": _efficient,
    "math": _math,
}


@functools.cache
def _works(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel runs here and agrees with the definition, in both uses."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(heads, 128, head_dim, generator=generator).to(device, dtype)
        for heads in (4, 2, 2)
    )
    scaling = head_dim**-0.5
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    for run, causal in ((_folded, False), (_square, True)):
        want = naive.dense_attention(q, k, v, scaling=scaling, causal=causal)
        try:
            got = run(name, q, k, v, scaling)
        except (RuntimeError, NotImplementedError, AttributeError, ValueError):
            return False
        for x, y in zip(got, want, strict=True):
            if not torch.allclose(x.float(), y.float(), atol=tolerance, rtol=tolerance):
                return False
    return True

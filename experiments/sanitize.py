"""Every Triton kernel and a small offloaded session, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python3 -m experiments.sanitize [NAME ...]

A checked program runs ten to fifty times slower, so inputs and references are made on the CPU and
little but our kernels runs on the GPU. Set PYTORCH_NO_CUDA_MEMORY_CACHING=1 for memcheck: inside
PyTorch's pool a read past the end of a tensor is a read of the pool. NAME picks runs whose name
contains it. Exit code 1 if a result is wrong.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments import kernel_checks as checks
from experiments.kernel_checks import Shape
from xsparse import selectors
from xsparse.attention import Rules, Session
from xsparse.kv.offload import OffloadEngine
from xsparse.kv.resident import ResidentEngine
from xsparse.kv.shape import CacheShape
from xsparse.ops import torch_backend, triton_backend
from xsparse.ops.attention import hopper
from xsparse.ops.attention.hopper import HopperTiling
from xsparse.ops.attention.kernel import Tiling
from xsparse.ops.tiles import BlockLists, KVTiles
from xsparse.steps import Steps

BF16, FP32 = torch.bfloat16, torch.float32
LONG = Shape(700, 333, 4, 2, 64)
TOLERANCE = {BF16: 3e-2, FP32: 1e-4}


def main(names: list[str]) -> int:
    if not torch.cuda.is_available():
        raise SystemExit("experiments.sanitize needs a CUDA GPU")
    device = torch.device("cuda")
    failed = 0
    for name, run in runs(device).items():
        if names and not any(n in name for n in names):
            continue
        error, limit = run()
        failed += not error <= limit
        print(f"{'OK' if error <= limit else 'FAIL'} {name}: {error:.1e} <= {limit}", flush=True)
    return 1 if failed else 0


def runs(device: torch.device) -> dict[str, Callable[[], tuple[float, float]]]:
    wide, short = replace(LONG, head_dim=128), Shape(200, 70, 4, 2, 64, 8, 64)
    found: dict[str, Callable[[], tuple[float, float]]] = {
        "scores bf16": partial(scores, LONG, BF16, device),
        "scores bf16 stride 16": partial(scores, replace(wide, stride=16), BF16, device),
        "scores fp32": partial(scores, LONG, FP32, device),
        "streamed scores": partial(streamed, LONG, FP32, device),
        "select one threshold": partial(select, 0.9, device),
        "select by head": partial(select, torch.tensor([0.2, 0.9, 1.0]), device),
        "attention plain bf16": partial(attention, wide, BF16, device, Tiling()),
        "attention plain d=64": partial(attention, LONG, BF16, device, Tiling(keys=64, stages=3)),
        "attention plain fp32": partial(attention, LONG, FP32, device, None),
        "attention blocks of 64": partial(attention, short, BF16, device, None),
        "decode": partial(attention, replace(LONG, queries=1), BF16, device, None),
        "decode, position on the device": partial(
            attention, replace(LONG, queries=1), BF16, device, None, on_device=True
        ),
        "merge": partial(merge, device),
        "gather": partial(gather, device),
        "offload ring": partial(offload, device, transfer="ring", digest="none", ring_slots=2),
        "offload gather": partial(offload, device, transfer="gather"),
        "offload decode steps": partial(offload, device, transfer="gather", steps=3),
    }
    q, kv = torch.empty(4, 8, 64, dtype=BF16, device=device), pools(LONG, BF16, device)[1]
    if hopper.why_not(q, kv) is None:
        for tiling in (HopperTiling(), HopperTiling(stages=3), HopperTiling(persistent=True)):
            for shape in (LONG, wide):
                found[f"attention d={shape.head_dim} {tiling}"] = partial(
                    attention, shape, BF16, device, tiling
                )
    return found


def scores(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    q, k, _ = checks.draw(shape, "cpu", dtype)
    place, size = _place(shape), shape.block
    got = triton_backend.antidiagonal_scores(q.to(device), k.to(device), block_size=size, **place)
    want = torch_backend.antidiagonal_scores(q.double(), k.double(), block_size=size, **place)
    return _apart(got, want), 2e-5


def streamed(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    q, k, _ = (x.to(device) for x in checks.draw(shape, "cpu", dtype))
    place, piece = _place(shape), 3 * shape.block
    starts = range(0, shape.length, piece)
    stats = [
        triton_backend.antidiagonal_stats(q, k[:, s : s + piece], k_start=s, **place)
        for s in starts
    ]
    whole = stats[0]
    for more in stats[1:]:
        whole = triton_backend.merge_stats(whole, more)
    place["block_size"] = shape.block
    sums = [
        triton_backend.antidiagonal_block_sums(q, k[:, s : s + piece], *whole, k_start=s, **place)
        for s in starts
    ]
    want = torch_backend.antidiagonal_scores(q.double().cpu(), k.double().cpu(), **place)
    return _apart(torch.cat([x.cpu() for x in sums], -1), want), 2e-5


def select(threshold: float | Tensor, device: torch.device) -> tuple[float, float]:
    values = torch.rand(3, 5, 300, generator=torch.Generator().manual_seed(2)) ** 6
    values = values.tril(295)
    mask, lists = triton_backend.select_block_lists(values.to(device), threshold, q_block_start=295)
    again = triton_backend.block_lists(mask)
    want = torch_backend.select_blocks(values, threshold, q_block_start=295)
    wrong = (mask.cpu() != want).sum() + (lists.indices.cpu() != again.indices.cpu()).sum()
    return float(wrong + (again.counts.cpu() != want.sum(-1)).sum()), 0.0


def pools(
    shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tensor, KVTiles], KVTiles]:
    """(q, K and V) on the CPU, K and V on the device."""
    q, k, v = checks.draw(shape, "cpu", dtype)
    kv = checks.pools(k, v, shape.block)
    return (q, kv), KVTiles(*(getattr(kv, f).to(device) for f in KVTiles.__dataclass_fields__))


def attention(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    tiling: Tiling | HopperTiling | None,
    *,
    on_device: bool = False,
) -> tuple[float, float]:
    (q, kv), tiles = pools(shape, dtype, device)
    mask = checks.random_mask(shape, 0.4, "cpu")
    mask[1, 0] = False  # an empty row
    lists = torch_backend.block_lists(mask)
    start = torch.tensor([shape.q_start], device=device) if on_device else shape.q_start
    out, lse = triton_backend.block_sparse_attention(
        q.to(device),
        tiles,
        BlockLists(lists.indices.to(device), lists.counts.to(device)),
        q_start=start,
        scaling=shape.scaling,
        tiling=tiling,
    )
    want, want_lse = torch_backend.block_sparse_attention(
        q.float(),
        replace(kv, k_pool=kv.k_pool.float(), v_pool=kv.v_pool.float()),
        lists,
        q_start=shape.q_start,
        scaling=shape.scaling,
    )
    finite = want_lse.isfinite()
    if not torch.equal(lse.cpu().isfinite(), finite):
        return torch.inf, 0.0
    apart = _apart(lse.cpu()[finite], want_lse[finite])
    return max(_apart(out, want), apart), TOLERANCE[dtype]


def merge(device: torch.device) -> tuple[float, float]:
    outs, lses = [torch.randn(4, 70, 80) for _ in range(3)], [torch.randn(4, 70) for _ in range(3)]
    lses[1][:2] = -torch.inf
    got = triton_backend.merge_states([x.to(device) for x in outs], [x.to(device) for x in lses])
    want = torch_backend.merge_states([x.double() for x in outs], [x.double() for x in lses])
    return max(_apart(g, w) for g, w in zip(got, want, strict=True)), 1e-5


def gather(device: torch.device) -> tuple[float, float]:
    source = torch.randn(16, 128, 64)
    index = torch.randint(0, 16, (9,), dtype=torch.int32)
    wrong = 0.0
    for place in [source.pin_memory(), source.to(device)] if device.type == "cuda" else [source]:
        out = torch.zeros(9, 128, 64, device=device)
        triton_backend.gather_tiles(place, index.to(device), out)
        wrong = max(wrong, _apart(out, source[index.long()]))
    return wrong, 0.0


def offload(device: torch.device, *, steps: int = 0, **engine: Any) -> tuple[float, float]:
    """A session of two layers with copies, gathers and merges, beside one on the CPU."""
    tokens, chunk, heads = 700, 256, (4, 2, 2)
    generator = torch.Generator().manual_seed(3)
    size = tokens + steps
    qkv = [[torch.randn(h, size, 64, generator=generator) for h in heads] for _ in range(2)]

    def session(on: str, backend: Any, dtype: torch.dtype) -> Session:
        shape = CacheShape(2, 4, 2, 64, 128, 2, chunk, dtype, torch.device(on))
        stats = "minmax" if steps else None
        made: Any = ResidentEngine(shape, stats)
        if on != "cpu":
            room = 2 if steps else 0
            made = OffloadEngine(shape, ops=backend, stats=stats, step_slots=room, **engine)
        selector = selectors.build("random", density=0.5)
        rules = Rules(transfer=engine["transfer"] if on != "cpu" else "ring")
        decode = partial(Steps, budget_tokens=384) if steps else None
        return Session(made, selector, backend, rules=rules, steps=decode)

    def run(one: Session, dtype: torch.dtype) -> Tensor:
        outs = []
        pieces = [*range(0, tokens, chunk), *range(tokens, size)]
        for start, stop in zip(pieces, [*pieces[1:], size], strict=True):
            one.decoding = start >= tokens
            for layer, parts in enumerate(qkv):
                x = (p[:, start:stop].to(BF16).to(one.engine.shape.device, dtype) for p in parts)
                outs.append(one.attend(layer, *x, 0.125).float().cpu())
        return torch.cat(outs, 1)

    got = run(session(str(device), triton_backend, BF16), BF16)
    return _apart(got, run(session("cpu", torch_backend, FP32), FP32)), TOLERANCE[BF16]


def _place(shape: Shape) -> dict:
    return {"stride": shape.stride, "q_start": shape.q_start, "scaling": shape.scaling}


def _apart(a: Tensor, b: Tensor) -> float:
    return (a.double().cpu() - b.double().cpu()).abs().nan_to_num(torch.inf).max().item()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

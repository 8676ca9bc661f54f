"""The parts of the kernel benchmark: each yields rows, and one that fails does not stop the rest.

FLOPs count what causality needs: 4 d per (query, key) pair of a kept block, half of a diagonal
block. The same count serves dense attention, so TFLOP/s of all kernels compare.
"""
# ruff: noqa: B023 (every closure is called before its loop goes on)

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiments import kernel_checks as checks
from experiments import kernel_peers as peers
from experiments.timing import copies, measure
from xsparse.ops import triton_backend
from xsparse.ops.antidiagonal import kernel as estimator
from xsparse.ops.attention.hopper import HopperTiling
from xsparse.ops.attention.kernel import Tiling

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    device: torch.device
    dtype: torch.dtype
    models: tuple[tuple[int, int, int], ...]  # q_heads, kv_heads, head_dim
    lengths: tuple[int, ...]
    densities: tuple[float, ...]
    strides: tuple[int, ...]
    repeats: int
    check_shapes: list[checks.Shape]
    check_dtypes: list[torch.dtype]
    gather_bytes: int


def full_plan(quick: bool) -> Plan:
    return Plan(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        models=((32, 8, 128),) if quick else ((32, 8, 128), (9, 3, 64)),
        lengths=(32768,) if quick else (32768, 131072, 8192),
        densities=(0.5, 0.1) if quick else (1.0, 0.5, 0.25, 0.1, 0.05),
        strides=(8, 16),
        repeats=10,
        check_shapes=checks.SHAPES,
        check_dtypes=[torch.bfloat16, torch.float32],
        gather_bytes=1 << 30,
    )


def interpreter_plan() -> Plan:
    """Tiny sizes that show that the benchmark itself works, without a GPU."""
    return Plan(
        device=torch.device("cpu"),
        dtype=torch.float16,
        models=((2, 1, 16),),
        lengths=(384,),
        densities=(0.5,),
        strides=(16,),
        repeats=1,
        check_shapes=checks.SMALL_SHAPES,
        check_dtypes=[torch.float16],
        gather_bytes=1 << 16,
    )


def check(plan: Plan) -> Iterator[Row]:
    yield from _checked(checks.checks(plan.check_shapes, plan.device, plan.check_dtypes))


def check_hopper(plan: Plan) -> Iterator[Row]:
    if plan.device.type == "cuda":
        yield from _checked(checks.hopper_checks(plan.device))


def _checked(named: Iterator[tuple[str, Callable[[], tuple[float, float]]]]) -> Iterator[Row]:
    for label, run in named:
        try:
            error, limit = run()
        except Exception as problem:  # a failure of one check must not hide the others
            yield {"op": "check", "variant": label, "ok": False, "note": _one_line(problem)}
            if _device_is_lost(problem):
                return
            continue
        ok = error <= limit
        yield {"op": "check", "variant": label, "ok": ok, "error": error, "note": f"<= {limit}"}


PLAIN = {
    "plain-default": None,
    "plain-3stages": Tiling(stages=3),
    "plain-2stages": Tiling(stages=2),
    "plain-64keys": Tiling(keys=64, stages=3),
    "plain-64rows": Tiling(rows=64, warps=4, stages=2),
}
HOPPER = {
    "hopper": HopperTiling(),
    "hopper-persistent": HopperTiling(persistent=True),
    "hopper-2stages": HopperTiling(stages=2),
}


def attention(plan: Plan) -> Iterator[Row]:
    yield from _attention(plan, PLAIN)


def attention_hopper(plan: Plan) -> Iterator[Row]:
    if plan.device.type == "cuda":
        yield from _attention(plan, HOPPER)


def _attention(plan: Plan, variants: dict[str, Any]) -> Iterator[Row]:
    for shape in _shapes(plan):
        sets = _draw(shape, plan)
        tiles = [checks.pools(k, v, shape.block) for _, k, v in sets]
        for density in plan.densities:
            mask = checks.random_mask(shape, density, plan.device)
            lists = triton_backend.block_lists(mask)
            base = _base(shape, "attention", density, mask)
            reference = None

            def run(i: int, tiling, lists=lists, shape=shape, sets=sets, tiles=tiles) -> Tensor:
                return triton_backend.block_sparse_attention(
                    sets[i][0], tiles[i], lists, q_start=0, scaling=shape.scaling, tiling=tiling
                )[0]

            for name, tiling in variants.items():

                def prepare(tiling=tiling) -> list[Callable]:
                    return [lambda i=i: run(i, tiling) for i in range(len(sets))]

                row = _timed(plan, {**base, "variant": name}, prepare)
                if "ms" in row and density == plan.densities[-1]:
                    # All variants of a process must agree with the plain one.
                    reference = run(0, Tiling(stages=2)) if reference is None else reference
                    difference = (run(0, tiling) - reference).abs().max().item()
                    row["note"] = f"max difference to plain {difference:.1e}"
                yield row


def dense_peers(plan: Plan) -> Iterator[Row]:
    if plan.device.type != "cuda":
        return
    for shape in _shapes(plan):
        sets = _draw(shape, plan)
        blocks = shape.length // shape.block
        everything = torch.ones(shape.q_heads, blocks, blocks, dtype=torch.bool).tril()
        for name, peer in peers.DENSE.items():
            base = _base(shape, "attention", 1.0, everything) | {"variant": name}

            def prepare(peer=peer, sets=sets) -> list[Callable]:
                return [peer(q, k, v, None, triton_backend.block_lists) for q, k, v in sets]

            yield _timed(plan, base, prepare)


def flex(plan: Plan) -> Iterator[Row]:
    yield from _sparse_peer(plan, "flex")


def fa4(plan: Plan) -> Iterator[Row]:
    yield from _sparse_peer(plan, "fa4")


def _sparse_peer(plan: Plan, name: str) -> Iterator[Row]:
    if plan.device.type != "cuda":
        return
    for shape in _shapes(plan):
        sets = _draw(shape, plan)
        for density in plan.densities:
            mask = checks.random_mask(shape, density, plan.device)

            def prepare(mask=mask, sets=sets) -> list[Callable]:
                return [peers.SPARSE[name](*s, mask, triton_backend.block_lists) for s in sets]

            row = _timed(
                plan, _base(shape, "attention", density, mask) | {"variant": name}, prepare
            )
            if "ms" in row and density == plan.densities[-1]:
                theirs = peers.SPARSE[name](*sets[0], mask, triton_backend.block_lists)()
                theirs = theirs[0] if isinstance(theirs, tuple) else theirs
                if theirs.dim() == 4:
                    theirs = theirs[0].transpose(0, 1)
                q, k, v = sets[0]
                ours = triton_backend.block_sparse_attention(
                    q,
                    checks.pools(k, v, shape.block),
                    triton_backend.block_lists(mask),
                    q_start=0,
                    scaling=shape.scaling,
                )[0]
                row["note"] = f"max difference to plain {(ours - theirs).abs().max().item():.1e}"
            yield row
            if "ms" not in row:
                break  # a peer that cannot run is named once per shape


ESTIMATOR = {
    "default": None,
    "128x128x128-w8-s3": estimator.Tiling(128, 128, 128, 8, 3),
    "128x128x64-w8-s3": estimator.Tiling(128, 128, 64, 8, 3),
    "128x128x64-w4-s3": estimator.Tiling(128, 128, 64, 4, 3),
    "128x256x64-w8-s3": estimator.Tiling(128, 256, 64, 8, 3),
    "128x256x64-w8-s4": estimator.Tiling(128, 256, 64, 8, 4),
    "256x128x64-w8-s3": estimator.Tiling(256, 128, 64, 8, 3),
    "256x128x64-w8-s4": estimator.Tiling(256, 128, 64, 8, 4),
}


def estimate(plan: Plan) -> Iterator[Row]:
    """Block scores, then selection of real scores to mask and lists."""
    for shape in _shapes(plan):
        sets = _draw(shape, plan)
        for stride in plan.strides:
            shape = replace(shape, stride=stride)
            base = _base(shape, "scores", None, None) | {"stride": stride}
            flops = 2 * shape.head_dim * shape.length**2 / 2 / stride * shape.q_heads
            for name, tiling in ESTIMATOR.items():
                if tiling and (plan.device.type == "cpu" or shape.head_dim != 128):
                    break

                def prepare(tiling=tiling, shape=shape) -> list[Callable]:
                    return [
                        lambda q=q, k=k: _scores(q, k, shape, tiling=tiling) for q, k, _ in sets
                    ]

                yield _timed(plan, {**base, "variant": name, "flops": flops}, prepare)
            a = _scores(*sets[0][:2], shape)
            for tau in (0.5, 0.9):
                row = _base(shape, "select", None, None) | {"stride": stride}
                yield _timed(
                    plan,
                    row | {"variant": f"mask+lists-{tau}"},
                    lambda tau=tau, a=a: [
                        lambda: triton_backend.select_block_lists(a, tau, q_block_start=0)
                    ],
                )


def chain(plan: Plan) -> Iterator[Row]:
    """Estimate + select + attend in one timed region, at a fixed density.

    The lists attended over are random ones of that density, since random Q and K have no sparse
    structure of their own; selection runs on the real scores beside them.
    """
    density = 0.1
    for shape in _shapes(plan):
        sets = _draw(shape, plan)
        tiles = [checks.pools(k, v, shape.block) for _, k, v in sets]
        mask = checks.random_mask(shape, density, plan.device)
        lists = triton_backend.block_lists(mask)
        variants = PLAIN | (HOPPER if plan.device.type == "cuda" else {})
        for name in ("plain-default", "hopper", "hopper-persistent"):
            if name not in variants:
                continue
            for stride in plan.strides:
                shape = replace(shape, stride=stride)

                def run(i: int, shape=shape, tiling=variants[name]) -> None:
                    a = _scores(*sets[i][:2], shape)
                    triton_backend.select_block_lists(a, 0.9, q_block_start=0)
                    triton_backend.block_sparse_attention(
                        sets[i][0],
                        tiles[i],
                        lists,
                        q_start=0,
                        scaling=shape.scaling,
                        tiling=tiling,
                    )

                row = _base(shape, "chain", density, mask) | {"stride": stride, "variant": name}
                yield _timed(
                    plan, row, lambda run=run: [lambda i=i: run(i) for i in range(len(sets))]
                )


def decode(plan: Plan) -> Iterator[Row]:
    """One query token over 16 tiles per KV head, and over everything; also inside a graph."""
    for q_heads, kv_heads, head_dim in plan.models:
        length = max(plan.lengths)
        shape = checks.Shape(length, 1, q_heads, kv_heads, head_dim)
        sets = _draw(shape, plan)
        tiles = [checks.pools(k, v, shape.block) for _, k, v in sets]
        columns = length // shape.block
        for count in sorted({min(16, columns), columns}):
            lists = checks.full_lists(q_heads, 1, count, plan.device)

            def run(i: int, lists=lists, shape=shape, sets=sets, tiles=tiles):
                return triton_backend.block_sparse_attention(
                    sets[i][0], tiles[i], lists, q_start=shape.q_start, scaling=shape.scaling
                )

            base = _base(shape, "decode", count / columns, None)
            base["bytes"] = 2 * kv_heads * count * shape.block * head_dim * plan.dtype.itemsize
            calls = [lambda i=i, run=run: run(i) for i in range(len(sets))]
            yield _timed(plan, base | {"variant": "triton"}, lambda calls=calls: calls)
            if plan.device.type == "cuda":
                yield _timed(
                    plan,
                    base | {"variant": "triton-graph"},
                    lambda calls=calls: [_captured(c).replay for c in calls],
                )
        if plan.device.type == "cuda":
            base = _base(shape, "decode", 1.0, None) | {"variant": "sdpa-flash2"}
            base["bytes"] = 2 * kv_heads * length * head_dim * plan.dtype.itemsize
            yield _timed(
                plan,
                base,
                lambda sets=sets: [
                    lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(
                        q[None], k[None], v[None], enable_gqa=True
                    )
                    for q, k, v in sets
                ],
            )


def gather(plan: Plan) -> Iterator[Row]:
    """Random tiles of 32 KiB from pinned host memory."""
    block, head_dim = 128, 128
    tile_bytes = block * head_dim * plan.dtype.itemsize
    count = plan.gather_bytes // tile_bytes
    source = torch.empty(
        count, block, head_dim, dtype=plan.dtype, pin_memory=plan.device.type == "cuda"
    ).zero_()
    index = torch.randperm(count, device=plan.device)[: count // 2].int()
    out = torch.empty(len(index), block, head_dim, dtype=plan.dtype, device=plan.device)
    base = {"op": "gather", "bytes": len(index) * tile_bytes}
    for programs in (8, 16, 32, 64):
        yield _timed(
            plan,
            base | {"variant": f"{programs}-programs"},
            lambda p=programs: [
                lambda: triton_backend.gather_tiles(source, index, out, programs=p)
            ],
        )
    half = source[: len(index)]
    yield _timed(
        plan,
        base | {"variant": "copy-engine"},
        lambda: [lambda: out.copy_(half, non_blocking=True)],
    )


RUN: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "check": check,
    "check-hopper": check_hopper,
    "attention-hopper": attention_hopper,
    "attention": attention,
    "estimate": estimate,
    "dense": dense_peers,
    "chain": chain,
    "decode": decode,
    "flex": flex,
    "fa4": fa4,
    "gather": gather,
}


def _shapes(plan: Plan) -> Iterator[checks.Shape]:
    for q_heads, kv_heads, head_dim in plan.models:
        for length in plan.lengths:
            yield checks.Shape(length, length, q_heads, kv_heads, head_dim)


def _draw(shape: checks.Shape, plan: Plan) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Sets of q, k, v that together exceed the cache."""
    generator = torch.Generator(plan.device).manual_seed(0)
    tokens = shape.q_heads * shape.queries + 2 * shape.kv_heads * shape.length
    count = copies(tokens * shape.head_dim * plan.dtype.itemsize, plan.device)

    def one(heads: int, length: int) -> Tensor:
        size = (heads, length, shape.head_dim)
        return torch.randn(size, generator=generator, device=plan.device, dtype=plan.dtype)

    return [
        (
            one(shape.q_heads, shape.queries),
            one(shape.kv_heads, shape.length),
            one(shape.kv_heads, shape.length),
        )
        for _ in range(count)
    ]


def _scores(q: Tensor, k: Tensor, shape: checks.Shape, **kwargs) -> Tensor:
    return triton_backend.antidiagonal_scores(
        q,
        k,
        stride=shape.stride,
        block_size=shape.block,
        q_start=shape.q_start,
        scaling=shape.scaling,
        **kwargs,
    )


def _base(shape: checks.Shape, op: str, density: float | None, mask: Tensor | None) -> Row:
    row: Row = {
        "op": op,
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "length": shape.length,
    }
    if density is not None:
        row["density"] = density
    if mask is not None:
        blocks = shape.length // shape.block
        pairs = (int(mask.sum()) - shape.q_heads * blocks / 2) * shape.block**2
        row["measured_density"] = int(mask.sum()) / (shape.q_heads * blocks * (blocks + 1) / 2)
        row["flops"] = 4 * shape.head_dim * pairs
    return row


def _timed(plan: Plan, row: Row, prepare: Callable[[], list[Callable]]) -> Row:
    try:
        times = measure(prepare(), device=plan.device, repeats=plan.repeats)
    except Exception as problem:  # one variant that cannot run must not lose the others
        if _device_is_lost(problem):
            raise
        return row | {"note": _one_line(problem)}
    row = row | {
        "ms": times.median_ms,
        "min_ms": times.min_ms,
        "max_ms": times.max_ms,
        "repeats": times.repeats,
        "first_s": times.first_s,
    }
    if "flops" in row:
        row["tflops"] = row["flops"] / times.median_ms / 1e9
    if "bytes" in row:
        row["gb_s"] = row["bytes"] / times.median_ms / 1e6
    return row


def _captured(run: Callable) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _device_is_lost(problem: Exception) -> bool:
    """After an illegal access every later call of the process fails too."""
    return isinstance(problem, torch.AcceleratorError) or "CUDA error" in str(problem)


def _one_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".replace("\n", " ")[:400]

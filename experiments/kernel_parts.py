"""The parts of the kernel benchmark: each yields rows, and one that fails does not stop the rest.

FLOPs count what causality needs: 4 d per (query, key) pair of a kept block, half of a diagonal
block. The same count serves dense attention, so TFLOP/s of all kernels compare.
"""
# ruff: noqa: B023 (every closure is called before its loop goes on)

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments import kernel_checks as checks
from experiments import kernel_peers as peers
from experiments import record_masks
from experiments.timing import copies, measure
from xsparse.ops import triton_backend
from xsparse.ops.antidiagonal import kernel as estimator
from xsparse.ops.attention.hopper import HopperTiling
from xsparse.ops.attention.kernel import Tiling, plain_tiling

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
    explore: bool = False  # also other tilings than the defaults


def full_plan(quick: bool, explore: bool) -> Plan:
    return Plan(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        models=((32, 8, 128),) if quick else ((32, 8, 128), (9, 3, 64)),
        lengths=(32768,) if quick else (131072, 32768, 8192),
        densities=(0.5, 0.1) if quick else (1.0, 0.5, 0.25, 0.1, 0.05),
        strides=(8, 16),
        repeats=10,
        check_shapes=checks.SHAPES,
        check_dtypes=[torch.bfloat16, torch.float32],
        gather_bytes=1 << 30,
        explore=explore,
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


def attention(plan: Plan) -> Iterator[Row]:
    """The first model: ours, dense kernels and block-sparse peers, over masks at random."""
    yield from _attention(plan, plan.models[0])


def attention_small(plan: Plan) -> Iterator[Row]:
    """The other models, and masks recorded from a real one."""
    for model in plan.models[1:]:
        yield from _attention(plan, model)
    if plan.device.type == "cuda":
        masks, about = record_masks.load()
        shape = checks.Shape(masks.shape[-1] * 128, masks.shape[-1] * 128, *about["heads"])
        yield from _over(plan, shape, list(torch.from_numpy(masks).flatten(0, 1).to(plan.device)))


def _attention(plan: Plan, model: tuple[int, int, int]) -> Iterator[Row]:
    for shape in _shapes(plan, model):
        yield from _over(plan, shape, [])


def _over(plan: Plan, shape: checks.Shape, recorded: list[Tensor]) -> Iterator[Row]:
    """Dense kernels, then block-sparse ones over the recorded masks or over random ones."""
    sets = _draw(shape, plan)
    if plan.device.type == "cuda":
        everything = checks.random_mask(shape, 1.0, plan.device)
        dense = _base(shape, "attention", 1.0, everything)
        for name, peer in peers.DENSE.items():

            def prepare(peer=peer) -> list[Callable]:
                return [peer(*tensors, None) for tensors in sets]

            yield _timed(plan, dense | {"variant": name}, prepare)
    stopped: set[str] = set()
    if recorded:
        base: Row = _base(shape, "attention", None, torch.cat(recorded))
        base |= {"masks": "recorded", "density": base["measured_density"]}
        base |= {
            "flops": base["flops"] / len(recorded),
            "note": f"mean over {len(recorded)} masks in turn",
        }
        yield from _sparse(plan, shape, sets, recorded, base, stopped)
        return
    for density in plan.densities:
        mask = checks.random_mask(shape, density, plan.device)
        base = _base(shape, "attention", density, mask) | {"masks": "random"}
        yield from _sparse(plan, shape, sets, [mask], base, stopped)


def _sparse(
    plan: Plan,
    shape: checks.Shape,
    sets: list[tuple[Tensor, Tensor, Tensor]],
    masks: list[Tensor],
    base: Row,
    stopped: set[str],
) -> Iterator[Row]:
    """Every block-sparse kernel over the same masks; one call runs all masks, ms is of one.

    stopped: peers that failed on this shape; they are named once.
    """
    lists = [triton_backend.block_lists(m) for m in masks]
    tiles = [checks.pools(k, v, shape.block) for _, k, v in sets]
    tilings = {"xsparse": None, "xsparse-plain": plain_tiling(sets[0][0], tiles[0])}
    if plan.explore:
        tilings |= TILINGS

    def ours(i: int, tiling, which: int) -> Tensor:
        return triton_backend.block_sparse_attention(
            sets[i][0], tiles[i], lists[which], q_start=0, scaling=shape.scaling, tiling=tiling
        )[0]

    reference = ours(0, None, 0)
    makers: dict[str, Callable[[int, int], Callable[[], Tensor]]] = {
        name: lambda i, which, tiling=tiling: lambda: ours(i, tiling, which)
        for name, tiling in tilings.items()
    }
    if plan.device.type == "cuda":
        makers |= {
            name: lambda i, which, peer=peer: peer(*sets[i], masks[which])
            for name, peer in peers.SPARSE.items()
        }
    for name, make in makers.items():
        if name in stopped:
            continue
        first: list[Callable[[], Tensor]] = []

        def prepare(make=make, first=first) -> list[Callable]:
            calls = [[make(i, which) for which in range(len(masks))] for i in range(len(sets))]
            first.append(calls[0][0])
            return [lambda c=c: [run() for run in c] for c in calls]

        row = _timed(plan, base | {"variant": name}, prepare, calls=len(masks))
        if "ms" not in row:
            stopped.add(name)
        elif name != "xsparse":
            row["error"] = (first[0]() - reference).abs().max().item()
        yield row
        first.clear()


TILINGS = {
    "hopper-3stages": HopperTiling(stages=3),
    "hopper-persistent": HopperTiling(persistent=True),
    "plain-2stages": Tiling(stages=2),
    "plain-3stages": Tiling(stages=3),
    "plain-64keys": Tiling(keys=64, stages=3),
    "plain-64rows": Tiling(rows=64, warps=4, stages=2),
}
ESTIMATOR = {
    "128x128x128-w8-s3": estimator.Tiling(128, 128, 128, 8, 3),
    "128x128x64-w4-s3": estimator.Tiling(128, 128, 64, 4, 3),
    "128x128x64-w8-s4": estimator.Tiling(128, 128, 64, 8, 4),
    "128x256x64-w8-s3": estimator.Tiling(128, 256, 64, 8, 3),
    "256x128x64-w8-s3": estimator.Tiling(256, 128, 64, 8, 3),
}


def estimate(plan: Plan) -> Iterator[Row]:
    """Block scores, their selection to mask and lists, and both; as calls and as a CUDA graph."""
    for shape in _all_shapes(plan):
        sets = _draw(shape, plan)
        for stride in plan.strides:
            shape = replace(shape, stride=stride)
            a = _scores(*sets[0][:2], shape)
            base = _base(shape, "scores", None, None) | {"stride": stride}
            flops = 2 * shape.head_dim * shape.length**2 / 2 / stride * shape.q_heads

            def score(i: int, tiling=None, shape=shape) -> Tensor:
                return _scores(*sets[i][:2], shape, tiling=tiling)

            def both(i: int, shape=shape) -> None:
                triton_backend.select_block_lists(score(i), TAU, q_block_start=0)

            for name, tiling in {"xsparse": None, **(ESTIMATOR if plan.explore else {})}.items():
                run = partial(score, tiling=tiling)
                yield from _called(plan, base | {"variant": name, "flops": flops}, run, sets)
            one = base | {"op": "select", "variant": "xsparse", "note": f"threshold {TAU}"}
            yield from _called(
                plan,
                one,
                lambda i, a=a: triton_backend.select_block_lists(a, TAU, q_block_start=0),
                sets,
            )
            yield from _called(
                plan, base | {"op": "estimate+select", "variant": "xsparse"}, both, sets
            )


TAU = 0.9


def chain(plan: Plan) -> Iterator[Row]:
    """Estimate + select + attend in one timed region, at a fixed density.

    The lists attended over are random ones of that density, since random Q and K have no sparse
    structure of their own; selection runs on the real scores beside them.
    """
    density = 0.1
    for shape in _all_shapes(plan):
        sets = _draw(shape, plan)
        tiles = [checks.pools(k, v, shape.block) for _, k, v in sets]
        mask = checks.random_mask(shape, density, plan.device)
        lists = triton_backend.block_lists(mask)
        for stride in plan.strides:
            shape = replace(shape, stride=stride)

            def run(i: int, shape=shape) -> None:
                a = _scores(*sets[i][:2], shape)
                triton_backend.select_block_lists(a, TAU, q_block_start=0)
                triton_backend.block_sparse_attention(
                    sets[i][0], tiles[i], lists, q_start=0, scaling=shape.scaling
                )

            row = _base(shape, "chain", density, mask) | {"stride": stride, "variant": "xsparse"}
            yield from _called(plan, row, run, sets)


def _called(plan: Plan, row: Row, run: Callable[[int], object], sets: list[Any]) -> Iterator[Row]:
    """A row of calls that take turns over sets of buffers, and one of the same in CUDA graphs,
    which shows what the GPU needs where launching takes longer."""
    calls = [partial(run, i) for i in range(len(sets))]
    yield _timed(plan, row, lambda: calls)
    if plan.device.type == "cuda" and row["variant"] == "xsparse":
        graph = row | {"variant": "xsparse-graph"}
        yield _timed(plan, graph, lambda: [_captured(c).replay for c in calls])


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
    "attention": attention,
    "attention-small": attention_small,
    "estimate": estimate,
    "chain": chain,
    "decode": decode,
    "gather": gather,
}


def _shapes(plan: Plan, model: tuple[int, int, int]) -> Iterator[checks.Shape]:
    for length in plan.lengths:
        yield checks.Shape(length, length, *model)


def _all_shapes(plan: Plan) -> Iterator[checks.Shape]:
    for model in plan.models:
        yield from _shapes(plan, model)


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
        blocks, heads = shape.length // shape.block, len(mask)
        pairs = (int(mask.sum()) - heads * blocks / 2) * shape.block**2
        row["measured_density"] = int(mask.sum()) / (heads * blocks * (blocks + 1) / 2)
        row["flops"] = 4 * shape.head_dim * pairs
    return row


def _timed(plan: Plan, row: Row, prepare: Callable[[], list[Callable]], *, calls: int = 1) -> Row:
    """calls: how many of what the row is about one call runs."""
    try:
        times = measure(prepare(), device=plan.device, repeats=plan.repeats)
    except Exception as problem:  # one variant that cannot run must not lose the others
        if _device_is_lost(problem):
            raise
        return row | {"note": _one_line(problem)}
    row = row | {
        "ms": times.median_ms / calls,
        "min_ms": times.min_ms / calls,
        "max_ms": times.max_ms / calls,
        "repeats": times.repeats,
        "first_s": times.first_s,
    }
    if "flops" in row:
        row["tflops"] = row["flops"] / row["ms"] / 1e9
    if "bytes" in row:
        row["gb_s"] = row["bytes"] / row["ms"] / 1e6
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

"""Correctness of the Triton operators on the device at hand, before anything is timed.

Each check returns (error, limit). References are the torch forms in fp64, which the test suite
compares with independent formulas.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xsparse.ops import torch_backend, triton_backend
from xsparse.ops.attention.hopper import HopperTiling
from xsparse.ops.tiles import BlockLists, KVTiles, block_lists


@dataclass(frozen=True)
class Shape:
    length: int
    queries: int
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    stride: int = 8
    block: int = 128

    @property
    def q_start(self) -> int:
        return self.length - self.queries

    @property
    def scaling(self) -> float:
        return 1 / math.sqrt(self.head_dim)


SHAPES = [
    Shape(1, 1),
    Shape(300, 300),
    Shape(1025, 1025, 9, 3, 64),
    Shape(1001, 233),
    Shape(2048, 512, 8, 2, 128, 16),
    Shape(700, 700, 4, 2, 80),
    Shape(700, 130, 4, 2, 96),
    Shape(900, 400, 4, 2, 256),
    Shape(1000, 1, 28, 4),
    Shape(600, 600, 4, 1, 64, 16, 64),
]
SMALL_SHAPES = [
    Shape(1, 1, 2, 1, 16),
    Shape(70, 37, 4, 2, 16, 8, 32),
    Shape(70, 1, 4, 2, 16, 8, 32),
]


def draw(shape: Shape, device, dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q [q_heads, C, d], k and v [kv_heads, N, d], with a slow drift that makes rows peaked."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(shape.q_heads, shape.queries), (shape.kv_heads, shape.length)]
    q, k = (torch.randn(h, n, shape.head_dim, generator=generator) for h, n in sizes)
    v = torch.randn(shape.kv_heads, shape.length, shape.head_dim, generator=generator)
    drift = torch.linspace(0, 9, shape.length)
    wave = torch.stack([drift.cos(), drift.sin()], -1) * 4
    k[..., :2] += wave
    q[..., :2] += wave[shape.q_start :]
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def pools(k: Tensor, v: Tensor, block: int) -> KVTiles:
    """Contiguous K and V [kv_heads, N, d] as pools of tiles, zero-padded to whole blocks."""
    kv_heads, length, head_dim = k.shape
    pad = -length % block
    blocks = (length + pad) // block
    if pad:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (k, v))
    numbers = torch.arange(blocks, dtype=torch.int32, device=k.device).expand(kv_heads, -1)
    heads = torch.arange(kv_heads, dtype=torch.int32, device=k.device)[:, None]
    index = (heads * blocks + numbers).contiguous()
    size = (kv_heads * blocks, block, head_dim)
    return KVTiles(k.reshape(size), v.reshape(size), index, index, numbers.contiguous())


def random_mask(shape: Shape, density: float, device, seed: int = 1) -> Tensor:
    """bool [q_heads, q_blocks, k_blocks]: block 0, the diagonal, and others at `density`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    k_blocks = -(-shape.length // shape.block)
    first = shape.q_start // shape.block
    block = torch.arange(k_blocks, device=device)
    diagonal = torch.arange(first, k_blocks, device=device)[:, None]
    size = (shape.q_heads, k_blocks - first, k_blocks)
    mask = torch.rand(size, generator=generator, device=device) < density
    return (mask | (block == 0) | (block == diagonal)) & (block <= diagonal)


def checks(
    shapes: list[Shape], device: torch.device, dtypes: list[torch.dtype]
) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Names and checks of every operator, attention in the form that is the default there."""
    for shape in shapes:
        for dtype in dtypes:
            label = f"{shape} {dtype}"
            yield f"scores {label}", lambda s=shape, t=dtype: scores(s, device, t)
            yield f"streamed scores {label}", lambda s=shape, t=dtype: streamed(s, device, t)
            yield f"attention {label}", lambda s=shape, t=dtype: attention(s, device, t, None)
    for tau in (0.0, 0.5, 0.9, 0.99, 1.0):
        yield f"selection {tau}", lambda t=tau: selection(t, shapes[-1].length, device)
    yield "merge", lambda: merging(device)
    yield "gather", lambda: gathering(device)


def hopper_checks(
    device: torch.device,
) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    shapes = [
        Shape(300, 300),
        Shape(1025, 1025, 9, 3, 64),
        Shape(1001, 233),
        Shape(2048, 512),
        Shape(8192, 4096, 16, 4),
        Shape(4096, 4096, 9, 3, 64),
    ]
    for tiling in (HopperTiling(), HopperTiling(stages=3), HopperTiling(persistent=True)):
        for shape in shapes:
            for dtype in (torch.bfloat16, torch.float16):
                yield (
                    f"attention {shape} {dtype} {tiling}",
                    lambda s=shape, t=dtype, h=tiling: attention(s, device, t, h),
                )


def scores(shape: Shape, device, dtype) -> tuple[float, float]:
    q, k, _ = draw(shape, device, dtype)
    place = {"stride": shape.stride, "q_start": shape.q_start, "scaling": shape.scaling}
    got = triton_backend.antidiagonal_scores(q, k, block_size=shape.block, **place)
    want = torch_backend.antidiagonal_scores(
        q.double(), k.double(), block_size=shape.block, **place
    )
    return _distance(got, want), 2e-5


def streamed(shape: Shape, device, dtype) -> tuple[float, float]:
    q, k, _ = draw(shape, device, dtype)
    place = {"stride": shape.stride, "q_start": shape.q_start, "scaling": shape.scaling}
    want = triton_backend.antidiagonal_scores(q, k, block_size=shape.block, **place)
    piece = 3 * shape.block
    starts = range(0, shape.length, piece)
    total = None
    for s in starts:
        part = triton_backend.antidiagonal_stats(q, k[:, s : s + piece], k_start=s, **place)
        total = part if total is None else triton_backend.merge_stats(total, part)
    assert total is not None
    sums = [
        triton_backend.antidiagonal_block_sums(
            q, k[:, s : s + piece], *total, block_size=shape.block, k_start=s, **place
        )
        for s in starts
    ]
    return _distance(torch.cat(sums, -1), want), 2e-5


def attention(shape: Shape, device, dtype, tiling) -> tuple[float, float]:
    """Error over that of SDPA in the same dtype on the same inputs (limit 2)."""
    q, k, v = draw(shape, device, dtype)
    mask = random_mask(shape, 0.4, device)
    out, lse = triton_backend.block_sparse_attention(
        q,
        pools(k, v, shape.block),
        triton_backend.block_lists(mask),
        q_start=shape.q_start,
        scaling=shape.scaling,
        tiling=tiling,
    )
    if out.isnan().any() or lse.isnan().any():
        return math.nan, 2.0
    group = shape.q_heads // shape.kv_heads
    t = torch.arange(shape.q_start, shape.length, device=device)
    u = torch.arange(shape.length, device=device)
    rows = t // shape.block - shape.q_start // shape.block
    error = torch_error = lse_error = 0.0
    for head in range(shape.q_heads):
        visible = mask[head][rows][:, u // shape.block] & (u <= t[:, None])
        keys, values = k[head // group], v[head // group]
        logits = (q[head].double() @ keys.double().T * shape.scaling).masked_fill(
            ~visible, -torch.inf
        )
        want = logits.softmax(-1) @ values.double()
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q[head][None, None], keys[None, None], values[None, None], visible, scale=shape.scaling
        )[0, 0]
        error += (out[head].double() - want).norm().item() ** 2
        torch_error += (theirs.double() - want).norm().item() ** 2
        lse_error = max(lse_error, _distance(lse[head], logits.logsumexp(-1)))
    if lse_error > 1e-3:
        return lse_error, 1e-3
    floor = 1e-6 * out.numel() ** 0.5
    return math.sqrt(error) / max(math.sqrt(torch_error), floor), 2.0


def selection(tau: float, length: int, device) -> tuple[float, float]:
    """Masks that differ from the sorted form in fp64: none allowed."""
    generator = torch.Generator().manual_seed(2)
    blocks = min(length, 1000)
    values = torch.rand(4, blocks, blocks, generator=generator) ** 6
    values[:, ::3] = (values[:, ::3] * 16).round() / 16
    values = values.tril().to(device)
    mask, lists = triton_backend.select_block_lists(values, tau, q_block_start=0)
    want = torch_backend.select_blocks(values, tau, q_block_start=0)
    listed = block_lists(want)
    kept = torch.arange(blocks, device=device) < listed.counts[..., None]
    wrong = (mask != want).sum() + (lists.counts != listed.counts).sum()
    wrong += ((lists.indices != listed.indices) & kept).sum()
    return float(wrong.item()), 0.0


def merging(device) -> tuple[float, float]:
    outs = [torch.randn(4, 300, 128, device=device) for _ in range(3)]
    lses = [torch.randn(4, 300, device=device) * 5 for _ in range(3)]
    lses[1][:2] = -torch.inf
    got = triton_backend.merge_states(outs, lses)
    want = torch_backend.merge_states([o.double() for o in outs], [x.double() for x in lses])
    return max(_distance(g, w) for g, w in zip(got, want, strict=True)), 1e-5


def gathering(device) -> tuple[float, float]:
    source = torch.randn(64, 128, 128)
    if device.type == "cuda":
        source = source.pin_memory()
    index = torch.randint(0, 64, (40,), dtype=torch.int32, device=device)
    out = torch.zeros(40, 128, 128, device=device)
    triton_backend.gather_tiles(source, index, out)
    return _distance(out.cpu(), source[index.long().cpu()]), 0.0


def full_lists(q_heads: int, q_blocks: int, columns: int, device) -> BlockLists:
    """Every row names every column."""
    indices = torch.arange(columns, dtype=torch.int32, device=device)
    counts = torch.full((q_heads, q_blocks), columns, dtype=torch.int32, device=device)
    return BlockLists(indices.expand(q_heads, q_blocks, -1).contiguous(), counts)


def _distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().nan_to_num(torch.inf).max().item()

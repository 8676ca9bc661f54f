"""Inputs that every form of an operator (naive, torch, Triton) must pass, on any device and dtype.

A case names shapes and a kind of content; `make` draws its tensors from a fixed seed on the CPU in
fp64 and rounds them to the asked dtype, so all forms see the same numbers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from xsparse.ops.tiles import KVTiles


@dataclass(frozen=True)
class Case:
    """`length` tokens of which the last `chunk` (all of them by default) are queries."""

    length: int
    chunk: int | None = None
    q_heads: int = 3
    kv_heads: int = 1
    head_dim: int = 16
    stride: int = 8
    block_size: int = 128
    content: str = "random"

    @property
    def queries(self) -> int:
        return self.length if self.chunk is None else self.chunk

    @property
    def q_start(self) -> int:
        return self.length - self.queries

    @property
    def scaling(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    @property
    def q_blocks(self) -> int:
        return math.ceil(self.length / self.block_size) - self.q_start // self.block_size

    @property
    def k_blocks(self) -> int:
        return math.ceil(self.length / self.block_size)

    def __str__(self) -> str:
        return (
            f"{self.content}-{self.length}/{self.queries}-h{self.q_heads}/{self.kv_heads}"
            f"-d{self.head_dim}-S{self.stride}-B{self.block_size}"
        )


CONTENTS = ("random", "structured", "equal", "huge", "zeros")
LENGTHS = (1, 7, 127, 128, 129, 1000, 1001, 1023, 1025)
GROUPS = ((1, 1), (9, 3), (4, 1), (7, 1), (8, 1), (28, 4), (32, 8))

LENGTH_CASES = [Case(n) for n in LENGTHS]
CONTENT_CASES = [Case(650, 394, content=c) for c in CONTENTS]
GROUP_CASES = [Case(300, q_heads=h, kv_heads=g) for h, g in GROUPS]
DIM_CASES = [Case(300, q_heads=2, kv_heads=1, head_dim=d) for d in (64, 80, 96, 128, 256)]
CHUNK_CASES = [
    Case(1025, 1),
    Case(1024, 1),
    Case(1025, 129),
    Case(1024, 512),
    Case(1000, 360),
    Case(1001, 233),
    Case(512, 256, stride=16),
    Case(512, 256, stride=4, block_size=64),
]
# q_start that neither the block nor the stride divides: the first row block is a partial one.
UNALIGNED_CASES = [Case(1000, 1000 - 130), Case(700, 37), Case(515, 2), Case(385, 256), Case(9, 8)]
CASES = LENGTH_CASES + CONTENT_CASES + GROUP_CASES + DIM_CASES + CHUNK_CASES + UNALIGNED_CASES


def make(
    case: Case, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """q [q_heads, C, d], k and v [kv_heads, N, d] of a case, as after RoPE."""
    generator = torch.Generator().manual_seed(0)
    shape_q = (case.q_heads, case.queries, case.head_dim)
    shape_k = (case.kv_heads, case.length, case.head_dim)
    q, k, v = (
        torch.randn(s, generator=generator, dtype=torch.float64)
        for s in (shape_q, shape_k, shape_k)
    )
    if case.content == "structured":
        # A slow drift plus a sink: what makes real attention maps sparse.
        drift = torch.linspace(0, 12, case.length, dtype=torch.float64)
        wave = torch.stack([drift.cos(), drift.sin()], -1) * 4
        k[..., :2] += wave
        q[..., :2] += wave[case.q_start :]
        k[:, 0, 2] += 8
        q[..., 2] += 3
    elif case.content == "equal":
        q, k = torch.ones_like(q), torch.ones_like(k)
    elif case.content == "huge":
        k[:, case.length // 2] = 0
        k[:, case.length // 2, 0] = 400
        q[..., 0] = q[..., 0].abs() + 1
    elif case.content == "zeros":
        q, k = torch.zeros_like(q), torch.zeros_like(k)
    return tuple(t.to(device=device, dtype=dtype) for t in (q, k, v))  # pyright: ignore[reportReturnType]


def random_mask(case: Case, density: float, *, device: str | torch.device = "cpu") -> Tensor:
    """bool [q_heads, q_blocks, k_blocks]: block 0, the diagonal, and others at `density`."""
    generator = torch.Generator().manual_seed(1)
    shape = (case.q_heads, case.q_blocks, case.k_blocks)
    mask = torch.rand(shape, generator=generator) < density
    diagonal = case.q_start // case.block_size + torch.arange(case.q_blocks)[:, None]
    block = torch.arange(case.k_blocks)
    mask |= (block == 0) | (block == diagonal)
    return (mask & (block <= diagonal)).to(device)


def tiles(k: Tensor, v: Tensor, block_size: int, blocks: Tensor | None = None) -> KVTiles:
    """K and V [kv_heads, N, d] as pools in scrambled order.

    blocks: int [kv_heads, columns], which block each column shows; all in order by default.
    """
    kv_heads, length, head_dim = k.shape
    count = math.ceil(length / block_size)
    pad = count * block_size - length
    kp, vp = (
        torch.nn.functional.pad(t, (0, 0, 0, pad)).reshape(kv_heads * count, block_size, head_dim)
        for t in (k, v)
    )
    generator = torch.Generator().manual_seed(2)
    k_order, v_order = (torch.randperm(kv_heads * count, generator=generator) for _ in range(2))
    if blocks is None:
        blocks = torch.arange(count).expand(kv_heads, count)
    place = torch.arange(kv_heads)[:, None] * count + blocks.cpu().long().clamp_min(0)
    return KVTiles(
        k_pool=kp[k_order.to(k.device)].contiguous(),
        v_pool=vp[v_order.to(v.device)].contiguous(),
        k_index=torch.argsort(k_order)[place].to(k.device, torch.int32),
        v_index=torch.argsort(v_order)[place].to(v.device, torch.int32),
        blocks=blocks.to(k.device, torch.int32).contiguous(),
    )

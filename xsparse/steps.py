"""Decode one token at a time with the position on the device.

A step of a layer writes the token, updates its block's statistics, picks blocks, fetches their
tiles and attends, without reading the device: the same code runs eagerly and inside a CUDA graph
(step_graph.py). Bookkeeping that only the host can do is left out while `captured` is set.
"""

from typing import Any

import torch
from torch import Tensor

from xsparse.counters import Counters
from xsparse.kv.engine import Engine
from xsparse.kv.resident import ResidentEngine
from xsparse.ops.decode import Chosen, empty_state
from xsparse.ops.tiles import BlockLists, KVTiles


class Steps:
    """budget_tokens: read per KV head and step, the block being filled included; None: everything,
    with the resident engine. keep: tiles stay on the device for later steps."""

    def __init__(
        self,
        engine: Engine,
        ops: Any,
        counters: Counters,
        *,
        budget_tokens: int | None = None,
        keep: bool = False,
    ):
        assert budget_tokens is not None or isinstance(engine, ResidentEngine)
        self.engine, self.ops, self.counters = engine, ops, counters
        self.keep = keep
        self.captured = False
        self.capacity = 0  # what was prepared for
        self.chosen: Chosen | None = None
        with torch.inference_mode(False):
            self.position = torch.zeros(1, dtype=torch.int64, device=engine.shape.device)
        # Complete blocks a step reads besides the one being filled.
        self.budget = (
            None if budget_tokens is None else budget_tokens // engine.shape.block_size - 1
        )

    @torch.inference_mode(False)  # or tensors could not be written outside inference mode
    def prepare(self) -> None:
        """Follow the engine's capacity; what a step knows of the sequence stays."""
        engine, s = self.engine, self.engine.shape
        if self.capacity == engine.capacity:
            return
        self.capacity = engine.capacity
        columns = self.capacity // s.block_size
        if self.budget is not None:
            columns = self.budget + 1
            self.geometry = engine.geometry(self.budget)
            if self.chosen is None:
                slots, halves = self.geometry.slots, self.geometry.halves
                self.chosen = Chosen.allocate(s.q_heads, s.kv_heads, self.budget, halves, s.device)
                self.states = [empty_state(s.kv_heads, slots, s.device) for _ in range(s.layers)]
                if engine.name == "offload":
                    self.counters.watch("decode_bytes_h2d", self.chosen.moved, s.tile_bytes)
        order = torch.arange(columns, dtype=torch.int32, device=s.device)
        self.columns = order.expand(s.q_heads, 1, -1).contiguous()

    def reset(self) -> None:
        """Another sequence begins."""
        if self.chosen is not None:
            for state in self.states:
                state.fill_(-1)
            self.chosen.moved.zero_()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """q: [q_heads, 1, d]; k, v: [kv_heads, 1, d]; returns [q_heads, 1, d]."""
        engine, ops, s = self.engine, self.ops, self.engine.shape
        if not self.captured:
            self._begin(layer)
        position = self.position
        ops.put_token(k, v, position, *engine.token_places(layer))
        if engine.stats is not None:
            kind = engine.stats.name
            stats = engine.stats.stats(layer)
            ops.fold_token(k, position, stats, kind=kind, block_size=s.block_size)
        tiles, lists = self._read(layer, q, scaling)
        out, _ = ops.block_sparse_attention(q, tiles, lists, q_start=position, scaling=scaling)
        if not self.captured:
            engine.advance(layer)
        return out

    def _read(self, layer: int, q: Tensor, scaling: float) -> tuple[KVTiles, BlockLists]:
        engine, ops, s = self.engine, self.ops, self.engine.shape
        if self.budget is None:
            assert isinstance(engine, ResidentEngine)
            counts = (self.position // s.block_size + 1).int()
            lists = BlockLists(self.columns, counts.expand(s.q_heads)[:, None])
            return engine.all_tiles(layer), lists
        assert engine.stats is not None
        assert self.chosen is not None
        scores = ops.step_scores(
            q,
            engine.stats.stats(layer),
            self.position,
            kind=engine.stats.name,
            block_size=s.block_size,
            scaling=scaling,
        )
        ops.choose_tiles(
            scores,
            self.position,
            self.states[layer],
            self.chosen,
            geometry=self.geometry,
            keep=self.keep,
        )
        return engine.step_tiles(layer, self.chosen), BlockLists(self.columns, self.chosen.counts)

    def _begin(self, layer: int) -> None:
        """What only the host can do before a step: room, the position, counts."""
        engine = self.engine
        position = engine.lengths[layer]
        engine.make_room(position + 1)
        self.prepare()
        if layer == 0:
            engine.begin_steps()
            self.position.fill_(position)
            self.count(position, 1)

    def count(self, position: int, tokens: int) -> None:
        """Count tiles of K (as many of V) of steps from `position` on, all layers."""
        s = self.engine.shape
        for p in range(position, position + tokens):
            blocks = p // s.block_size + 1
            kept = blocks if self.budget is None else min(blocks, self.budget + 1)
            self.counters.add("decode_tiles", s.layers * s.kv_heads * blocks)
            self.counters.add("decode_tiles_kept", s.layers * s.kv_heads * kept)

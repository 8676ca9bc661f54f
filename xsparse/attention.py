"""Attention of one sequence over (engine, selector, operators): the way of one chunk.

append K and V -> select blocks -> reduce to what must move -> fetch it window by window -> attend
inside each window -> merge by log-sum-exp. Nothing here knows a model library or a stream.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from xsparse.counters import Counters, causal_triples
from xsparse.kv.engine import Engine
from xsparse.ops import OPERATORS
from xsparse.ops.tiles import BlockLists
from xsparse.selectors.base import Selector, Site
from xsparse.selectors.reduce import executed_mask, reduce_mask
from xsparse.steps import Steps

MOST_PARTS = 8  # of attention over disjoint keys, held until they are merged

STAGE_OF_OPERATOR = {
    "select_blocks": "select",
    "block_sparse_attention": "attend",
    "dense_attention": "attend",
    "merge_states": "attend",
}


Part = tuple[Tensor, Tensor]  # output [q_heads, C, d] and log-sum-exp [q_heads, C]


@dataclass(frozen=True)
class Rules:
    """How a mask becomes what moves and what is executed (docs/design.md)."""

    reduce_heads: str = "any"
    reduce_queries: str = "any"
    reduce_sub_blocks: str = "any"
    attend: str = "mask"
    transfer: str = "ring"


class Session:
    """One sequence at a time through an engine.

    selector: governs prefill; steps: decode with the position on the device, made from (engine,
    operators, counters), or None, where decode reads everything; decoding: set by whoever drives
    the model.
    """

    def __init__(
        self,
        engine: Engine,
        selector: Selector,
        ops: Any,
        *,
        rules: Rules | None = None,
        steps: Callable[[Engine, Any, Counters], Steps] | None = None,
        mass_recall: bool = False,
    ):
        self.engine = engine
        self.selector = selector
        self.rules = rules or Rules()
        self.mass_recall = mass_recall
        self.counters = Counters(engine.shape.device)
        self.ops = _timed(ops, self.counters)
        self.decoding = False
        # "prefill": the driver says so, whatever the number of tokens; "auto": one token decodes
        self.phase = "auto"
        self.steps = steps(engine, self.ops, self.counters) if steps else None
        engine.stage = self.counters.stage

    def reset(self) -> None:
        """Begin another sequence."""
        self.engine.reset()
        self.counters.reset()
        if self.steps is not None:
            self.steps.reset()
        self.decoding = False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Append k, v and attend with q.

        q: [q_heads, C, d]; k, v: [kv_heads, C, d]; returns [q_heads, C, d]
        """
        self.counters.timing = not self.decoding  # stage times are those of prefill
        if self.decoding and self.steps is not None and self.steps.captured:
            return self.steps.attend(layer, q, k, v, scaling)
        traffic = self.engine.traffic
        h2d, d2h = traffic.h2d, traffic.d2h
        step = self._decode if self.decoding else self._prefill_in_chunks
        out = step(layer, q, k, v, scaling)
        phase = "decode_" if self.decoding else ""
        self.counters.add(f"{phase}bytes_h2d", traffic.h2d - h2d)
        self.counters.add(f"{phase}bytes_d2h", traffic.d2h - d2h)
        return out

    def _prefill_in_chunks(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float
    ) -> Tensor:
        outs, begin, tokens = [], 0, q.shape[1]
        self.engine.make_room(self.engine.lengths[layer] + tokens)  # at once, not by chunks
        while begin < tokens:
            # Chunks end where blocks end, whatever the sequence's length was before.
            size = self.engine.shape.chunk_size
            open_tokens = self.engine.lengths[layer] % self.engine.shape.block_size
            piece = slice(begin, min(begin + size - open_tokens, tokens))
            outs.append(self._prefill(layer, q[:, piece], k[:, piece], v[:, piece], scaling))
            begin = piece.stop
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _site(self, layer: int, q_start: int, scaling: float) -> Site:
        size = self.engine.shape.block_size
        return Site(layer=layer, q_start=q_start, block_size=size, scaling=scaling, ops=self.ops)

    def _prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        engine, shape, counters = self.engine, self.engine.shape, self.counters
        q_start = engine.lengths[layer]
        engine.append(layer, k, v)
        causal = causal_triples(shape.q_heads, q_start, q.shape[1], shape.block_size)
        history_blocks = q_start // shape.block_size
        history_pages = shape.pages(history_blocks * shape.block_size)
        counters.add("mask_causal", causal)
        counters.add("pages_history", history_pages)
        counters.add("bytes_history", q_start * shape.token_bytes)
        if self.selector.dense:
            counters.add("mask_kept", causal)
            counters.add("executed", causal)
            counters.add("pages_moved", history_pages)
            return self._read_all(layer, q, scaling)

        site = self._site(layer, q_start, scaling)
        with counters.stage("estimate"):
            selection = self.selector.select(q, engine.keys(layer), site)
        with counters.stage("select"):
            reduced = reduce_mask(
                selection,
                q_start=q_start,
                block_size=shape.block_size,
                ratio=shape.block_size_ratio,
                kv_heads=shape.kv_heads,
                transfer=self.rules.transfer,
                reduce_heads=self.rules.reduce_heads,
                reduce_queries=self.rules.reduce_queries,
                reduce_sub_blocks=self.rules.reduce_sub_blocks,
                threshold=self.selector.threshold_of(layer),
            )
            executed = executed_mask(selection.mask, reduced, self.rules.attend)
        counters.add("mask_kept", selection.mask.sum())
        if history_pages:
            counters.add("pages_moved", reduced.pages.sum())
        if self.mass_recall:
            self._count_mass(layer, q, executed, site)
        return self._read(layer, q, executed, reduced.tiles, reduced.pages, q_start, scaling)

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        if self.steps is not None:
            return self.steps.attend(layer, q, k, v, scaling)
        engine, shape = self.engine, self.engine.shape
        engine.append(layer, k, v)
        tiles = shape.kv_heads * shape.blocks(engine.lengths[layer])
        self.counters.add("decode_tiles", tiles)
        self.counters.add("decode_tiles_kept", tiles)
        return self._read_all(layer, q, scaling)

    def _read(
        self,
        layer: int,
        q: Tensor,
        executed: Tensor,
        tiles: Tensor,
        pages: Tensor,
        q_start: int,
        scaling: float,
    ) -> Tensor:
        """Attention inside the executed mask, window by window."""
        shape = self.engine.shape
        group = shape.q_heads // shape.kv_heads
        whole: BlockLists | None = None
        parts: dict[int, list[Part]] = defaultdict(list)
        for window in self.engine.windows(layer, tiles, pages):
            rows = window.rows(group)
            with self.counters.stage("select"):
                if window.only and window.columns is None:
                    if whole is None:
                        whole = self.ops.block_lists(executed)
                    assert whole is not None
                    lists = BlockLists(whole.indices[rows], whole.counts[rows])
                else:
                    lists = self.ops.block_lists(window.mask(executed, group))
            least = self.ops.tiles_of_empty_row(q, window.tiles)
            self.counters.add("executed", lists.counts.clamp(min=least).sum())
            # Parts are merged in fp32, or every merge would round.
            part = self.ops.block_sparse_attention(
                q[rows],
                window.tiles,
                lists,
                q_start=q_start,
                scaling=scaling,
                out_dtype=None if window.only else torch.float32,
            )
            self._add(parts[rows.start], part)
        outs = [self._merged(parts[first], q.dtype) for first in sorted(parts)]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _read_all(self, layer: int, q: Tensor, scaling: float) -> Tensor:
        """Dense causal attention, part by part."""
        parts: list[Part] = []
        for k, v, causal in self.engine.dense_parts(layer):
            part = self.ops.dense_attention(q, k, v, scaling=scaling, causal=causal)
            self._add(parts, part)
        return self._merged(parts, q.dtype)

    def _add(self, parts: list[Part], part: Part) -> None:
        """Merging many parts at once is less traffic than two by two; memory bounds how many."""
        if len(parts) == MOST_PARTS:
            parts[:] = [self._merge(parts, torch.float32)]
        parts.append(part)

    def _merged(self, parts: list[Part], dtype: torch.dtype) -> Tensor:
        return parts[0][0].to(dtype) if len(parts) == 1 else self._merge(parts, dtype)[0]

    def _merge(self, parts: list[Part], dtype: torch.dtype) -> Part:
        outs, lses = zip(*parts, strict=True)
        return self.ops.merge_states(outs, lses, out_dtype=dtype)

    def _count_mass(self, layer: int, q: Tensor, executed: Tensor, site: Site) -> None:
        """Share of the true attention mass inside the executed mask.

        A diagnostic: what it reads is no traffic of the method, and its row compares no times.
        """
        traffic = self.engine.traffic
        h2d = traffic.h2d
        # Cloned, since the next piece may come through the same slot of the ring.
        k = torch.cat([piece.clone() for _, piece in self.engine.keys(layer).pieces()], 1)
        traffic.h2d = h2d
        mass = self.ops.attention_mass(
            q, k, block_size=site.block_size, q_start=site.q_start, scaling=site.scaling
        )
        self.counters.add("mass_kept", (mass * executed).sum())
        self.counters.add("mass_total", mass.sum())


def _timed(ops: Any, counters: Counters) -> Any:
    """The operators, those of a stage of their own timed as that stage."""

    def timed(function, stage):
        def run(*args, **kwargs):
            with counters.stage(stage):
                return function(*args, **kwargs)

        return run

    names = {name: getattr(ops, name) for name in (*OPERATORS, "name")}
    for name, stage in STAGE_OF_OPERATOR.items():
        names[name] = timed(names[name], stage)
    return SimpleNamespace(**names)

"""What would have moved: pages, bytes and blocks for every page size, reduction and transfer,
counted in one pass over the masks of real prompts.

    python -m experiments.study.masks [--task NAME,...] [--length N,...] [--samples N]
        [--points SELECTOR[:THRESHOLD[:STRIDE]],...] [--chunk_size N] [--model NAME] [--out DIR]
        [--limit-s N]

With the reduction `any`, neither block_size_ratio nor transfer can change an output, so one prefill
with engine=resident serves all of them: each mask is reduced in every way as it is made. Prompts
are those of run.py with the same keys. A prompt at a point is a file under DIR/parts and is made
once; the tables are written from all parts in DIR:

    heads.parquet    selector threshold stride task length index layer head mask_kept mask_causal
    traffic.parquet  selector threshold stride task length index block_size_ratio reduce_heads
                     reduce_queries reduce_sub_blocks transfer pages_moved pages_history
                     bytes_moved bytes_history executed mask_causal

`threshold` and `stride` are null for a method without one. Counts are sums over layers (and heads)
of one prompt, named as in docs/results.md.

- `bytes_moved` is what engine=offload with digest=none copies to the device: K and V both. With
  digest=resident_k it is half of that; what an estimate streams comes on top.
- The three reductions are varied one at a time, `mean_score` where the method has scores with a
  threshold. gather has no reduce_sub_blocks, so it stays `any` there.
- A reduction other than `any` changes what a layer hands on, and so the masks of later layers. Here
  all counts are of the masks made under `any`: the first-order effect.
- `executed` is of attend=mask, without what a kernel adds for rows that are empty in one slot of
  the ring.

Exit codes: 0 ok, 2 bad input, 3 the limit came first, 130 interrupted; the same command goes on.
"""

import argparse
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from xsparse import cli, plan, selectors, store, tasks
from xsparse.config import Config, register
from xsparse.progress import Progress
from xsparse.prompts import Source
from xsparse.selectors import Selection, Selector, Site
from xsparse.settings import CHOICES, ConfigError, Settings, refuse
from xsparse.store.files import read_json, to_json, write_atomic

if TYPE_CHECKING:
    from torch import Tensor

    from xsparse.kv.shape import CacheShape
    from xsparse.models import Loaded
    from xsparse.selectors.reduce import Reduced

RATIOS = (1, 2, 4, 8, 16)
REDUCTIONS = ("reduce_heads", "reduce_queries", "reduce_sub_blocks")
OK, STOPPED = 0, 3

PAIR = ("selector", "threshold", "stride", "task", "length", "index")
HEADS = (*PAIR, "layer", "head", "mask_kept", "mask_causal")
COUNTED = ("pages_moved", "pages_history", "bytes_moved", "bytes_history", "executed")
TRAFFIC = (*PAIR, "block_size_ratio", *REDUCTIONS, "transfer", *COUNTED, "mask_causal")


# What is counted


@dataclass(frozen=True)
class Way:
    """How a mask becomes what moves, but for the size of a page."""

    transfer: str
    reduce_heads: str = "any"
    reduce_queries: str = "any"
    reduce_sub_blocks: str = "any"


def ways(selector: Selector) -> list[Way]:
    """`any` three times, and each reduction that the method supports in turn."""
    scored = isinstance(selector, selectors.MassSelector)
    found = []
    for transfer in CHOICES["transfer"]:
        found.append(Way(transfer))
        for key in REDUCTIONS if transfer == "ring" else REDUCTIONS[:2]:
            rules = [r for r in CHOICES[key] if r != "any" and (scored or r != "mean_score")]
            found += [Way(transfer, **{key: rule}) for rule in rules]
    return found


class Counts:
    """Sums over the chunks and layers of one prompt; those of masks stay on the device."""

    def __init__(self, shape: "CacheShape", selector: Selector):
        import torch

        self.shape, self.selector = shape, selector
        self.ways = ways(selector)
        whole = {"dtype": torch.int64, "device": shape.device}
        self.kept = torch.zeros(shape.layers, shape.q_heads, **whole)
        # pages, tiles of history and executed blocks of each way and ratio
        self.moved = torch.zeros(len(self.ways) * len(RATIOS), 3, **whole)
        self.causal = [0] * shape.layers  # of one head
        self.pages_history: dict[int, int] = dict.fromkeys(RATIOS, 0)
        self.bytes_history = 0

    def add(self, selection: Selection, queries: int, site: Site) -> None:
        """The mask of one chunk in one layer. queries: tokens of the chunk"""
        import torch

        from xsparse.counters import causal_triples
        from xsparse.selectors.reduce import executed_mask

        mask, first = selection.mask, site.first_block
        self.causal[site.layer] += causal_triples(1, site.q_start, queries, site.block_size)
        self.bytes_history += site.q_start * self.shape.token_bytes
        for ratio in RATIOS:
            self.pages_history[ratio] += -(-first // ratio)
        self.kept[site.layer] += mask.flatten(1).sum(1)
        sums = []
        for way in self.ways:
            for reduced in reduced_by_ratio(
                selection,
                way,
                q_start=site.q_start,
                block_size=site.block_size,
                kv_heads=self.shape.kv_heads,
                threshold=self.selector.threshold_of(site.layer),
            ):
                executed = executed_mask(mask, reduced, "mask")
                sums += [reduced.pages.sum(), reduced.tiles[:, :first].sum(), executed.sum()]
        self.moved += torch.stack(sums).view_as(self.moved)

    def heads(self) -> dict[str, Any]:
        """mask_kept: of each layer and head; mask_causal: of each layer"""
        return {"mask_kept": self.kept.tolist(), "mask_causal": self.causal}

    def traffic(self) -> list[dict[str, Any]]:
        """A row for each way and ratio, without what names the prompt and the point."""
        rows, s = [], self.shape
        every = [(way, ratio) for way in self.ways for ratio in RATIOS]
        for (way, ratio), (pages, tiles, executed) in zip(every, self.moved.tolist(), strict=True):
            page_bytes = dataclasses.replace(s, block_size_ratio=ratio).page_bytes(2)
            ring = way.transfer == "ring"
            counted = {
                "pages_moved": pages,
                "pages_history": self.pages_history[ratio],
                "bytes_moved": pages * page_bytes if ring else tiles * 2 * s.tile_bytes,
                "bytes_history": self.bytes_history,
                "executed": executed,
                "mask_causal": s.q_heads * sum(self.causal),
            }
            rows.append({"block_size_ratio": ratio, **asdict(way), **counted})
        return rows


def reduced_by_ratio(selection: Selection, way: Way, **site: Any) -> Iterator["Reduced"]:
    """What moves, for each of RATIOS. site: the other arguments of reduce_mask

    Only a reduction of a page's blocks has to be done for every size of a page: otherwise a page
    moves where a block of it does.
    """
    from xsparse.selectors.reduce import reduce_mask

    if way.reduce_sub_blocks != "any":
        for ratio in RATIOS:
            yield reduce_mask(selection, ratio=ratio, **asdict(way), **site)
        return
    blocks = reduce_mask(selection, ratio=1, **asdict(way), **site)
    for ratio in RATIOS:
        yield _in_pages(blocks, ratio, whole=way.transfer == "ring")


def _in_pages(blocks: "Reduced", ratio: int, *, whole: bool) -> "Reduced":
    """The set of pages that hold a set of blocks. whole: a page moves as one"""
    import torch
    import torch.nn.functional as F

    history = blocks.first_block
    pages = F.pad(blocks.pages, (0, -history % ratio)).view(-1, ratio).any(-1)
    tiles = blocks.tiles
    if whole:
        wide = pages.repeat_interleave(ratio)[:history]
        tiles = torch.cat([wide[None], tiles[:, history:]], 1)
    return dataclasses.replace(blocks, pages=pages, tiles=tiles)


class Watched(Selector):
    """A method whose selections are shown to `watch` with the number of queries and the site."""

    name = "watched"
    digests = ()

    def __init__(self, selector: Selector, watch: Callable[[Selection, int, Site], None]):
        self.selector, self.watch = selector, watch

    def select(self, q: "Tensor", keys: Any, site: Site) -> Selection:
        selection = self.selector.select(q, keys, site)
        self.watch(selection, q.shape[1], site)
        return selection

    def threshold_of(self, layer: int) -> "float | Tensor":
        return self.selector.threshold_of(layer)


# (method, token ids, called before each chunk) -> counts
Count = Callable[[Selector, Sequence[int], Callable[[], None]], Counts]


@contextmanager
def counting(loaded: "Loaded", settings: Settings) -> Iterator[Count]:
    """A function that prefills token ids under a method and counts.

    settings: engine=resident and every reduction `any`; their selector is not used
    """
    import torch

    from xsparse.build import build
    from xsparse.hf import bound, cache_argument

    session = build(loaded.model, settings)
    engine, shape = session.engine, session.engine.shape

    def count(selector: Selector, ids: Sequence[int], before_chunk: Callable[[], None]) -> Counts:
        counts = Counts(shape, selector)
        session.selector = Watched(selector, counts.add)
        session.reset()
        session.phase = "prefill"
        engine.reserve(len(ids))
        prompt = torch.tensor([list(ids)], device=shape.device)
        with torch.inference_mode():
            for piece in prompt.split(settings.chunk_size, dim=1):
                before_chunk()
                loaded.model(input_ids=piece, logits_to_keep=1, **cache)
        return counts

    try:
        with bound(loaded.model, session) as kept:
            cache = {cache_argument(loaded.model): kept}
            yield count
    finally:
        engine.close()


# The command


@dataclass(frozen=True)
class Point:
    """A method with what of threshold and stride it has."""

    selector: str
    threshold: float | None
    stride: int | None
    settings: Settings

    def __str__(self) -> str:
        own = (self.selector, self.threshold, self.stride)
        return "-".join(str(part) for part in own if part is not None)


@dataclass(frozen=True)
class Prompt:
    """A prompt before it is made; config: that of its task"""

    config: Config
    task: str
    length: int
    index: int

    def __str__(self) -> str:
        return f"{self.task}-{self.length}-{self.index}"


@dataclass(frozen=True)
class Parts:
    """The counts of prompts at points, a file for each pair."""

    out: Path

    def path(self, point: Point, prompt: Prompt) -> Path:
        return self.out / "parts" / str(point) / f"{prompt}.json"

    def write(self, point: Point, prompt: Prompt, content: dict[str, Any]) -> None:
        path = self.path(point, prompt)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, to_json(content) + "\n")

    def agree(self, setup: dict[str, Any]) -> None:
        """Keep what all parts have in common. ConfigError where there are parts of another kind."""
        path = self.out / "setup.json"
        known = read_json(path) or {}
        for key, value in setup.items():
            if known.get(key, value) != value:
                there = f"{key}={known[key]}, not {value}"
                raise ConfigError(f"out={self.out}: holds counts with {there}; give another folder")
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomic(path, to_json(known | setup, indent=1) + "\n")

    def write_tables(self) -> int:
        """Both tables from all parts; the number of parts."""
        import pandas as pd

        parts = [read_json(path) for path in sorted(self.out.glob("parts/*/*.json"))]
        heads, traffic = [], []
        for part in parts:
            pair = {key: part[key] for key in PAIR}
            traffic += [pair | row for row in part["traffic"]]
            both = zip(part["mask_kept"], part["mask_causal"], strict=True)
            for layer, (kept_of_heads, causal) in enumerate(both):
                for head, kept in enumerate(kept_of_heads):
                    own = {"layer": layer, "head": head, "mask_kept": kept, "mask_causal": causal}
                    heads.append(pair | own)
        for name, columns, rows in (("heads", HEADS, heads), ("traffic", TRAFFIC, traffic)):
            frame = pd.DataFrame(rows, columns=list(columns))
            frame = frame.astype({"threshold": "float64", "stride": "Int64"})
            path = self.out / f"{name}.parquet"
            frame.to_parquet(new := path.with_suffix(".new"), index=False)
            os.replace(new, path)
        return len(parts)


class OutOfTime(Exception):
    """The limit came before the end."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(cli.BAD_INPUT, f"{self.prog}: {message}\n")


def main(argv: list[str] | None = None) -> int:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    begin_s = time.monotonic()
    parser = Parser(
        prog="python -m experiments.study.masks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", default="needles")
    parser.add_argument("--length", default="2048")
    parser.add_argument("--samples", default="4")
    parser.add_argument("--points", default="xattention:0.9:8")
    parser.add_argument("--chunk_size", default="512")
    parser.add_argument("--model", default="smollm2-135m-lc")
    parser.add_argument("--out", type=Path, default=Path("results/study/masks"))
    parser.add_argument("--limit-s", type=float, default=math.inf)
    args = parser.parse_args(argv)
    register()
    try:
        return _run(args, begin_s)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return cli.INTERRUPTED
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        print(f"{parser.prog}: {cli.one_line(error)}", file=sys.stderr)
        return cli.BAD_INPUT


def _run(args: argparse.Namespace, begin_s: float) -> int:
    if not args.limit_s > 0:
        refuse("limit-s", args.limit_s, "> 0")
    shared = [*cli.name_model(f"model={args.model}"), "engine=resident"]
    shared += [f"length=[{args.length}]", f"samples={args.samples}"]
    shared += [f"chunk_size={args.chunk_size}"]
    points = read_points(args.points, shared)
    prompts = read_prompts(args.task, shared)
    try:
        cli.check_folder(str(args.out))
    except ConfigError:
        refuse("out", args.out, "a folder that can be written")
    progress = Progress()
    with progress.download() as report:
        made = plan.make(prompts[0].config, report)
    parts = Parts(args.out)
    parts.agree(setup_of(made, prompts))
    pairs = [(prompt, point) for prompt in prompts for point in points]
    missing = [pair for pair in pairs if not parts.path(pair[1], pair[0]).exists()]
    progress.say(f"{len(missing)} of {len(pairs)} pairs of a prompt and a point to count")
    done = _count(made, missing, parts, begin_s + args.limit_s, progress) if missing else 0
    print(f"{args.out}: tables of {parts.write_tables()} pairs")
    if done < len(missing):
        progress.say(f"stopped by limit-s={args.limit_s:g}: {len(missing) - done} pairs are left")
        return STOPPED
    return OK


def read_points(text: str, shared: list[str]) -> list[Point]:
    """Points by their text, each once. Raises ConfigError, or Hydra's for an unknown selector."""
    points = []
    for given in text.split(","):
        words = given.split(":")
        if not words[0] or len(words) > 3:
            refuse("points", given or "nothing", "SELECTOR[:THRESHOLD[:STRIDE]], comma-separated")
        named = zip(("selector", "threshold", "stride"), words, strict=False)
        settings = cli.compose([*shared, *(f"{k}={v}" for k, v in named if v)]).settings()
        if settings.is_dense:
            refuse("points", given, "a method that selects")
        if isinstance(settings.threshold, str):
            refuse("points", given, "a threshold that is a number")
        own = selectors.parameters(settings.selector)
        threshold, stride = (
            getattr(settings, key) if key in own else None for key in ("threshold", "stride")
        )
        points.append(Point(settings.selector, threshold, stride, settings))
    return list({str(point): point for point in points}.values())


def read_prompts(names: str, shared: list[str]) -> list[Prompt]:
    """Prompts of run.py with these keys, short ones and all tasks first, so that a limit leaves
    whole rounds. Raises ConfigError, or Hydra's for an unknown task."""
    prompts: dict[str, Prompt] = {}
    for config in [cli.compose([*shared, f"task={name}"]) for name in names.split(",")]:
        for task in config.tasks:
            for length in config.length:
                for index in range(tasks.sample_count(task, length, config.task, config.samples)):
                    prompt = Prompt(config, task, length, index)
                    before = prompts.setdefault(str(prompt), prompt)
                    if _options(before.config) != _options(config):
                        refuse("task", names, f"one set of options for {task}")
    return sorted(prompts.values(), key=lambda p: (p.length, p.index))


def setup_of(made: plan.Plan, prompts: list[Prompt]) -> dict[str, Any]:
    """What decides the counts, beside the point and the place of a prompt."""
    settings = made.settings
    return {
        "model": made.files.name,
        "weights_sha256": made.files.weights_sha256,
        "tokenizer_hash": made.files.tokenizer_hash,
        "chat_template_kwargs": made.config.model.chat_template_kwargs,
        "dtype": made.dtype,
        "device": made.device.label,
        "versions": made.env["versions"],
        "source": store.source_hash(),
        "seed": settings.seed,
        "block_size": settings.block_size,
        "chunk_size": settings.chunk_size,
        **{f"task {prompt.task}": _options(prompt.config) for prompt in prompts},
    }


def _options(config: Config) -> dict[str, Any]:
    """What of a task's node can change a prompt of given index."""
    return {k: v for k, v in asdict(config.task).items() if k not in ("name", "tasks", "rounds")}


def _count(
    made: plan.Plan,
    missing: list[tuple[Prompt, Point]],
    parts: Parts,
    deadline_s: float,
    progress: Progress,
) -> int:
    """Count pairs until all are done or time is over; how many were."""
    from xsparse import models

    def check(expected_s: float = 0.0) -> None:
        if time.monotonic() + expected_s > deadline_s:
            raise OutOfTime

    config = made.config
    slowest_s: dict[int, float] = {}  # pair by length
    done, sample, last = 0, None, None
    try:
        check()
        loaded = models.load(config.model, dtype=made.dtype, device=made.device.kind)
        with counting(loaded, made.settings) as count:
            for prompt, point in missing:
                check(slowest_s.get(prompt.length, 0.0))
                if prompt is not last:
                    sample, last = _sample(loaded, prompt), prompt
                assert sample is not None
                begin_s = time.monotonic()
                counts = count(point.settings.method(), sample.input_ids, check)
                content = {key: getattr(point, key) for key in PAIR[:3]}
                content |= {key: getattr(prompt, key) for key in PAIR[3:]}
                content |= {"prompt_hash": sample.prompt_hash, "tokens": len(sample.input_ids)}
                content |= {**counts.heads(), "traffic": counts.traffic()}
                parts.write(point, prompt, content)
                done += 1
                took_s = time.monotonic() - begin_s
                slowest_s[prompt.length] = max(took_s, slowest_s.get(prompt.length, 0.0))
                progress.say(f"{done}/{len(missing)}  {point}  {prompt}  {took_s:.1f} s")
    except OutOfTime:
        pass
    return done


def _sample(loaded: "Loaded", prompt: Prompt) -> tasks.Sample:
    source = Source(prompt.config.model, prompt.config.task, prompt.config.seed)
    wanted = [(prompt.task, prompt.length, prompt.index)]
    return next(source.samples(wanted, loaded.tokenizer))


if __name__ == "__main__":
    raise SystemExit(main())

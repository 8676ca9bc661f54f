"""From a plan of prompts to a table of thresholds and what it gains."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from xsparse import models, tasks
from xsparse.calibrate.compare import Comparison, HeldOut
from xsparse.calibrate.observe import observed
from xsparse.calibrate.rule import row_thresholds
from xsparse.config import Config
from xsparse.plan import Plan
from xsparse.tasks import Sample

# Seeds of the prompts, far from the small numbers that evaluations use.
SEED, HELD_OUT_SEED = 7_000_003, 7_000_033
QUANTILES = (1.0, 0.99, 0.95, 0.9)  # always compared, beside the one asked for
DIGITS = 6  # of a threshold in the table, rounded up

Say = Callable[[str], None]


@dataclass(frozen=True)
class Calibration:
    """rows: how many thresholds of each head the tables are quantiles of; tables: by quantile, fp64
    [layers, q_heads]; comparisons: by quantile, on the held-out prompts"""

    rows: int
    tables: dict[float, Tensor]
    comparisons: dict[float, Comparison]
    prompts: list[Sample]
    held_out: list[Sample]


def calibrate(
    plan: Plan, *, coverage: float, quantiles: list[float], held_out: int, say: Say
) -> Calibration:
    """Thresholds with which that share (a quantile; 1: all) of a head's rows keep what they need.

    plan.config.samples prompts of each task and length set the thresholds, held_out others compare
    them. Raises ValueError for prompts that leave nothing to choose.
    """
    config = plan.config
    tokenizer = models.load_tokenizer(config.model)
    prompts = _prompts(plan, tokenizer, SEED, config.samples)
    others = _prompts(plan, tokenizer, HELD_OUT_SEED, held_out)
    for prompt in (*prompts, *others):
        if len(prompt.input_ids) <= 2 * config.block_size:
            raise ValueError(
                f"length={prompt.length}: a prompt of {prompt.task} has {len(prompt.input_ids)} "
                f"tokens; allowed is more than two blocks of block_size={config.block_size}"
            )
    loaded = models.load(config.model, dtype=plan.dtype, device=plan.device.kind)
    sizes = {key: getattr(config, key) for key in ("stride", "block_size", "chunk_size")}
    with observed(loaded, **sizes, ops_backend=config.ops_backend) as prefill:
        made = Rows(coverage)
        for number, prompt in enumerate(prompts, 1):
            begin_s = time.perf_counter()
            prefill(prompt.input_ids, made.watch)
            say(_line("calibrate", number, len(prompts), prompt, begin_s))
        tables = {quantile: made.table(quantile) for quantile in quantiles}
        kept = HeldOut(torch.stack(list(tables.values())), coverage)
        for number, prompt in enumerate(others, 1):
            begin_s = time.perf_counter()
            kept.begin()
            prefill(prompt.input_ids, kept.watch)
            say(_line("held out", number, len(others), prompt, begin_s))
    comparisons = dict(zip(tables, kept.compare(), strict=True))
    return Calibration(made.count, tables, comparisons, prompts, others)


class Rows:
    """The thresholds that rows need, by layer. Rows 0 and 1 have no choice and are left out."""

    def __init__(self, coverage: float):
        self.coverage = coverage
        self.layers: dict[int, list[Tensor]] = {}

    def watch(self, layer: int, first_block: int, mass: Tensor, scores: Tensor) -> None:
        needs = row_thresholds(mass, scores, self.coverage, first_block)
        self.layers.setdefault(layer, []).append(needs[:, max(0, 2 - first_block) :].cpu())

    @property
    def count(self) -> int:
        """Rows of a head."""
        return sum(needs.shape[1] for needs in self.layers[0])

    def table(self, quantile: float) -> Tensor:
        """The least thresholds that suffice for that share of each head's rows, rounded up."""
        rows = torch.stack([torch.cat(self.layers[i], 1) for i in sorted(self.layers)])
        last = rows.sort(-1).values[..., max(0, _ceil(quantile * rows.shape[-1]) - 1)]
        return (last * 10**DIGITS).ceil().div(10**DIGITS).clamp(max=1.0)


def content(plan: Plan, made: Calibration, coverage: float, quantile: float) -> dict[str, Any]:
    """What the file says: the four keys that `threshold=@file` reads, and how they came about."""
    config = plan.config
    return {
        "model": plan.files.name,
        "stride": config.stride,
        "block_size": config.block_size,
        "table": made.tables[quantile].tolist(),
        "selector": "xattention",
        "coverage": coverage,
        "quantile": quantile,
        "rows_per_head": made.rows,
        "length": config.length,
        "tasks": config.tasks,
        "samples": config.samples,
        "seed": SEED,
        "prompt_hashes": [prompt.prompt_hash for prompt in made.prompts],
        "weights_sha256": plan.files.weights_sha256,
        "tokenizer_hash": plan.files.tokenizer_hash,
        "dtype": plan.dtype,
        "device": plan.device.label,
        "versions": plan.env["versions"],
        "held_out": {
            "seed": HELD_OUT_SEED,
            "prompt_hashes": [prompt.prompt_hash for prompt in made.held_out],
            "by_quantile": [
                {"quantile": q, **asdict(found)} for q, found in made.comparisons.items()
            ],
        },
    }


def _prompts(plan: Plan, tokenizer: Any, seed: int, samples: int) -> list[Sample]:
    config: Config = plan.config
    prompts = []
    for name, length in plan.cells:
        task = tasks.build(
            name,
            tokenizer,
            length=length,
            seed=seed,
            node=config.task,
            chat_template_kwargs=config.model.chat_template_kwargs,
        )
        count = tasks.sample_count(name, length, config.task, samples)
        prompts += [task.sample(index) for index in range(count)]
    return prompts


def _line(what: str, number: int, count: int, prompt: Sample, begin_s: float) -> str:
    where = f"{prompt.task} {prompt.length} #{prompt.index}"
    return f"{what} {number}/{count}  {where}  {time.perf_counter() - begin_s:.1f} s"


def _ceil(x: float) -> int:
    """x rounded up, but for the noise of a product such as 0.07 * 100."""
    return int(-(-round(x, 9) // 1))

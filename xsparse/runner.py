"""One sweep point, from configuration to rows.

Reads like the experiment: plan the runs, compute the dense baseline where it is missing, compute
the sparse pass where it is missing, put both on one row. A finished point loads no model.
"""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xsparse import models, store
from xsparse.config import ConfigError
from xsparse.plan import Cell, Plan
from xsparse.progress import Progress
from xsparse.rows import build_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """A finished point. computed: prompts that had to be run, dense ones included."""

    plan: Plan
    rows: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    computed: int


def run_point(plan: Plan, progress: Progress) -> Outcome:
    """Compute what is missing of a point and return its rows.

    Raises ConfigError for what does not fit the model, before it is loaded or a folder made.
    """
    root = Path(plan.config.results) / "runs"
    computed = 0
    if plan.config.force or not plan.complete:
        workshop = Workshop(plan, progress)
        if plan.config.force:
            _forget(plan)
        for cell, run_id in plan.dense.items():
            computed += _compute(workshop, run_id, [cell], dense=True)
        computed += _compute(workshop, plan.run_id, plan.cells, dense=False)
    run = store.RunFolder(root / plan.run_id)
    return Outcome(plan, run.rows(), run.samples(), computed)


def _forget(plan: Plan) -> None:
    root = Path(plan.config.results)
    for run_id in {plan.run_id, *plan.dense.values()}:
        with store.lock(root, run_id):
            shutil.rmtree(root / "runs" / run_id, ignore_errors=True)


def _compute(workshop: "Workshop", run_id: str, cells: list[Cell], *, dense: bool) -> int:
    """Bring one run up to date under its lock; the number of prompts it took."""
    plan = workshop.plan
    root = plan.config.results
    with store.lock(root, run_id):
        missing = plan.missing(run_id, cells)
        run = store.RunFolder(Path(root) / "runs" / run_id)
        if not missing and run.state == "done":
            return 0
        run = store.RunFolder.open(root, run_id, _stored_config(plan, cells, dense), plan.env)
        try:
            if plan.is_dense and not dense:
                _adopt(plan, run, missing)
            else:
                workshop.run(run, missing, dense=dense)
            run.finish(_rows(workshop, run, dense=dense))
        except KeyboardInterrupt:
            run.interrupted()
            raise
        except Exception as error:
            run.fail(error)
            raise
        return 0 if plan.is_dense and not dense else len(missing)


def _stored_config(plan: Plan, cells: list[Cell], dense: bool) -> dict[str, Any]:
    config = plan.resolved()
    if dense:
        [(task, length)] = cells
        config |= {"selector": {"name": "full"}, "decode_selector": "full", "length": [length]}
        config["task"] = config["task"] | {"name": task, "tasks": [task]}
    return config


def _adopt(plan: Plan, run: store.RunFolder, missing: list[tuple[str, int, int]]) -> None:
    """A point with selector=full is its own baseline: its samples are the dense runs'."""
    root = Path(plan.config.results) / "runs"
    for cell, run_id in plan.dense.items():
        for sample in store.RunFolder(root / run_id).samples():
            if (*cell, sample["index"]) in missing:
                run.append(sample)


def _rows(workshop: "Workshop", run: store.RunFolder, *, dense: bool) -> list[dict[str, Any]]:
    plan = workshop.plan
    root = Path(plan.config.results) / "runs"
    identity = workshop.identity(run.run_id, dense=dense)
    if dense:
        return build_rows(identity, run.samples(), None)
    runs = {cell: store.RunFolder(root / run_id) for cell, run_id in plan.dense.items()}
    baseline = [sample for dense_run in runs.values() for sample in dense_run.samples()]
    hosts = {dense_run.environment().get("host") for dense_run in runs.values()}
    hosts.add(run.environment().get("host"))
    return build_rows(
        identity,
        run.samples(),
        baseline,
        dense_comparable=len(hosts) == 1 and not plan.config.mass_recall,
        dense_run_ids=plan.dense,
    )


class Workshop:
    """The model and what runs on it; the model is loaded with the first prompt."""

    def __init__(self, plan: Plan, progress: Progress):
        self.plan = plan
        self.progress = progress
        self.shape = models.shape(plan.config.model)
        self.selector = self._check()

    def _check(self) -> Any:
        """Refuse what does not fit together before a model is loaded; the selector."""
        import torch

        from xsparse import ops, session

        try:
            ops.get(self.plan.config.ops_backend, torch.device(self.plan.device.kind))
            return session.make_selector(
                self._settings(dense=False), layers=self.shape.layers, q_heads=self.shape.q_heads
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _settings(self, *, dense: bool) -> Any:
        from xsparse.session import Settings

        config = self.plan.config
        options = dict(config.selector)
        shared = {
            key: getattr(config, key)
            for key in Settings.__dataclass_fields__
            if key not in ("selector", "engine") and hasattr(config, key)
        }
        settings = Settings(
            **shared
            | {
                "selector": options.pop("name"),
                "selector_options": options,
                "engine": config.engine.name,
                "host_memory_gb": config.engine.host_memory_gb,
                "model_name": self.plan.files.name,
            }
        )
        if dense:
            settings.selector, settings.selector_options = "full", {}
            settings.decode_selector, settings.digest, settings.mass_recall = "full", None, False
            settings.transfer = "ring"
        return settings

    def run(
        self, run: store.RunFolder, missing: list[tuple[str, int, int]], *, dense: bool
    ) -> None:
        """Compute the missing prompts of a run, one after another, into its folder."""
        if not missing:
            return
        from xsparse import session, tasks
        from xsparse.measure import load_once, measured

        config, plan = self.plan.config, self.plan
        loaded = load_once(config.model, plan.dtype, plan.device.kind)
        built = session.build(loaded.model, self._settings(dense=dense))
        name = "dense" if dense else config.selector["name"]
        warm_up_tokens = self.warmup_tokens
        with measured(loaded, built) as bench, self.progress.prompts(name, len(missing)) as tick:
            bench.warm_up(warm_up_tokens)
            made: dict[Cell, Any] = {}
            for task, length, index in missing:
                if (task, length) not in made:
                    made[task, length] = tasks.build(
                        task,
                        loaded.tokenizer,
                        length=length,
                        seed=config.seed,
                        node=config.task,
                        chat_template_kwargs=config.model.chat_template_kwargs,
                    )
                record = bench.run(made[task, length].sample(index))
                run.append(record)
                tick(record)

    @property
    def warmup_tokens(self) -> int:
        """Two blocks on a CPU; on CUDA enough to compile and allocate everything."""
        config = self.plan.config
        if not self.plan.device.is_cuda:
            return 2 * config.block_size
        return min(max(config.length) - 2, 2 * config.chunk_size + config.block_size)

    def identity(self, run_id: str, *, dense: bool) -> dict[str, Any]:
        """The identity columns of a run's rows."""
        import torch

        from xsparse import ops
        from xsparse.digests import choose_digest
        from xsparse.selectors import registry

        config, plan = self.plan.config, self.plan
        settings = self._settings(dense=dense)
        backend = ops.get(config.ops_backend, torch.device(plan.device.kind))
        query = torch.empty(
            self.shape.q_heads,
            config.chunk_size,
            self.shape.head_dim,
            dtype=getattr(torch, plan.dtype),
            device=plan.device.kind,
        )
        offload = config.engine.name == "offload"
        selector = registry.build("full") if dense else self.selector
        has = registry.parameters(selector.name)
        minmax = settings.decode_selector == "minmax"
        return {
            "run_id": run_id,
            "model": plan.files.name,
            "weights_sha256": plan.files.weights_sha256,
            "tokenizer_hash": plan.files.tokenizer_hash,
            "dtype": plan.dtype,
            "seed": config.seed,
            "selector": selector.name,
            "threshold": config.threshold if "threshold" in has else None,
            "stride": config.stride if "stride" in has else None,
            "block_size": config.block_size,
            "block_size_ratio": config.block_size_ratio,
            "chunk_size": config.chunk_size,
            "reduce_heads": config.reduce_heads,
            "reduce_queries": config.reduce_queries,
            "reduce_sub_blocks": config.reduce_sub_blocks,
            "attend": config.attend,
            "engine": config.engine.name,
            "transfer": settings.transfer if offload else None,
            "ring_slots": config.ring_slots if offload else None,
            "digest": choose_digest(
                selector,
                settings.digest,
                decode_selector=settings.decode_selector,
                mass_recall=settings.mass_recall,
            )
            if offload
            else None,
            "decode_selector": settings.decode_selector,
            "decode_budget_tokens": config.decode_budget_tokens if minmax else None,
            "ops_backend": backend.name,
            "dense_kernel": backend.dense_kernel(query),
            "device": plan.device.label,
            "host": plan.env["host"],
            "versions": plan.env["versions"],
            "git_commit": plan.env["git"]["commit"],
            "command": plan.env["command"],
            "warmup_tokens": self.warmup_tokens,
            "repeats": 1,
        }

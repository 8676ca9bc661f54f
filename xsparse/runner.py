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
from xsparse.plan import Cell, Plan
from xsparse.progress import Progress
from xsparse.rows import CONFIG_COLUMNS, build_rows
from xsparse.settings import ConfigError, Settings

log = logging.getLogger(__name__)
SETTINGS = Settings.__dataclass_fields__


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
        dense = sum(len(plan.missing(run_id, [cell])) for cell, run_id in plan.dense.items())
        own = 0 if plan.is_dense else len(plan.missing(plan.run_id, plan.cells))
        progress.say(f"{dense + own} prompts to compute, {dense} dense and {own} sparse")
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
        if plan.finished(run, cells):
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
    hosts = {host for stored in (run, *runs.values()) for host in _hosts(stored)}
    return build_rows(
        identity,
        run.samples(),
        baseline,
        dense_comparable=len(hosts) == 1 and not plan.config.mass_recall,
        dense_run_ids=plan.dense,
    )


def _hosts(run: store.RunFolder) -> list[str | None]:
    """Every host that computed a sample of the run."""
    env = run.environment()
    return [one.get("host") for one in (env, *env.get("earlier", []))]


def check(plan: Plan, shape: models.ModelShape) -> None:
    """Refuse what does not fit together before a model is loaded. Raises ConfigError."""
    import torch

    from xsparse import fit, ops

    config, device = plan.config, plan.device.kind
    try:
        ops.get(config.ops_backend, torch.device(device))
        fit.check(
            plan.settings,
            shape,
            device=device,
            dtype=plan.dtype,
            tokens=max(*config.length, warmup_tokens(plan) + 3),
            model_name=plan.files.name,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def warmup_tokens(plan: Plan) -> int:
    """Two blocks on a CPU; on CUDA the longest prompt, whose shapes take in all others, so that
    compiling, planning and allocating stay outside the clock."""
    if not plan.device.is_cuda:
        return 2 * plan.config.block_size
    return max(plan.config.length) - 3


class Workshop:
    """The model and what runs on it; the model is loaded with the first prompt."""

    def __init__(self, plan: Plan, progress: Progress):
        self.plan = plan
        self.progress = progress
        self.shape = models.shape(plan.config.model)
        check(plan, self.shape)

    def run(
        self, run: store.RunFolder, missing: list[tuple[str, int, int]], *, dense: bool
    ) -> None:
        """Compute the missing prompts of a run, one after another, into its folder."""
        if not missing:
            return
        from xsparse.build import build
        from xsparse.measure import load_once, measured
        from xsparse.prompts import Source

        config, plan = self.plan.config, self.plan
        loaded = load_once(config.model, plan.dtype, plan.device.kind)
        self._check_device()
        settings = plan.settings.dense() if dense else plan.settings
        built = build(loaded.model, settings, plan.files.name)
        name = "dense" if dense else config.selector["name"]
        bound = measured(loaded, built, whole_steps=settings.cuda_graph == "step")
        with bound as bench, self.progress.prompts(name, len(missing)) as tick:
            bench.warm_up(warmup_tokens(plan))
            source = Source(config.model, config.task, config.seed)
            for sample in source.samples(missing, loaded.tokenizer, config.workers):
                record = bench.run(sample)
                run.append(record)
                tick(record)

    def _check_device(self) -> None:
        """The name in the rows must be that of the device which computes."""
        import torch

        device = self.plan.device
        if device.is_cuda and torch.cuda.get_device_name(device.kind) != device.label:
            raise ValueError(
                f"device={device.kind} is {torch.cuda.get_device_name(device.kind)}, not "
                f"{device.label}: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )

    def identity(self, run_id: str, *, dense: bool) -> dict[str, Any]:
        """The identity columns of a run's rows."""
        import torch

        from xsparse import ops

        config, plan = self.plan.config, self.plan
        settings = plan.settings.dense() if dense else plan.settings
        concerns = settings.concerns()
        backend = ops.get(config.ops_backend, torch.device(plan.device.kind))
        query = torch.empty(
            self.shape.q_heads,
            config.chunk_size,
            self.shape.head_dim,
            dtype=getattr(torch, plan.dtype),
            device=plan.device.kind,
        )
        return {
            **{key: concerns.get(key) for key in CONFIG_COLUMNS if key in SETTINGS},
            "run_id": run_id,
            "model": plan.files.name,
            "weights_sha256": plan.files.weights_sha256,
            "tokenizer_hash": plan.files.tokenizer_hash,
            "dtype": plan.dtype,
            "seed": config.seed,
            "ops_backend": backend.name,
            "dense_kernel": backend.dense_kernel(query),
            "device": plan.device.label,
            "host": plan.env["host"],
            "versions": plan.env["versions"],
            "git_commit": plan.env["git"]["commit"],
            "command": plan.env["command"],
            "warmup_tokens": warmup_tokens(plan),
            "repeats": 1,
        }

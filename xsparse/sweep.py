"""The points of one call of run.py: run each, note how it ended, and report on all of them.

A failing point never stops the others: its traceback goes to its own log and status, and the end
of the sweep lists every failure. The report is made in every case.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from rich.console import Console

from xsparse import store, tracking
from xsparse.config import from_hydra
from xsparse.fit import without_effect
from xsparse.models import ModelError
from xsparse.plan import Plan, make
from xsparse.progress import Progress
from xsparse.runner import Outcome, run_point
from xsparse.settings import ConfigError

log = logging.getLogger(__name__)
OK, FAILED = 0, 3
# Why a point without an error is not done when the sweep is over.
SILENT = {
    "pending": "it was never started",
    "running": "it has not reported its end",
    "interrupted": "it was interrupted, or its process was killed",
}


class Announce(Callback):
    """Notes every point of a sweep before the first one runs, so that one that never starts, its
    launcher having died, counts as failed. Sweepers that decide as they go announce nothing."""

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        from xsparse.points import expand

        hydra = config.hydra
        if not hydra.sweeper._target_.endswith(".BasicSweeper"):
            return
        fixed = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
        folder = store.SweepFolder.open(hydra.sweep.dir, " ".join(sys.argv))
        for number, overrides in enumerate(expand([*fixed, *hydra.overrides.task])):
            folder.add_point(number, overrides)


def run_job(node: Any) -> tuple[float, float] | None:
    """One Hydra job: the objectives (accuracy, 1 - mask density) or None if it failed."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    multirun = hydra.mode == RunMode.MULTIRUN
    number = int(hydra.job.num) if multirun else 0
    path = Path(hydra.sweep.dir if multirun else hydra.run.dir)
    overrides = [str(override) for override in hydra.overrides.task]
    folder = store.SweepFolder.open(path, " ".join(sys.argv))
    folder.add_point(number, overrides)
    label = f"[{number}] {' '.join(overrides)}: " if multirun else ""
    try:
        config = from_hydra(node)
        folder.set_point(number, "running")
        tracking.mode_of(config.tracker)
        progress = Progress(label=label)
        with progress.download() as report:
            plan = make(config, report)
        folder.set_point(number, "running", run_id=plan.run_id)
        if unused := without_effect(plan.settings, overrides):
            log.warning("%sset, but without effect on this point: %s", label, ", ".join(unused))
        if not config.force and plan.complete:
            outcome = run_point(plan, progress)
        else:
            outcome = _tracked(plan, progress, group=path.name, overrides=overrides)
    except KeyboardInterrupt:
        folder.set_point(number, "interrupted")
        raise
    except (ConfigError, ModelError) as error:
        log.exception("point %d refused", number)
        folder.set_point(number, "failed", error=error)
    except Exception as error:
        log.exception("point %d failed", number)
        folder.set_point(number, "failed", error=error)
    else:
        folder.set_point(number, "done")
        _say(outcome, label)
        return _objectives(outcome)
    return None


def _tracked(plan: Plan, progress: Progress, *, group: str, overrides: list[str]) -> Outcome:
    """The point, mirrored to W&B."""
    config = plan.config
    name = config.selector["name"]
    with tracking.start(
        config.tracker,
        run_id=plan.run_id,
        group=group,
        name=" ".join(overrides) or name,
        job_type=config.task.name,
        tags=[plan.files.name, name, config.engine.name],
        config=plan.resolved(),
        out_dir=config.results,
    ) as mirror:
        outcome = run_point(plan, progress)
        mirror.length_rows(outcome.rows)
        mirror.samples(outcome.samples)
        mirror.summary(outcome.rows)
        if mirror.run is not None:
            _draw(mirror, outcome)
    return outcome


def _draw(mirror: tracking.Mirror, outcome: Outcome) -> None:
    """The point's place among dense and itself, and its NIAH map."""
    import pandas as pd

    from xsparse import report

    mirror.image("pareto", lambda: report.pareto(pd.DataFrame(outcome.rows)))
    needles = [sample for sample in outcome.samples if sample["task"] == "niah"]
    if needles:
        mirror.image("niah", lambda: report.heatmap(pd.DataFrame(needles)))


def _say(outcome: Outcome, label: str) -> None:
    if outcome.computed:
        prompts = f"{outcome.computed} prompt{'s' if outcome.computed > 1 else ''}"
        text = f"{label}run {outcome.plan.run_id}: {prompts} computed"
    else:
        text = f"{label}run {outcome.plan.run_id}: skipped, already computed"
    Console(stderr=True).print(text, highlight=False, soft_wrap=True, markup=False)


def _objectives(outcome: Outcome) -> tuple[float, float]:
    means = [row for row in outcome.rows if row["task"] == "mean"]
    accuracy = sum(row["accuracy"] for row in means) / len(means)
    sparsity = 1 - sum(row["mask_density"] for row in means) / len(means)
    return accuracy, sparsity


def finish(folder: store.SweepFolder) -> int:
    """Report on a sweep: table, warnings, failures, page. Returns the exit code."""
    from xsparse.report import build, load
    from xsparse.report.console import table
    from xsparse.report.findings import findings

    console = Console(width=None if sys.stdout.isatty() else 140)
    points = folder.points()
    runs = folder.path.parents[1] / "runs"
    rows = [row for p in points if p["state"] == "done" for row in load.rows_of(runs / p["run_id"])]
    if rows:
        console.print(table(rows))
    failures = folder.failures()
    for point in failures:
        where = " ".join(point["overrides"]) or "the only point"
        if not point.get("error"):
            point["error"] = SILENT[point["state"]]
            folder.set_point(point["number"], point["state"], error=point["error"])
        console.print(
            f"point {point['number']} ({where}) {point['state']}: {point['error']}",
            style="red",
            markup=False,
            highlight=False,
        )
    stored = load.read(folder.path)
    for found in findings(stored):
        if found.level == "warning":
            console.print(f"warning: {found.title}", markup=False, highlight=False)
    console.print(f"report: {build.write(stored)}", highlight=False, soft_wrap=True)
    return FAILED if failures else OK

"""`python -m xsparse.store list | show RUN_ID | remove RUN_ID...`: look after stored runs."""

import argparse
import shutil
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xsparse.store.locks import lock
from xsparse.store.run import RunFolder, find_run, list_runs

STATES = ("running", "done", "interrupted", "failed")

LIST_COLUMNS = (
    "run_id",
    "when",
    "state",
    "model",
    "selector",
    "threshold",
    "tasks",
    "lengths",
    "n",
)

ROW_COLUMNS = (
    "task",
    "length",
    "n",
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "delta",
    "mask_density",
    "page_density",
    "transfer_ratio",
    "executed_density",
    "prefill_tok_s",
    "decode_tok_s",
    "prefill_speedup",
)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, or 2 for bad input, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m xsparse.store", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--results", default="results", help="results folder (default: results)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", parents=[common], help="all stored runs")
    listing.set_defaults(run=_list)

    show = commands.add_parser("show", parents=[common], help="all about one run")
    show.add_argument("run_id", help="run id or the beginning of one")
    show.set_defaults(run=_show)

    remove = commands.add_parser("remove", parents=[common], help="delete runs")
    remove.add_argument("run_id", nargs="*", help="run ids or beginnings of them")
    remove.add_argument("--state", choices=STATES, help="all runs in this state")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    remove.set_defaults(run=_remove)
    return parser


def _console() -> Console:
    # Into a pipe or a file nothing is cut off.
    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


def _list(options: argparse.Namespace) -> int:
    runs = list_runs(options.results)
    if not runs:
        print(f"no runs in {Path(options.results) / 'runs'}")
        return 0
    table = Table(*LIST_COLUMNS, box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for run in runs:
        table.add_row(*(escape(cell) for cell in _summary(run)))
    _console().print(table)
    return 0


def _summary(run: RunFolder) -> list[str]:
    """The cells of a run in the list. What one run lacks or has damaged must not hide the rest."""
    try:
        status, config, rows = run.status(), run.config(), run.rows()
    except ValueError:
        return [run.run_id, "", "unreadable", *[""] * 6]
    single = [row for row in rows if row.get("task") != "mean"]
    facts = {**config, **(single[0] if single else {})}
    return [
        run.run_id,
        (status.get("ended") or status.get("started") or "")[:16].replace("T", " "),
        status["state"],
        *(_cell(facts.get(key)) for key in ("model", "selector", "threshold")),
        _cell(_distinct(row["task"] for row in single) or config.get("task")),
        _cell(_distinct(row["length"] for row in single) or config.get("length")),
        str(run.sample_count()),
    ]


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _cell(value: Any) -> str:
    """A value as a table shows it; of a configuration group its name."""
    if isinstance(value, dict):
        value = value.get("name")
    if isinstance(value, list):
        shown = [_cell(item) for item in value[:3]]
        return ",".join(shown) + (f",+{len(value) - 3}" if len(value) > 3 else "")
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _show(options: argparse.Namespace) -> int:
    run = find_run(options.results, options.run_id)
    console = _console()
    status = run.status()
    title = f"run {run.run_id}: {status['state']}, {run.sample_count()} samples"
    console.print(title, style="bold")
    if status.get("error"):
        console.print(escape(status["error"]), style="red")
    for name in ("config.yaml", "env.json"):
        file = run.path / name
        if file.exists():
            console.print(f"\n{name}", style="bold")
            console.print(escape(file.read_text(encoding="utf-8").rstrip()), soft_wrap=True)
    if rows := run.rows():
        table = Table(*ROW_COLUMNS, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(escape(_cell(row.get(column))) for column in ROW_COLUMNS))
        console.print("\nrows.json", style="bold")
        console.print(table)
    return 0


def _remove(options: argparse.Namespace) -> int:
    chosen = [find_run(options.results, prefix) for prefix in options.run_id]
    runs = list_runs(options.results)
    if options.state:
        chosen += [run for run in runs if run.state == options.state]
    elif not chosen:
        raise ValueError("nothing to remove: give run ids or --state")
    chosen = list({run.run_id: run for run in chosen}.values())
    if not chosen:
        print(f"no run is {options.state}")
        return 0

    with ExitStack() as held:
        for run in chosen:
            held.enter_context(lock(options.results, run.run_id, timeout_s=0))
            if run.state == "running":  # by a process that did not take the lock
                raise ValueError(f"run {run.run_id} is running")
        doomed = {run.run_id for run in chosen}
        for run_id, users in _users_of_dense(runs, doomed).items():
            print(f"{run_id} is the dense baseline of {', '.join(users)}")
        print(f"to remove: {', '.join(sorted(doomed))}")
        if not options.yes and not _confirmed():
            print("nothing removed")
            return 0
        for run in chosen:
            # Renamed first: a deletion that stops half way leaves nothing that looks like a run.
            grave = run.path.with_name(f".removed-{run.run_id}")
            shutil.rmtree(grave, ignore_errors=True)
            run.path.rename(grave)
            shutil.rmtree(grave)
    print(f"removed {len(chosen)}")
    return 0


def _users_of_dense(runs: list[RunFolder], doomed: set[str]) -> dict[str, list[str]]:
    """Dense runs about to go, each with the runs that stay and compare themselves with it."""
    users: dict[str, list[str]] = {}
    for run in runs:
        if run.run_id not in doomed:
            for dense in _distinct(row.get("dense_run_id") for row in run.rows()):
                if dense in doomed:
                    users.setdefault(dense, []).append(run.run_id)
    return users


def _confirmed() -> bool:
    """Raises ValueError where nobody can answer."""
    try:
        return input("remove? [y/N] ").strip().lower() in {"y", "yes"}
    except EOFError:
        raise ValueError("nothing removed: confirm with --yes") from None


if __name__ == "__main__":
    sys.exit(main())

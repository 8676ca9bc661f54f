"""Are the Triton operators right, and how fast are they beside what a researcher would use today?

    python -m experiments.kernels [--quick] [--explore] [--out DIR] [--parts ...] [--budget-s N]
    python -m experiments.kernels --table results/published/h200/kernels.csv [--into FILE]

Correctness first, then times. A part runs in a process of its own with a time limit, so a kernel
that hangs or crashes costs its own part only; the peers of attention share their process with ours
and take turns over the same masks. Writes to --out: kernels.jsonl (rows as they come),
kernels.csv, kernels.png, environment.json (versions, device, clocks, commit), log.txt. The last
lines printed are the tables. `--explore` times other tilings than the defaults too. `--device cpu`
runs tiny sizes in Triton's interpreter. `--table` prints the tables of a CSV, or puts them between
the markers of a document.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments import kernel_tables as tables

LIMIT_S = 200
"""Most seconds one part may take; compilation takes most of it in the slowest ones."""

PARTS = [  # in the order they run: what is needed most comes first
    *("check", "check-hopper", "attention", "estimate", "chain", "attention-small"),
    *("decode", "gather"),
]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.table:
        return show(args.table, args.into)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.part:
        return run_part(args, out)
    return run_all(args, out)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.kernels", description=__doc__)
    parser.add_argument("--out", default="results/kernels", help="where results are written")
    parser.add_argument("--quick", action="store_true", help="one length, two densities")
    parser.add_argument("--explore", action="store_true", help="other tilings too")
    parser.add_argument("--parts", default="all", help="comma-separated; all by default")
    parser.add_argument("--budget-s", type=float, default=540, help="seconds for everything")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="commit of the code, for environment.json")
    parser.add_argument("--table", type=Path, metavar="CSV", help="print the tables of a CSV")
    parser.add_argument("--into", type=Path, help="with --table: the document to update")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # what the child processes run
    args = parser.parse_args(argv)
    if args.budget_s <= 0:
        parser.error(f"--budget-s={args.budget_s}: must be positive")
    return args


def show(path: Path, document: Path | None) -> int:
    rows = tables.read_csv(path)
    if document:
        tables.update(document, rows)
    else:
        print("\n".join(tables.table(rows)))
    return 0


def run_all(args: argparse.Namespace, out: Path) -> int:
    start = time.monotonic()
    parts = PARTS if args.parts == "all" else args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"--parts={','.join(sorted(unknown))}: allowed is {', '.join(PARTS)}")
    (out / "kernels.jsonl").write_text("")
    with open(out / "log.txt", "w") as log:

        def say(line: str) -> None:
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()

        skipped: set[str] = set()
        for part in parts:
            if part in skipped:
                say(f"## {part}: not run, check-hopper did not end well")
                continue
            left = args.budget_s - (time.monotonic() - start)
            if left < 10:
                say(f"## {part}: not run, {args.budget_s:.0f} s are over")
                continue
            begin = time.monotonic()
            code = run_child(part, args, min(left, LIMIT_S), say)
            say(f"## {part}: exit {code} after {time.monotonic() - begin:.0f} s")
            if part == "check-hopper" and code != 0:
                skipped = {"attention", "attention-small", "chain"}
        rows = [json.loads(line) for line in (out / "kernels.jsonl").read_text().splitlines()]
        tables.write_csv(rows, out / "kernels.csv")
        known = environment(args.device, args.commit)
        (out / "environment.json").write_text(json.dumps(known, indent=1) + "\n")
        try:
            tables.plot(rows, out / "kernels.png")
        except Exception as problem:  # the numbers are worth more than the picture
            say(f"no plot: {problem!r}")
        for line in tables.table(rows):
            say(line)
    return 0 if rows and all(r.get("ok", True) for r in rows) else 1


def run_child(part: str, args: argparse.Namespace, limit_s: float, say) -> int | str:
    command = [sys.executable, "-u", "-m", "experiments.kernels", "--part", part]
    command += ["--out", args.out, "--device", args.device] + ["--quick"] * args.quick
    command += ["--explore"] * args.explore
    env = dict(os.environ)
    if args.device == "cpu":
        env["TRITON_INTERPRET"] = "1"
    child = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    reader = threading.Thread(target=lambda: [say(line.rstrip()) for line in child.stdout or ()])
    reader.start()
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return f"stopped at its limit of {limit_s:.0f} s"
    finally:
        reader.join(10)


def run_part(args: argparse.Namespace, out: Path) -> int:
    """One part in this process; rows go to kernels.jsonl as they come."""
    from experiments.kernel_parts import RUN, full_plan, interpreter_plan

    plan = interpreter_plan() if args.device == "cpu" else full_plan(args.quick, args.explore)
    with open(out / "kernels.jsonl", "a") as file:
        for row in RUN[args.part](plan):
            row["part"] = args.part
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(tables.describe(row), flush=True)
    return 0


def environment(device: str, commit: str | None) -> dict[str, Any]:
    import torch
    import triton

    from experiments.timing import clocks, clocks_under_load, driver

    known: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "command": ["python", "-m", "experiments.kernels", *sys.argv[1:]],
    }
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": properties.total_memory / 1e9,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": driver(),
            "clocks_idle": clocks(),
            "clocks_under_load": clocks_under_load(torch.device("cuda")),
        }
    for peer in ("flash-attn-4", "nvidia-cutlass-dsl"):
        try:
            known[peer] = metadata.version(peer)
        except metadata.PackageNotFoundError:
            known[peer] = None
    return known


if __name__ == "__main__":
    raise SystemExit(main())

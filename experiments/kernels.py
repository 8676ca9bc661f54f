"""Are the Triton operators right, and how fast are they beside what a researcher would use today?

    python -m experiments.kernels [--quick] [--out DIR] [--parts check,attention,...] [--budget-s N]

Correctness first, then times. Every part runs in a process of its own with a time limit, so a
kernel that hangs or crashes costs its own part only. Writes to --out: kernels.jsonl (rows as they
come), kernels.csv, kernels.png, environment.json (versions, device, clocks), log.txt. The last
lines printed are a short table. `--device cpu` runs tiny sizes in Triton's interpreter.
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

LIMIT_S = 200
"""Most seconds one part may take; compilation takes most of it in the slowest ones."""

COLUMNS = [
    *("op", "variant", "q_heads", "kv_heads", "head_dim", "length", "stride"),
    *("density", "measured_density", "ms", "min_ms", "max_ms", "repeats", "first_s"),
    *("tflops", "gb_s", "ok", "error", "note", "part"),
]
PARTS = [  # in the order they run: what is needed most comes first
    *("check", "check-hopper", "attention-hopper", "attention", "estimate", "dense"),
    *("chain", "decode", "gather", "flex", "fa4"),
]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.part:
        return run_part(args.part, out, args.device, args.quick)
    return run_all(args, out)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.kernels", description=__doc__)
    parser.add_argument("--out", default="results/kernels", help="where results are written")
    parser.add_argument("--quick", action="store_true", help="one length, two densities")
    parser.add_argument("--parts", default="all", help="comma-separated; all by default")
    parser.add_argument("--budget-s", type=float, default=540, help="seconds for everything")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # what the child processes run
    args = parser.parse_args(argv)
    if args.budget_s <= 0:
        parser.error(f"--budget-s={args.budget_s}: must be positive")
    return args


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

        for part in parts:
            left = args.budget_s - (time.monotonic() - start)
            if left < 10:
                say(f"## {part}: not run, {args.budget_s:.0f} s are over")
                continue
            begin = time.monotonic()
            code = run_child(part, args, min(left, LIMIT_S), say)
            say(f"## {part}: exit {code} after {time.monotonic() - begin:.0f} s")
        rows = [json.loads(line) for line in (out / "kernels.jsonl").read_text().splitlines()]
        write_csv(rows, out / "kernels.csv")
        (out / "environment.json").write_text(json.dumps(environment(args.device), indent=1))
        try:
            plot(rows, out / "kernels.png")
        except Exception as problem:  # the numbers are worth more than the picture
            say(f"no plot: {problem!r}")
        for line in table(rows):
            say(line)
    return 0 if rows and all(r.get("ok", True) for r in rows) else 1


def run_child(part: str, args: argparse.Namespace, limit_s: float, say) -> int | str:
    command = [sys.executable, "-u", "-m", "experiments.kernels", "--part", part]
    command += ["--out", args.out, "--device", args.device] + ["--quick"] * args.quick
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


def run_part(part: str, out: Path, device: str, quick: bool) -> int:
    """One part in this process; rows go to kernels.jsonl as they come."""
    from experiments.kernel_parts import RUN, full_plan, interpreter_plan

    plan = interpreter_plan() if device == "cpu" else full_plan(quick)
    with open(out / "kernels.jsonl", "a") as file:
        for row in RUN[part](plan):
            row["part"] = part
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(describe(row), flush=True)
    return 0


def describe(row: dict[str, Any]) -> str:
    if row["op"] == "check":
        verdict = "OK  " if row["ok"] else "FAIL"
        return f"{verdict} {row['variant']} {row.get('error', '')} {row['note']}"
    what = [row["op"], row["variant"]]
    if "q_heads" in row:
        what.append(f"{row['q_heads']}/{row['kv_heads']} d={row['head_dim']} n={row['length']}")
    what += [f"{k}={row[k]}" for k in ("stride", "density") if k in row]
    what += [f"{row[k]:.4g} {u}" for k, u in UNITS.items() if k in row]
    return " ".join([*what, row.get("note", "")])


UNITS = {"ms": "ms", "tflops": "TFLOP/s", "gb_s": "GB/s", "first_s": "s first"}


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{x:.6g}" if isinstance(x, float) else x for k, x in row.items()})


def environment(device: str) -> dict[str, Any]:
    import torch
    import triton

    from experiments.timing import clocks

    known: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": sys.argv,
    }
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": properties.total_memory / 1e9,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "clocks": clocks(),
        }
    return known


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Failures, then per shape: attention by density, and estimation as a share of dense."""
    checks = [r for r in rows if r["op"] == "check"]
    failed = [r for r in checks if not r["ok"]]
    lines = [f"checks: {len(checks) - len(failed)} OK, {len(failed)} FAIL"]
    lines += [describe(r)[:300] for r in failed[:10]]
    timed = [r for r in rows if "ms" in r and "length" in r]
    for key in dict.fromkeys(_shape(r) for r in timed):
        here = [r for r in timed if _shape(r) == key]
        lines.append("q_heads {} kv_heads {} head_dim {} length {}".format(*key))
        for op in ("attention", "decode", "chain", "scores", "select"):
            for variant in dict.fromkeys(r["variant"] for r in here if r["op"] == op):
                cells = [_cell(r) for r in here if r["op"] == op and r["variant"] == variant]
                lines.append(f"  {op:9} {variant:22} " + "  ".join(cells))
        lines += _shares(here)
    lines += [describe(r) for r in rows if r["op"] == "gather"]
    return lines


def _shape(row: dict[str, Any]) -> tuple[int, int, int, int]:
    return row["q_heads"], row["kv_heads"], row["head_dim"], row["length"]


def _cell(row: dict[str, Any]) -> str:
    name = "/".join(f"{k[0]}{row[k]:g}" for k in ("stride", "density") if k in row)
    speed = f" {row['tflops']:.0f}T" if "tflops" in row else ""
    return f"{name}: {row['ms']:.3f}ms{speed}"


def _shares(rows: list[dict[str, Any]]) -> list[str]:
    """Estimation + selection over cuDNN dense, and dense over the whole chain."""
    dense = [r["ms"] for r in rows if r["variant"] == "sdpa-cudnn" and r["op"] == "attention"]
    if not dense:
        return []
    lines = []
    for stride in sorted({r["stride"] for r in rows if "stride" in r}):
        here = [r for r in rows if r.get("stride") == stride]
        scores = [r["ms"] for r in here if r["op"] == "scores"]
        select = [r["ms"] for r in here if r["op"] == "select"]
        if scores and select:
            share = (min(scores) + max(select)) / dense[0]
            lines.append(f"  stride {stride}: estimate + select = {share:.1%} of cuDNN dense")
        for row in here:
            if row["op"] == "chain":
                ratio = dense[0] / row["ms"]
                lines.append(f"  stride {stride}: chain {row['variant']} {ratio:.2f}x cuDNN dense")
    return lines


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Effective TFLOP/s of attention over density, one panel per shape, best variant of ours."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [r for r in rows if r["op"] == "attention" and "tflops" in r]
    shapes = list(dict.fromkeys(_shape(r) for r in timed))
    if not shapes:
        return
    figure, axes = plt.subplots(1, len(shapes), figsize=(4.2 * len(shapes), 4), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        here = [r for r in timed if _shape(r) == shape]
        for variant in dict.fromkeys(r["variant"] for r in here):
            points = sorted((r["density"], r["tflops"]) for r in here if r["variant"] == variant)
            ours = variant.startswith(("plain", "hopper"))
            axis.plot(
                *zip(*points, strict=True), marker="o", ls="-" if ours else "--", label=variant
            )
        axis.set_xscale("log")
        axis.set_title("{} / {} heads, d = {}, {} tokens".format(*shape), fontsize=9)
        axis.set_xlabel("kept share of causal blocks")
        axis.set_ylabel("effective TFLOP/s")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())

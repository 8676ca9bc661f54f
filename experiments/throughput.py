"""How fast are prefill and decode with K and V in host memory, beside K and V on the GPU?

    python -m experiments.throughput [--groups NAME,...] [--length N,...] [--out DIR] [--budget-s N]
    python -m experiments.throughput --table CSV [--into FILE]

A Llama-3.1-8B shape with random weights, bf16, batch 1, through the product's own sessions. The
groups are in throughput_cases.py. Cases of a group take turns, so that a ratio is of one process
and one hour. Every measurement is a row of throughput.csv at once, so that runs that are cut add
up; throughput.json says hardware, versions, commit and commands. Sparse cases draw one mask per (KV
head, chunk) at density 0.1 (`random`), or replay what decode chose on a real model
(data/decode-8k.npz); random weights have no attention worth selecting from. `--device cpu` runs a
tiny model.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import throughput_tables as tables


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.table:
        rows = tables.read(args.table)
        if args.into:
            tables.update(args.into, rows)
        else:
            print("\n".join(tables.lines(rows)))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    import torch

    from experiments import throughput_cases as cases
    from experiments.throughput_runs import Bench

    bench = Bench(args.device, max(args.length))
    write_environment(args, torch)
    bench.row({"group": "link", "commit": args.commit, **bench.link()}, args.out)
    for group in args.groups:
        for length in args.length:
            for number in range(args.repeats):
                for case in cases.GROUPS[group]:
                    if time.monotonic() - begin > args.budget_s:
                        print(f"## stopped: {args.budget_s:.0f} s are over", flush=True)
                        return 3
                    made = case if args.device == "cuda" else replace(case, tiny=True)
                    row = bench.measure(made, length)
                    row |= {"group": group, "repeat": number, "commit": args.commit}
                    bench.row(row, args.out)
    rows = tables.read(args.out / "throughput.csv")
    tables.plot(rows, args.out / "throughput.png")
    print("\n".join(tables.lines(rows)))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    from experiments.throughput_cases import GROUPS

    parser = argparse.ArgumentParser(prog="python -m experiments.throughput", description=__doc__)
    parser.add_argument("--groups", default="prefill", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--length", default="131072", help="tokens, comma-separated")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/throughput"))
    parser.add_argument("--budget-s", type=float, default=540)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="commit of the code, for throughput.json")
    parser.add_argument("--table", type=Path, metavar="CSV", help="print the tables of a CSV")
    parser.add_argument("--into", type=Path, help="with --table: the document to update")
    args = parser.parse_args(argv)
    args.groups = args.groups.split(",")
    if unknown := [g for g in args.groups if g not in GROUPS]:
        parser.error(f"--groups={unknown[0]}: allowed is {', '.join(GROUPS)}")
    try:
        args.length = [int(x) for x in args.length.split(",")]
    except ValueError:
        parser.error(f"--length={args.length}: allowed is integers, comma-separated")
    return args


def write_environment(args: argparse.Namespace, torch: Any) -> None:
    """Hardware and versions, and one more command."""
    from experiments.kernels import environment

    path = args.out / "throughput.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    known = environment(args.device, args.commit)
    command = " ".join(["python -m experiments.throughput", *sys.argv[1:]])
    known["command"] = [*before.get("command", []), command]
    path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

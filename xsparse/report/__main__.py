"""Make the report of a sweep again, or compare two sweeps.

Exit codes: 0 ok, 2 bad input, 3 the report is made but some points are not finished.
"""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m xsparse.report", description=__doc__)
    parser.add_argument(
        "folder", help="a sweep folder, a folder with run folders below it, or a file of rows"
    )
    parser.add_argument("other", nargs="?", help="a second sweep to compare the first one with")
    parser.add_argument("--out", help="folder of the report (default: report/ in the folder)")
    parser.add_argument("--runs", help="where run folders are (default: <folder>/../../runs)")
    parser.add_argument(
        "--floor",
        type=float,
        default=0.8,
        help="dense accuracy, 0..1, below which no conclusion is drawn (default: 0.8)",
    )
    given = parser.parse_args(argv)
    try:
        return _run(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.console import Console

    from xsparse.report import build, console, load, pairs

    if given.other:
        print(pairs.compare(given.folder, given.other, out=given.out, runs=given.runs))
        return 0
    sweep = load.read(given.folder, given.runs)
    file = build.write(sweep, Path(given.out) if given.out else None, given.floor)
    rows = load.primary(sweep.rows).sort_values(["task", "length"], kind="stable")
    # Without a terminal rich assumes 80 columns, too few for a row.
    terminal = Console(width=None if sys.stdout.isatty() else 120)
    terminal.print(console.table(load.records(rows)))
    for point in sweep.unfinished:
        print(f"{point.state}: {point.overrides or point.run_id} {point.error}".rstrip())
    print(file)
    return 3 if sweep.unfinished else 0


if __name__ == "__main__":
    sys.exit(main())

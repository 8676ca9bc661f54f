"""Tables of a study from its results folder, and figures from its tables.

Exit codes: 0 made, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.study", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser("collect", help="tables from the done runs of a results folder")
    collect.add_argument("results", type=Path, help="a folder with runs/<run_id> below it")
    collect.add_argument("--out", type=Path, required=True, help="the folder of the tables")
    figures = commands.add_parser("figures", help="every figure from the tables of a folder")
    figures.add_argument("folder", type=Path, help="a folder made by collect")
    figures.add_argument("--out", type=Path, help="default: figures/ in the folder")
    given = parser.parse_args(argv)
    try:
        lines = _collect(given) if given.command == "collect" else _figures(given)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _collect(given: argparse.Namespace) -> list[str]:
    from experiments.study import collect

    return collect.write(given.results, given.out)


def _figures(given: argparse.Namespace) -> list[str]:
    from experiments.study import figures

    return figures.write(given.folder, given.out or given.folder / "figures")


if __name__ == "__main__":
    sys.exit(main())

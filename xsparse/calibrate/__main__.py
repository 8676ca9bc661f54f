"""python -m xsparse.calibrate [KEY=VALUE ...]

Writes a table with a threshold per layer and query head, for run.py threshold=@FILE, and prints
what it gains over one threshold on held-out prompts. Keys of its own:

    coverage=0.9    share of each row's true attention mass that must be kept
    quantile=1.0    share of a head's rows for which its threshold suffices; 1 is the maximum
    held_out=2      prompts of each task and length for the comparison
    out=FILE        by default thresholds-MODEL.json

and, as for run.py: model task length samples stride block_size chunk_size dtype device ops_backend.
Exit codes: 0 ok, 2 bad input, 130 interrupted; nothing is written but by 0.
"""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsparse import cli, plan
from xsparse.config import Config, register
from xsparse.progress import Progress
from xsparse.settings import ConfigError, refuse
from xsparse.store.files import to_json, write_atomic

if TYPE_CHECKING:
    from xsparse.calibrate.calibration import Calibration
    from xsparse.calibrate.compare import Kept

SHARED = ("model", "task", "length", "samples", "stride", "block_size", "chunk_size")
SHARED += ("dtype", "device", "ops_backend")


@dataclass
class Options:
    """The keys of this command alone. Raises ConfigError."""

    coverage: float = 0.9
    quantile: float = 1.0
    held_out: int = 2
    out: Path | None = None

    @classmethod
    def read(cls, given: dict[str, str]) -> Options:
        options = cls()
        for key in ("coverage", "quantile"):
            if key in given:
                setattr(options, key, _share(key, given[key]))
        if "held_out" in given:
            if not re.fullmatch(r"[1-9]\d{0,5}", given["held_out"]):
                refuse("held_out", given["held_out"], "an integer >= 1")
            options.held_out = int(given["held_out"])
        if "out" in given:
            options.out = Path(given["out"]).expanduser()
        return options


def main(arguments: list[str]) -> int:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    register()
    try:
        _run(arguments)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return cli.INTERRUPTED
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        print(f"xsparse.calibrate: {cli.one_line(error)}", file=sys.stderr)
        return cli.BAD_INPUT
    return 0


def _run(arguments: list[str]) -> None:
    options, config = read(arguments)
    progress = Progress()
    with progress.download() as report:
        made_plan = plan.make(config, report)
    out = options.out or Path(f"thresholds-{_word(made_plan.files.name)}.json")
    check_file(out)
    from xsparse.calibrate.calibration import QUANTILES, calibrate, content

    made = calibrate(
        made_plan,
        coverage=options.coverage,
        quantiles=sorted({*QUANTILES, options.quantile}, reverse=True),
        held_out=options.held_out,
        say=progress.say,
    )
    write_atomic(out, _text(content(made_plan, made, options.coverage, options.quantile)))
    print(summary(made, options.coverage, options.quantile))
    print(f"{out}: the table of quantile {options.quantile:g}; run.py threshold=@{out}")


def read(arguments: list[str]) -> tuple[Options, Config]:
    """The options and the configuration that arguments name. Raises ConfigError or Hydra's."""
    own, shared = {}, []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument}: allowed is KEY=VALUE")
        if key in Options.__dataclass_fields__:
            own[key] = value
        elif key in SHARED or key.startswith(("model.", "task.")):
            shared.append(argument)
        else:
            allowed = " ".join((*Options.__dataclass_fields__, *SHARED))
            raise ConfigError(f"{key}: no such key; allowed are {allowed}")
    options = Options.read(own)
    config = cli.compose([cli.quote(o) for given in shared for o in cli.name_model(given)])
    if config.task.ruler_data is not None:
        value = config.task.ruler_data
        refuse("task.ruler_data", value, "null: its prompts are those of an evaluation")
    return options, config


def check_file(out: Path) -> None:
    """Refuse a file that cannot be written, before minutes are spent on what goes into it."""
    folder = out.parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        refuse("out", str(out), "a file in a folder that can be written")


def summary(made: Calibration, coverage: float, quantile: float) -> str:
    """A short table; the row of the file is marked."""
    layers, heads = made.tables[quantile].shape
    n = len(made.held_out)
    lines = [
        f"{layers} layers x {heads} query heads; {made.rows:,} rows each from "
        f"{len(made.prompts)} prompts; coverage {coverage:g}",
        f"held out, n = {n} prompts: the table, and the least single threshold that keeps as many",
        f"blocks; rows: share of them that keep {coverage:g} of their true mass; more: in how many",
        "prompts the table keeps more mass, more rows than one threshold does at equal density",
        "",
        "         thresholds of heads  table                one threshold               more in",
        "quantile   min median   max   density mass  rows   value  density mass  rows   mass rows",
    ]
    for q, found in made.comparisons.items():
        values = made.tables[q]
        mark = "*" if q == quantile else " "
        lines.append(
            f"{q:<6g} {mark} {values.min():.3f}  {values.median():.3f} {values.max():.3f}   "
            f"{_kept(found.table)}  {found.scalar:.4f}  {_kept(found.by_scalar)}   "
            f"{found.more_recall:4d} {found.more_covered:4d}"
        )
    return "\n".join(lines)


def _kept(kept: Kept) -> str:
    return f"{kept.density:5.3f}   {kept.recall:5.3f} {kept.covered:5.3f}"


def _text(value: Any) -> str:
    """JSON with lists of numbers, such as a layer of the table, on one line each."""
    lists = re.compile(r"\[\s+([\d\s.,e-]+?)\s+\]")
    return lists.sub(lambda m: f"[{' '.join(m[1].split())}]", to_json(value, indent=1)) + "\n"


def _share(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:
        refuse(key, text, "a number in (0, 1]")
    return number


def _word(name: str) -> str:
    """A model's name (that of a local folder is its path) as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

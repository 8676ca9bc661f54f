"""The command line in front of Hydra.

Hydra composes configurations and sweeps; this file puts its arguments in order, words its errors
in one line, refuses bad input before a folder is made, and answers dry runs.
Exit codes: 0 ok, 2 bad input, 3 some points failed, 130 interrupted.
"""

import difflib
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

from xsparse.config import Config, from_hydra, parse_length, register
from xsparse.points import expand, parse
from xsparse.settings import TYPES, ConfigError, parse_threshold

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
BAD_INPUT, INTERRUPTED = 2, 130
# Hydra has no type for "a number or @file" or "an int or a list": these keys are typed here.
UNTYPED = {"threshold": parse_threshold, "length": parse_length}
MULTIRUN = {"-m", "--multirun"}
FLAGS_WITH_VALUE = {
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    *("--cfg", "-c", "--package", "-p", "--experimental-rerun"),
}


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    wants_traceback = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting
    signal.signal(signal.SIGTERM, _interrupt)
    register()
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if wants_traceback or not _is_bad_input(error):
            raise
        print(f"run.py: {one_line(error)}", file=sys.stderr)
        return BAD_INPUT


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _run(argv: list[str]) -> int:
    flags, overrides = split(argv)
    overrides = [quote(o) for given in overrides for o in name_model(given)]
    multirun = bool(MULTIRUN & set(flags))
    if set(flags) - MULTIRUN:  # --help, --cfg, ...: Hydra answers
        _hydra([*flags, *overrides])
        return 0
    if multirun:
        check_types(overrides)
    dry = "dry_run=true" in [o.lower() for o in overrides]
    if dry or not multirun:
        points = expand(overrides) if multirun else [overrides]
        configs = [compose(point) for point in points]
        if any(config.dry_run for config in configs):
            from xsparse.dry_run import show

            show(points, configs)
            return 0
        preflight(configs[0])
    return _sweep(flags, overrides, multirun)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Flags (with their values) and overrides: Hydra's parser wants all overrides together."""
    flags, overrides = [], []
    rest = iter(argv)
    for argument in rest:
        if argument.startswith("-"):
            flags.append(argument)
            if argument in FLAGS_WITH_VALUE:
                flags += [value for value in (next(rest, None),) if value is not None]
        else:
            overrides.append(argument)
    return flags, overrides


def name_model(override: str) -> list[str]:
    """`model=org/name` and `model=folder` as what Hydra can compose."""
    key, _, value = override.partition("=")
    values = value.split(",")
    if key != "model" or all((CONF / "model" / f"{v}.yaml").is_file() for v in values):
        return [override]
    if all(v and Path(v).expanduser().is_dir() for v in values):
        quoted = ",".join(f"'{v}'" for v in values)  # a folder's name may hold a = or a blank
        return ["model=path", f"model.id={quoted}"]
    if all(re.fullmatch(r"[\w.-]+/[\w.-]+", v) for v in values):
        return ["model=hub", f"model.id={value}"]
    return [override]


def quote(override: str) -> str:
    """`key=a=b`, which Hydra's grammar has no place for, as `key='a=b'`."""
    key, _, value = override.partition("=")
    if "=" not in value or re.search(r"['\"()\[\]{}]", value):
        return override
    return f"{key}=" + ",".join(f"'{v}'" for v in value.split(","))


def check_types(overrides: list[str]) -> None:
    """Refuse a sweep with a value that no point could be made of (ranges fail their point)."""
    for given in parse([o for o in overrides if o.partition("=")[0] in UNTYPED]):
        if given.is_sweep_override() and not given.is_discrete_sweep():
            continue  # an interval, of which another sweeper than Hydra's own draws numbers
        for [point] in expand([str(given.input_line)]):
            [override] = parse([point])
            try:
                UNTYPED[override.key_or_group](override.value())
            except ConfigError:
                pass  # out of range: that point fails, the others run
            except TypeError as error:
                raise ConfigError(str(error)) from None


def compose(overrides: list[str]) -> Config:
    """The typed configuration of one point. Raises ConfigError or an error of Hydra's."""
    import hydra

    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return from_hydra(hydra.compose("config", overrides=overrides))


def preflight(config: Config) -> None:
    """Refuse a single point that cannot run here, before a folder is made for it."""
    from xsparse import plan, runner, tracking
    from xsparse.progress import Progress

    check_folder(config.results)
    tracking.mode_of(config.tracker)
    with Progress().download() as report:
        made = plan.make(config, report)
    if config.force or not made.complete:
        runner.Workshop(made, Progress())


def check_folder(results: str) -> None:
    """Refuse a results folder that cannot be made or written."""
    folder = Path(results).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"results={results}: allowed is a folder that can be written")


def _sweep(flags: list[str], overrides: list[str], multirun: bool) -> int:
    from xsparse import store, sweep

    key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    given = _folder(overrides, key)
    command = shlex.join(["python", *sys.argv])
    results = _folder(overrides, "results") or "results"
    check_folder(given or results)
    try:
        if given:
            folder = store.SweepFolder.open(given, command)
        else:
            folder = store.SweepFolder.create(results, command)
    except OSError as error:
        raise ConfigError(f"results={given or results}: {error.strerror}") from None
    if not given:
        path = str(folder.path).replace("'", "\\'")
        overrides = [*overrides, f"{key}='{path}'"]
    try:
        _hydra([*flags, *overrides])
    except KeyboardInterrupt:
        sweep.finish(folder)
        raise
    except Exception as error:
        if all(point["state"] == "pending" for point in folder.points()):
            if not given:
                shutil.rmtree(folder.path)
            if _is_bad_input(error):
                raise
            raise ConfigError(f"the sweep did not start: {one_line(error)}") from error
        # A launcher that lost a process: the other points count, and this one shows as such.
        print(f"run.py: {textwrap.shorten(one_line(error), 200)}", file=sys.stderr)
        return sweep.finish(folder) or sweep.FAILED
    return sweep.finish(folder)


def _folder(overrides: list[str], key: str) -> str | None:
    """The folder that an override names, without the quotes it may need."""
    values = [o.value() for o in parse([o for o in overrides if o.startswith(f"{key}=")])]
    if values and not isinstance(values[-1], (str, int, float)):
        raise ConfigError(f"{key}: allowed is one folder for all points")
    return str(values[-1]) if values else None


def _hydra(argv: list[str]) -> None:
    import hydra

    @hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
    def job(node: Any) -> Any:
        from xsparse import sweep

        return sweep.run_job(node)

    # Processes that a launcher starts find this package where it lies, installed or not.
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.argv[1:] = argv
    job()


def _is_bad_input(error: BaseException) -> bool:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return isinstance(error, (HydraException, OmegaConfBaseException, ValueError))


def one_line(error: BaseException) -> str:
    """An error as one line: for a wrong key the key and its nearest relatives, for Hydra's other
    errors the sentence that says what is wrong."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        if isinstance(cause, ConfigError):
            return str(cause)
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(str(e) for e in chain)
    if unknown := re.search(r"Key '([^']+)' (?:is )?not in '(\w+)'", text):
        return _unknown_key(unknown[1], text)
    if several := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{several[1]}: several values are a sweep and need -m; a list is key=[a,b]"
    if lone := re.search(r"Error parsing override '([^']+)'", text):
        return f"{lone[1]}: allowed is KEY=VALUE"
    if plugin := re.search(r"Could not (?:find|load) '(hydra/\w+)/([^']+)'", text):
        extras = "extras of this project: slurm | ray | optuna"
        return f"{plugin[1]}={plugin[2]}: no Hydra plugin of that name is installed ({extras})"
    if unknown := re.search(r"Could not find '([^/']+)/([^']*)'", text):
        names = sorted(p.stem for p in (CONF / unknown[1]).glob("*.yaml"))
        return f"{unknown[1]}={unknown[2]}: allowed is {' | '.join(names)}"
    if value := re.search(r"Value '(.*)' .* could not be converted to (\w+)", text):
        key = re.search(r"full_key: (\S+)", text) or re.search(r"override (\S+?)=", text)
        kind = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false"}
        allowed = kind.get(value[2], value[2].lower())
        return f"{key[1] if key else 'value'}={value[1]}: allowed is {allowed}"
    if merged := re.search(r"Error merging override ([^=\s]+)=(.*)", text):
        kinds = {f.name: getattr(f.type, "__name__", "") for f in fields(Config)}
        allowed = TYPES.get(kinds.get(merged[1], ""), "one value")
        return f"{merged[1]}={merged[2]}: allowed is {allowed}"
    if unread := re.search(r"LexerNoViableAlt\w*: ([^=\s]+)=(\S*)", text):
        return f"{unread[1]}={unread[2]}: not readable; allowed is KEY=VALUE or KEY='VALUE'"
    if "Config group override must be a string" in text:
        groups = [o for o in sys.argv[1:] if re.fullmatch(r"\w+=(null|\[.*\]|\{.*\})", o)]
        return f"{groups[0] if groups else 'a group'}: allowed is one name"
    lines = [line.strip() for line in str(error).splitlines()]
    shown = [x for x in lines if x and not re.match(r"(full_key|object_type|reference_type)", x)]
    return " ".join(shown) or type(error).__name__


def _unknown_key(key: str, text: str) -> str:
    full = re.search(r"Could not override '([^']+)'", text)
    name = full[1] if full else key
    near = difflib.get_close_matches(name, [f.name for f in fields(Config)], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "see python run.py --help"
    return f"{name}: no such key; {hint}"

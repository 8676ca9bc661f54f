"""A mirror of a run in Weights & Biases. The record is the results folder (xsparse.store).

Nothing here may stop, slow down or change a run: W&B is imported only where it is used, whatever
goes wrong there is one line of warning, and every wait for its server has an end. Without a key,
or without a network, the run is recorded offline; `wandb sync` uploads it later.
"""

import configparser
import functools
import importlib.util
import json
import logging
import math
import netrc
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

log = logging.getLogger(__name__)

MODES = ("auto", "online", "offline", "disabled")

# Seconds. Connecting and starting a run together stay below 15.
CONNECT_TIMEOUT_S = 3.0
INIT_TIMEOUT_S = 8.0
FINISH_TIMEOUT_S = 15.0

# The two addresses of the public server; a key for one is good for the other.
PUBLIC_HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")

STEP = "context_length"

# Columns of a result row that are shown; densities in percent.
DENSITIES = (
    "mask_density",
    "page_density",
    "transfer_ratio",
    "executed_density",
    "decode_density",
)
NUMBERS = (
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "dense_accuracy",
    "delta",
    "delta_low",
    "delta_high",
    "p_value",
    "mass_recall",
    "prefill_tok_s",
    "decode_tok_s",
    "ttft_s",
    "tpot_s",
    "prefill_speedup",
    "decode_speedup",
    "bytes_h2d",
    "bytes_d2h",
    "peak_gpu_gb",
    "peak_host_gb",
)
SHOWN = (*NUMBERS, *(f"{name}_percent" for name in DENSITIES))
SHOWN_BY_TASK = ("accuracy", "delta", "mask_density_percent")

MACRO_TASK = "mean"

TEXT_COLUMNS = ("task", "prediction", "references", "prompt_hash")
NUMBER_COLUMNS = (
    "length",
    "index",
    "score",
    "prompt_tokens",
    "new_tokens",
    "ttft_s",
    "prefill_s",
    "decode_s",
    "tpot_s",
    "depth",
)


class TrackerNode(Protocol):
    """The `tracker` group of the configuration (`TrackerConfig`)."""

    name: str
    project: str
    entity: str | None
    dir: str | None


def mode_of(node: TrackerNode) -> str:
    """online, offline or disabled: what `node.name` means here. Does not import wandb.

    Call it before a model is loaded. Raises ValueError for an unknown name, and for online or
    offline where wandb is not installed.
    """
    if node.name not in MODES:
        raise ValueError(f"tracker={node.name!r}: expected one of {', '.join(MODES)}")
    if node.name == "disabled":
        return "disabled"
    if not _installed():
        if node.name != "auto":
            raise ValueError(f"tracker={node.name}: wandb is not installed (pip install wandb)")
        log.info("tracker=auto: wandb is not installed, no mirror")
        return "disabled"
    if node.name != "auto":
        return node.name
    asked = {"dryrun": "offline"}.get(wish := os.environ.get("WANDB_MODE", ""), wish)
    if asked in MODES[1:]:
        return asked
    return "online" if _has_key() else "offline"


@contextmanager
def start(
    node: TrackerNode,
    *,
    run_id: str,
    group: str,
    name: str,
    job_type: str,
    tags: Sequence[str],
    config: Mapping[str, Any],
    out_dir: str | Path,
) -> Iterator["Mirror"]:
    """One W&B run around the body; its exit code is 1 if the body raises.

    Its files go to `<node.dir or out_dir>/wandb`. `run_id`, ours, is in its configuration; the
    run has an id of its own, so that a point can be run again.
    """
    mode = mode_of(node)
    mirror = Mirror()
    if mode != "disabled":
        about = {
            "project": node.project,
            "entity": node.entity,
            "group": group,
            "name": _display_name(name),
            "job_type": job_type,
            "tags": [tag[:64] for tag in dict.fromkeys(tags) if tag],  # longer ones are refused
            "config": {**config, "run_id": run_id},
        }
        mirror = _open(mode, Path(node.dir or out_dir), about)
    try:
        yield mirror
    except BaseException:
        mirror.close(1)
        raise
    mirror.close(0)


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A method of `Mirror` that does nothing without a W&B run and only warns if it fails."""

    @functools.wraps(method)
    def call(self: "Mirror", *args: Any) -> None:
        if self.run is None:
            return
        try:
            method(self, *args)
        except Exception as error:
            log.warning("W&B %s: %s; the results folder is complete", method.__name__, error)

    return call


class Mirror:
    """What W&B shows of one run. Without a W&B run every call does nothing."""

    def __init__(self, run: Any = None, mode: str = "disabled"):
        self.run: Any = run
        self.mode = mode
        self.define()

    @guarded
    def define(self) -> None:
        """Charts run over the context length; the summary is what `summary` says, nothing else."""
        self.run.define_metric(STEP, summary="none")
        for name in (*SHOWN, "tasks/*"):
            self.run.define_metric(name, step_metric=STEP, summary="none")

    @guarded
    def length_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """One point of history per context length: its macro row and the main numbers by task."""
        for length, of_length in _by_length(rows).items():
            point: dict[str, Any] = {STEP: length, **_numbers(_macro(of_length))}
            for row in of_length:
                if row["task"] != MACRO_TASK:
                    numbers = _numbers(row)
                    for name in SHOWN_BY_TASK:
                        if name in numbers:
                            point[f"tasks/{row['task']}/{name}"] = numbers[name]
            self.run.log(point)

    @guarded
    def samples(self, records: Iterable[Mapping[str, Any]]) -> None:
        """All prompts in one table."""
        import wandb

        # A column of two types is refused, so every cell is text, a number or empty.
        flat = [{**(record.get("meta") or {}), **record} for record in records]
        data: list[Any] = [
            [_text(values.get(column)) for column in TEXT_COLUMNS]
            + [_number(values.get(column)) for column in NUMBER_COLUMNS]
            for values in flat
        ]
        table = wandb.Table(columns=[*TEXT_COLUMNS, *NUMBER_COLUMNS], data=data)
        self.run.log({"samples": table})

    @guarded
    def image(self, key: str, figure: Any) -> None:
        """A matplotlib figure, a function that draws one, or the path of an image."""
        import wandb
        from PIL import Image

        if callable(figure):
            figure = figure()
        if isinstance(figure, (str, Path)):
            picture = str(figure)
        else:  # drawn here: wandb itself would need pyplot and its global state
            buffer = BytesIO()
            figure.savefig(buffer, format="png", dpi=150)
            picture = Image.open(buffer)
        self.run.log({key: wandb.Image(picture)})

    @guarded
    def summary(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """The numbers of the table of runs: means over the lengths of the macro rows."""
        macros = [_macro(of_length) for of_length in _by_length(rows).values()]
        by_length = [_numbers(row) for row in macros]
        summary: dict[str, Any] = {"n": sum(row.get("n") or 0 for row in macros)}
        for name in SHOWN:
            values = [numbers[name] for numbers in by_length if name in numbers]
            if values:
                summary[name] = math.fsum(values) / len(values)
        self.run.summary.update(summary)

    @guarded
    def close(self, exit_code: int) -> None:
        """End the W&B run. What its server has not got by then stays on disk."""
        run, self.run = self.run, None
        try:
            run.finish(exit_code=exit_code)
        except Exception:
            _drop_service()
            raise


def _by_length(rows: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """The rows of each length, shortest first."""
    ordered = sorted(rows, key=lambda row: row["length"])
    return {length: list(same) for length, same in groupby(ordered, key=lambda r: r["length"])}


def _macro(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The macro row of one length; a single task needs none."""
    macros = [row for row in rows if row["task"] == MACRO_TASK]
    if macros:
        return macros[0]
    return rows[0] if len(rows) == 1 else {}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The columns of `SHOWN` that hold a number."""
    numbers = {name: _number(row.get(name)) for name in NUMBERS}
    for name in DENSITIES:
        density = _number(row.get(name))
        numbers[f"{name}_percent"] = None if density is None else 100 * density
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _display_name(name: str) -> str:
    """`+key=1,++other=2`, Hydra's spelling of added keys, without the signs."""
    return re.sub(r"(^|[ ,])\++", r"\1", name)[:128]


def _open(mode: str, folder: Path, about: Mapping[str, Any]) -> Mirror:
    """A mirror in `mode`, else offline, else none; one warning says why it is not as asked."""
    # Read when wandb is imported: no crash reports to anybody, nothing on the terminal.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    if "wandb" not in sys.modules:
        os.environ.pop("WANDB_SERVICE", None)  # inherited: a service that ends with our parent
    obstacle = _obstacle() if mode == "online" else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if mode == "online" and obstacle is None:
            try:
                return Mirror(_init("online", folder, about), "online")
            except Exception as error:
                obstacle = str(error).partition("\n")[0]
        run = _init("offline", folder, about)
    except Exception as error:
        _drop_service()
        log.warning("W&B could not start, this run has no mirror: %s", error)
        return Mirror()
    if obstacle is not None:
        place = Path(run.settings.sync_dir)
        log.warning("W&B: %s; recorded offline, to upload it: wandb sync %s", obstacle, place)
    return Mirror(run, "offline")


def _init(mode: Literal["online", "offline"], folder: Path, about: Mapping[str, Any]) -> Any:
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
        # Its sampling of the machine would run beside what is being timed.
        x_disable_stats=True,
        # The default of 15 s loses as much when the process is killed.
        x_transaction_log_flush_interval=1.0,
    )
    # The default of `reinit` hands out the run before, if that one is still open.
    return wandb.init(mode=mode, dir=folder, reinit="finish_previous", settings=settings, **about)


def _drop_service() -> None:
    """Forget wandb's service process: a dead one would fail all later runs of this process too."""
    with suppress(Exception):
        import wandb

        wandb.teardown()


def _obstacle() -> str | None:
    """Why W&B cannot be online, found in a few seconds; its own search takes 100."""
    url = _server_url()
    if not _has_key():
        return f"no API key for {url}"
    if not _reachable(url):
        return f"{url} cannot be reached"
    return None


def _installed() -> bool:
    """A folder `wandb` of offline runs in the working directory also can be imported: no."""
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


def _setting(name: str) -> str | None:
    """What wandb's environment variable or its settings file says."""
    if value := os.environ.get(f"WANDB_{name.upper()}"):
        return value
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(folder / "settings", encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return None
    return parser.get("default", name, fallback=None)


def _server_url() -> str:
    return (_setting("base_url") or f"https://{PUBLIC_HOSTS[0]}").rstrip("/")


def _has_key() -> bool:
    if _setting("api_key") or _setting("identity_token_file"):
        return True
    standard = [path for path in ("~/.netrc", "~/_netrc") if Path(path).expanduser().exists()]
    path = os.environ.get("NETRC") or next(iter(standard), "~/.netrc")
    try:
        known = netrc.netrc(Path(path).expanduser())
    except (OSError, netrc.NetrcParseError):
        return False
    host = urlsplit(_server_url()).netloc
    entries = [known.authenticators(name) for name in {host, *_aliases(host)}]
    return any(entry and entry[2] for entry in entries)


def _aliases(host: str) -> tuple[str, ...]:
    return PUBLIC_HOSTS if host in PUBLIC_HOSTS else ()


def _reachable(url: str) -> bool:
    """Whether something accepts connections there, or at the proxy that leads there."""
    answers: list[bool] = []

    def connect() -> None:
        try:
            parts = urlsplit(url)
            proxy = getproxies().get(parts.scheme)
            if proxy and not proxy_bypass(parts.hostname or ""):
                parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), CONNECT_TIMEOUT_S).close()
            answers.append(True)
        except (OSError, ValueError):
            pass

    # In a thread, because looking up a name has no timeout of its own.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S)
    return bool(answers)

"""One run on disk: what was asked, where it ran, every finished prompt, its rows and its state."""

import contextlib
import json
import traceback
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from xsparse.store.files import append_line, read_json, to_json, truncate, write_atomic
from xsparse.store.locks import is_locked, run_path
from xsparse.store.process import is_alive, this_process

SAMPLE_KEY = ("task", "length", "index")


class RunFolder:
    """results/runs/<run_id>.

    `RunFolder(path)` only reads, also while another process computes the run. `RunFolder.open`
    is for the process that computes it and holds `lock(results_dir, run_id)`:

        with lock(results_dir, run_id):
            run = RunFolder.open(results_dir, run_id, config, env)
            for index in run.missing(task, length, n):
                run.append(compute(index))
            run.finish(rows)

    A run that is already done stays so until something is appended to it (`samples` raised).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.run_id = self.path.name
        self._about: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        self._recording = False
        self._stored: dict[tuple, dict[str, Any]] = {}

    @classmethod
    def open(
        cls,
        results_dir: str | Path,
        run_id: str,
        config: Mapping[str, Any],
        env: Mapping[str, Any],
    ) -> "RunFolder":
        """The run for writing, made or found; a last line cut by a crash is removed.

        `config` is the resolved configuration, `env` the result of `environment()`.
        Raises ValueError if samples.jsonl is damaged elsewhere than at its end.
        """
        run = cls(run_path(results_dir, run_id))
        run.path.mkdir(parents=True, exist_ok=True)
        run._about = (config, env)
        run._stored, complete_bytes, total_bytes = run._read_samples()
        if complete_bytes < total_bytes:
            truncate(run._samples_file, complete_bytes)
        if run.state != "done":
            run._begin()
        return run

    # what is stored

    @property
    def _samples_file(self) -> Path:
        return self.path / "samples.jsonl"

    def samples(self) -> list[dict[str, Any]]:
        """Finished prompts in order of their end; of two with one key the first counts.

        Half a line at the end, of a crash or of a write in progress, is not a sample.
        Raises ValueError, naming the line, if any other line is damaged.
        """
        stored = self._stored if self._about else self._read_samples()[0]
        return list(stored.values())

    def _read_samples(self) -> tuple[dict[tuple, dict[str, Any]], int, int]:
        """Samples by key, bytes of complete lines, bytes in all."""
        try:
            data = self._samples_file.read_bytes()
        except FileNotFoundError:
            return {}, 0, 0
        complete_bytes = data.rfind(b"\n") + 1
        stored: dict[tuple, dict[str, Any]] = {}
        for number, line in enumerate(data[:complete_bytes].split(b"\n")[:-1], start=1):
            try:
                record = json.loads(line)
                stored.setdefault(tuple(record[name] for name in SAMPLE_KEY), record)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self._samples_file}, line {number}: not a sample ({error!r}); "
                    "repair or remove the line"
                ) from error
        return stored, complete_bytes, len(data)

    def sample_count(self) -> int:
        """Complete lines in samples.jsonl; does not parse them."""
        try:
            return self._samples_file.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def missing(self, task: str, length: int, n: int) -> list[int]:
        """Indices below `n` of the prompts of (task, length) that have no sample yet."""
        have = {(sample["task"], sample["length"], sample["index"]) for sample in self.samples()}
        return [index for index in range(n) if (task, length, index) not in have]

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the last finish; empty before."""
        rows = read_json(self.path / "rows.json") or []
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{self.path / 'rows.json'} is damaged: remove the file or the run")
        return rows

    def config(self) -> dict[str, Any]:
        """The resolved configuration of the last session that computed."""
        import yaml  # comes with omegaconf; only reading a configuration needs it

        try:
            return yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8")) or {}
        except FileNotFoundError:
            return {}
        except yaml.YAMLError:
            raise ValueError(f"{self.path / 'config.yaml'} is damaged: remove the run") from None

    def environment(self) -> dict[str, Any]:
        """env.json of the last session that computed; `earlier` lists those before it."""
        return read_json(self.path / "env.json") or {}

    def status(self) -> dict[str, Any]:
        """The content of status.json, where a run whose process is gone is `interrupted`.

        Of a process on another host only its lock is known.
        """
        status = read_json(self.path / "status.json") or {"state": "interrupted"}
        if status["state"] == "running":
            alive = is_alive(status)
            if alive is None:
                alive = is_locked(self.path.parents[1], self.run_id)
            if not alive:
                status["state"] = "interrupted"
        return status

    @property
    def state(self) -> str:
        """running, done, interrupted or failed."""
        return self.status()["state"]

    # recording

    def append(self, record: Mapping[str, Any]) -> None:
        """Store one finished prompt durably, as one line; NaN and infinities become null.

        Raises ValueError if `record` lacks a task, length or index.
        """
        absent = [name for name in SAMPLE_KEY if name not in record]
        if absent:
            raise ValueError(f"sample without {', '.join(absent)}: expected {SAMPLE_KEY}")
        line = to_json(record)
        if not self._recording:
            self._begin()
        append_line(self._samples_file, line)
        stored = json.loads(line)
        self._stored.setdefault(tuple(stored[name] for name in SAMPLE_KEY), stored)

    def finish(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store the rows; the run is done."""
        write_atomic(self.path / "rows.json", to_json(list(rows), indent=1))
        self._end("done")

    def fail(self, error: BaseException) -> None:
        """The run ended with an exception."""
        self._end(
            "failed",
            error=describe(error),
            traceback="".join(traceback.format_exception(error)),
        )

    def interrupted(self) -> None:
        """The run was stopped from outside; running it again goes on."""
        self._end("interrupted")

    def _begin(self) -> None:
        import yaml

        if self._about is None:
            raise ValueError(f"{self.path} was opened for reading: use RunFolder.open to record")
        config, env = self._about
        text = yaml.safe_dump(json.loads(to_json(config)), sort_keys=False, allow_unicode=True)
        write_atomic(self.path / "config.yaml", text)
        write_atomic(self.path / "env.json", to_json(self._with_earlier(env), indent=1))
        self._write_status("running", started=now())
        self._recording = True

    def _with_earlier(self, env: Mapping[str, Any]) -> dict[str, Any]:
        """`env`, and under `earlier` the environments in which stored samples were computed."""
        last = self.environment()
        earlier = last.pop("earlier", [])
        current = json.loads(to_json(env))
        if self._stored and last and last != current and last not in earlier:
            earlier.append(last)
        return {**current, "earlier": earlier}

    def _end(self, state: str, **fields: Any) -> None:
        started = (read_json(self.path / "status.json") or {}).get("started")
        self._write_status(state, started=started, ended=now(), **fields)
        self._recording = False

    def _write_status(self, state: str, **fields: Any) -> None:
        status = {"state": state, "error": None, "traceback": None, "started": None, "ended": None}
        write_atomic(
            self.path / "status.json", to_json({**status, **fields, **this_process()}, indent=1)
        )


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def now() -> str:
    """Local time with its offset, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def list_runs(results_dir: str | Path) -> list[RunFolder]:
    """All runs, oldest first."""
    runs = Path(results_dir) / "runs"
    found: list[tuple[float, Path]] = []
    for path in runs.iterdir() if runs.is_dir() else ():
        with contextlib.suppress(OSError):  # removed meanwhile
            if path.is_dir() and not path.name.startswith("."):
                found.append((path.stat().st_mtime, path))
    return [RunFolder(path) for _, path in sorted(found)]


def find_run(results_dir: str | Path, prefix: str) -> RunFolder:
    """The run whose id starts with `prefix`. Raises ValueError if there is none or several."""
    run_path(results_dir, prefix)
    runs = [run for run in list_runs(results_dir) if run.run_id.startswith(prefix)]
    exact = [run for run in runs if run.run_id == prefix]
    if len(exact or runs) == 1:
        return (exact or runs)[0]
    if not runs:
        raise ValueError(f"no run {prefix!r} in {Path(results_dir) / 'runs'}")
    raise ValueError(f"run {prefix!r} is ambiguous: {', '.join(run.run_id for run in runs)}")

"""One call of run.py: which points it asked for and how each ended. The runs are elsewhere."""

import json
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any

from xsparse.store.files import read_json, to_json, write_atomic
from xsparse.store.process import is_alive, this_process
from xsparse.store.run import describe, now

STATES = ("pending", "running", "done", "interrupted", "failed")


class SweepFolder:
    """results/sweeps/<date-time>.

    Each point has a small file of its own, which only the process of that point writes;
    index.json is made from them. So processes that report at once lose nothing of one another.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @classmethod
    def create(cls, results_dir: str | Path, command: str) -> "SweepFolder":
        """A new folder named by the time; a second one within the second gets "-1", ..."""
        sweeps = Path(results_dir) / "sweeps"
        sweeps.mkdir(parents=True, exist_ok=True)
        name = datetime.now().strftime("%Y%m%d-%H%M%S")
        count = 0
        while True:
            path = sweeps / (f"{name}-{count}" if count else name)
            try:
                path.mkdir()
            except FileExistsError:
                count += 1
            else:
                return cls.open(path, command)

    @classmethod
    def open(cls, path: str | Path, command: str) -> "SweepFolder":
        """The sweep at `path`, made by the first process that asks for it."""
        sweep = cls(path)
        (sweep.path / "points").mkdir(parents=True, exist_ok=True)
        sweep._assemble({"command": command, "started": now()})
        return sweep

    def add_point(self, number: int, overrides: list[str], run_id: str | None = None) -> None:
        """Announce point `number` (the Hydra job number), pending until `set_point`."""
        self._write(number, {"run_id": run_id, "overrides": overrides, "state": "pending"})

    def set_point(
        self,
        number: int,
        state: str,
        *,
        run_id: str | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """Report how point `number` stands. An exception is stored with its traceback.

        Raises ValueError for a state that is not in `STATES` or a point that was not added.
        """
        if state not in STATES:
            raise ValueError(f"state={state!r}: expected one of {', '.join(STATES)}")
        point = read_json(self._file(number))
        if point is None:
            raise ValueError(f"{self.path} has no point {number}: add it first")
        point |= {"state": state, "error": None, "traceback": None}
        if run_id is not None:
            point["run_id"] = run_id
        if isinstance(error, BaseException):
            point["error"] = describe(error)
            point["traceback"] = "".join(traceback.format_exception(error))
        elif error is not None:
            point["error"] = error
        self._write(number, point)

    def points(self) -> list[dict[str, Any]]:
        """The points by number; one whose process is gone without an end is `interrupted`."""
        points = []
        for file in sorted((self.path / "points").glob("*.json")):
            point = json.loads(file.read_bytes())
            if point["state"] == "running" and is_alive(point) is False:
                point["state"] = "interrupted"
            points.append(point)
        return points

    def failures(self) -> list[dict[str, Any]]:
        """The points that are not done. Ask when the sweep is over: then whatever has not
        reported its end has failed too."""
        return [point for point in self.points() if point["state"] != "done"]

    def index(self) -> dict[str, Any]:
        """The content of index.json; `points` come straight from their files."""
        header = read_json(self.path / "index.json") or {"command": None, "started": None}
        shown = ("number", "run_id", "overrides", "state", "error")
        return header | {"points": [{key: p.get(key) for key in shown} for p in self.points()]}

    def _file(self, number: int) -> Path:
        return self.path / "points" / f"{number:05d}.json"

    def _write(self, number: int, point: dict[str, Any]) -> None:
        write_atomic(
            self._file(number), to_json({"number": number, **point, **this_process()}, indent=1)
        )
        self._assemble({})

    def _assemble(self, header: dict[str, Any]) -> None:
        """Write index.json; `header` counts only for a new one.

        Under a lock, or an older list of points could replace a newer one.
        """
        from filelock import FileLock

        with FileLock(self.path / ".lock"):
            new = not (self.path / "index.json").exists()
            index = self.index()
            write_atomic(
                self.path / "index.json", to_json(index | header if new else index, indent=1)
            )

"""The index of a sweep, reported by many processes at once."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xsparse.store import SweepFolder


def index_of(sweep: SweepFolder) -> dict:
    return json.loads((sweep.path / "index.json").read_text())


def test_names(tmp_path: Path):
    paths = [SweepFolder.create(tmp_path, "python run.py").path for _ in range(5)]
    assert len(set(paths)) == 5
    for path in paths:
        assert path.parent == tmp_path / "sweeps"
        assert re.fullmatch(r"\d{8}-\d{6}(-\d+)?", path.name)


def test_points(tmp_path: Path):
    sweep = SweepFolder.create(tmp_path, "python run.py -m threshold=0.7,7,0.9")
    for number, threshold in enumerate((0.7, 7, 0.9)):
        sweep.add_point(number, [f"threshold={threshold}", "model=org/name"])
    assert [point["state"] for point in index_of(sweep)["points"]] == ["pending"] * 3
    sweep.set_point(0, "running", run_id="aaa")
    sweep.set_point(0, "done")
    try:
        raise ValueError("threshold=7: expected a number in (0, 1]")
    except ValueError as error:
        sweep.set_point(1, "failed", error=error)

    index = index_of(sweep)
    assert index["command"] == "python run.py -m threshold=0.7,7,0.9"
    assert index["started"]
    assert index["points"][0] == {
        "number": 0,
        "run_id": "aaa",
        "overrides": ["threshold=0.7", "model=org/name"],
        "state": "done",
        "error": None,
    }
    assert index["points"][1]["error"] == "ValueError: threshold=7: expected a number in (0, 1]"
    # Point 2 never reported: at the end of the sweep that is a failure, not an absence.
    failures = SweepFolder(sweep.path).failures()
    assert [point["number"] for point in failures] == [1, 2]
    assert "test_points" in failures[0]["traceback"]


def test_refuses_nonsense(tmp_path: Path):
    sweep = SweepFolder.create(tmp_path, "x")
    with pytest.raises(ValueError, match="no point 3"):
        sweep.set_point(3, "done")
    sweep.add_point(3, [])
    with pytest.raises(ValueError, match="state='finished': expected one of pending"):
        sweep.set_point(3, "finished")


POINT = """
import os, sys
from xsparse.store import SweepFolder
sweep, first, count = SweepFolder.open(sys.argv[1], "cmd"), int(sys.argv[2]), int(sys.argv[3])
for number in range(first, first + count):
    sweep.add_point(number, [f"n={number}"])
    sweep.set_point(number, "running", run_id=f"run{number}")
    if number % 10 == 9:
        os._exit(9)
    sweep.set_point(number, "done")
"""


def test_processes_lose_nothing_of_one_another(tmp_path: Path):
    folder = tmp_path / "sweeps" / "hydra"  # the launcher chose the place; nobody made it yet
    processes = [
        subprocess.Popen([sys.executable, "-c", POINT, str(folder), str(first), "10"])
        for first in (0, 10, 20, 30)
    ]
    assert [process.wait() for process in processes] == [9] * 4
    sweep = SweepFolder(folder)
    assert index_of(sweep)["command"] == "cmd"
    assert [point["run_id"] for point in index_of(sweep)["points"]] == [
        f"run{number}" for number in range(40)
    ]
    states = {point["number"]: point["state"] for point in sweep.points()}
    assert states == {n: "interrupted" if n % 10 == 9 else "done" for n in range(40)}
    assert len(sweep.failures()) == 4
    assert not list(folder.glob("**/.*json*"))  # no temporary file is left

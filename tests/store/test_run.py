"""A run on disk survives whatever happens to the process that records it."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from xsparse.store import RunFolder, find_run, list_runs, lock
from xsparse.store.process import this_process

CONFIG = {"model": "m", "selector": "xattention", "threshold": 0.9, "rate": 1e-05, "length": [512]}
ENV = {"host": "h", "versions": {"torch": "2.13"}}


def sample(index: int, task: str = "niah", length: int = 512, **more) -> dict:
    return {"task": task, "length": length, "index": index, "score": 1.0, **more}


def opened(results: Path, run_id: str = "abc123", **env) -> RunFolder:
    return RunFolder.open(results, run_id, CONFIG, {**ENV, **env})


def indices(run: RunFolder) -> list[int]:
    return [record["index"] for record in run.samples()]


def test_life_of_a_run(tmp_path: Path):
    run = opened(tmp_path)
    assert run.state == "running"
    assert run.missing("niah", 512, 3) == [0, 1, 2]
    run.append(sample(1))
    assert run.missing("niah", 512, 3) == [0, 2]
    assert run.missing("niah", 1024, 2) == [0, 1]
    assert run.missing("vt", 512, 2) == [0, 1]
    run.append(sample(0))
    run.finish([{"accuracy": 1.0, "delta": float("nan"), "n": np.int64(2)}])

    read = RunFolder(tmp_path / "runs" / "abc123")
    assert read.rows() == [{"accuracy": 1.0, "delta": None, "n": 2}]
    assert indices(read) == [1, 0]
    assert read.config() == CONFIG
    assert read.environment() == {**ENV, "earlier": []}
    status = read.status()
    assert (status["state"], status["error"], status["traceback"]) == ("done", None, None)
    assert status["started"] <= status["ended"]
    names = {"config.yaml", "env.json", "samples.jsonl", "rows.json", "status.json"}
    assert {file.name for file in read.path.iterdir()} == names


def test_a_done_run_stays_done_until_it_grows(tmp_path: Path):
    run = opened(tmp_path)
    run.append(sample(0))
    run.finish([{"n": 1}])
    before = {file: file.stat().st_mtime_ns for file in run.path.iterdir()}

    again = RunFolder.open(tmp_path, "abc123", {**CONFIG, "samples": 2}, {"host": "other"})
    assert again.state == "done"
    assert again.missing("niah", 512, 2) == [1]
    assert {file: file.stat().st_mtime_ns for file in run.path.iterdir()} == before
    again.append(sample(1))
    assert again.state == "running"
    assert again.config()["samples"] == 2
    assert again.environment() == {"host": "other", "earlier": [{**ENV}]}
    again.finish([{"n": 2}])
    assert again.rows() == [{"n": 2}]


def test_failure_is_recorded_and_forgotten_on_success(tmp_path: Path):
    run = opened(tmp_path)
    try:
        raise RuntimeError("CUDA error:\n  out of memory")
    except RuntimeError as error:
        run.fail(error)
    status = RunFolder(run.path).status()
    assert status["state"] == "failed"
    assert status["error"] == "RuntimeError: CUDA error: out of memory"
    assert "test_failure_is_recorded" in status["traceback"]
    again = opened(tmp_path)
    assert again.state == "running"
    again.finish([])
    assert again.status()["error"] is None


def test_interrupted(tmp_path: Path):
    run = opened(tmp_path)
    run.interrupted()
    assert RunFolder(run.path).state == "interrupted"


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "running"),
        ({"pid": 2**22 + 5}, "interrupted"),  # above the largest process number
        ({"process_start": 1}, "interrupted"),  # the number was given to another process
        ({"host": "elsewhere"}, "interrupted"),  # and nobody holds its lock
    ],
)
def test_running_needs_a_live_process(tmp_path: Path, change: dict, state: str):
    run = opened(tmp_path)
    status = json.loads((run.path / "status.json").read_text())
    (run.path / "status.json").write_text(json.dumps({**status, **this_process(), **change}))
    assert RunFolder(run.path).state == state


def test_running_elsewhere_is_believed_while_locked(tmp_path: Path):
    with lock(tmp_path, "abc123"):
        run = opened(tmp_path)
        status = json.loads((run.path / "status.json").read_text())
        (run.path / "status.json").write_text(json.dumps({**status, "host": "elsewhere"}))
        assert run.state == "running"
    assert run.state == "interrupted"


def test_a_folder_without_status_is_interrupted(tmp_path: Path):
    (tmp_path / "runs" / "abc").mkdir(parents=True)
    assert RunFolder(tmp_path / "runs" / "abc").state == "interrupted"


def test_lines_are_strict_json(tmp_path: Path):
    run = opened(tmp_path)
    odd = "two\nlines \u2028 \ud800 \0 长"
    run.append(sample(0, prediction=odd, tpot_s=float("nan"), parts=(np.float32("inf"), 1)))
    [line] = (run.path / "samples.jsonl").read_bytes().splitlines()

    def refuse(constant: str):
        raise AssertionError(constant)

    stored = json.loads(line, parse_constant=refuse)
    assert stored["prediction"] == odd
    assert stored["tpot_s"] is None
    assert stored["parts"] == [None, 1]
    assert run.samples() == [stored]


def test_append_checks_its_record(tmp_path: Path):
    run = opened(tmp_path)
    with pytest.raises(ValueError, match="without index"):
        run.append({"task": "niah", "length": 512})
    with pytest.raises(ValueError, match="opened for reading"):
        RunFolder(run.path).append(sample(0))
    with pytest.raises(TypeError, match="object"):
        run.append(sample(0, extra=object()))
    assert not (run.path / "samples.jsonl").exists()


def test_one_write_per_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = opened(tmp_path)
    events = []
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: events.append(data) or write(fd, data))
    monkeypatch.setattr(os, "fsync", lambda fd: events.append("sync") or fsync(fd))
    run.append(sample(0))
    assert events[0] == (run.path / "samples.jsonl").read_bytes()
    assert events[1] == "sync"


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = opened(tmp_path)
    run.append(sample(0))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    with pytest.raises(OSError, match="wrote 10 of"):
        run.append(sample(1))
    monkeypatch.undo()
    run.append(sample(2))
    assert indices(run) == indices(RunFolder(run.path)) == [0, 2]


def test_duplicates_count_once(tmp_path: Path):
    run = opened(tmp_path)
    for score in (0.0, 1.0):
        run.append(sample(0) | {"score": score})
    run.append(sample(0, task="vt"))
    run.append(sample(0, length=1024))
    for view in (run, RunFolder(run.path)):
        assert [record["score"] for record in view.samples()] == [0.0, 1.0, 1.0]
    assert run.missing("niah", 512, 1) == []


def test_damage_in_the_middle_names_the_line(tmp_path: Path):
    run = opened(tmp_path)
    run.append(sample(0))
    with open(run.path / "samples.jsonl", "a") as file:
        file.write('{"task": "niah", "len\n')
    run.append(sample(2))
    for read in (lambda: RunFolder(run.path).samples(), lambda: opened(tmp_path)):
        with pytest.raises(ValueError, match=r"samples\.jsonl, line 2"):
            read()


def test_a_reader_leaves_the_file_alone(tmp_path: Path):
    run = opened(tmp_path)
    run.append(sample(0))
    with open(run.path / "samples.jsonl", "a") as file:
        file.write('{"task": "ni')  # another process is in the middle of its write
    before = (run.path / "samples.jsonl").read_bytes()
    assert indices(RunFolder(run.path)) == [0]
    assert (run.path / "samples.jsonl").read_bytes() == before


TEXT = b"".join(json.dumps(sample(i, prediction="x" * i + "长")).encode() + b"\n" for i in range(6))


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, len(TEXT)))
def test_truncation_at_any_byte_keeps_complete_lines(cut: int):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs" / "abc123" / "samples.jsonl"
        file.parent.mkdir(parents=True)
        file.write_bytes(TEXT[:cut])
        complete = TEXT[:cut].count(b"\n")
        assert indices(RunFolder(file.parent)) == list(range(complete))
        run = opened(Path(folder))
        assert indices(run) == list(range(complete))
        assert file.read_bytes() == b"".join(TEXT.splitlines(keepends=True)[:complete])
        assert run.missing("niah", 512, 6) == list(range(complete, 6))
        run.append(sample(complete))
        assert indices(RunFolder(file.parent)) == list(range(complete + 1))


VICTIM = """
import sys
from xsparse.store import RunFolder, lock
results, n = sys.argv[1], int(sys.argv[2])
with lock(results, "abc123"):
    run = RunFolder.open(results, "abc123", {"threshold": 0.9}, {"host": "h"})
    for index in run.missing("niah", 512, n):
        run.append({"task": "niah", "length": 512, "index": index, "prediction": "x" * 5000})
        print(index, flush=True)
    run.finish([{"n": n}])
"""


def test_sigkill_at_any_moment_loses_at_most_one_sample(tmp_path: Path):
    """Invariant 10, with a real process; what it has printed it must have stored."""
    rng = random.Random(0)
    stored: list[int] = []
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(tmp_path), "100000"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        printed = [int(process.stdout.readline())]
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        printed += [int(line) for line in process.stdout if line.endswith("\n")]
        process.wait()

        assert printed[0] == len(stored)  # nothing was computed twice
        run = RunFolder(tmp_path / "runs" / "abc123")
        assert run.state == "interrupted"
        stored = indices(run)
        assert stored == list(range(len(stored)))
        assert len(stored) - (printed[-1] + 1) in (0, 1)  # killed between append and print

    done = subprocess.run(
        [sys.executable, "-c", VICTIM, str(tmp_path), str(len(stored) + 3)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [int(line) for line in done.stdout.split()] == [len(stored) + i for i in range(3)]
    assert run.state == "done"


def test_finding_runs(tmp_path: Path):
    assert list_runs(tmp_path) == []
    for run_id in ("abc123", "abd456"):
        opened(tmp_path, run_id)
    assert {run.run_id for run in list_runs(tmp_path)} == {"abc123", "abd456"}
    assert find_run(tmp_path, "abc").run_id == "abc123"
    with pytest.raises(ValueError, match="no run 'f'"):
        find_run(tmp_path, "f")
    with pytest.raises(ValueError, match="ambiguous: .*abd456"):
        find_run(tmp_path, "ab")
    with pytest.raises(ValueError, match="run_id="):
        find_run(tmp_path, "../runs")


def test_config_is_yaml_that_others_read_alike(tmp_path: Path):
    text = (opened(tmp_path).path / "config.yaml").read_text()
    assert yaml.safe_load(text) == CONFIG
    assert list(yaml.safe_load(text)) == list(CONFIG)

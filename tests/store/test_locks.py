"""Two points never compute the same run at once, and no dead process blocks a run."""

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from xsparse.store import RunFolder, is_locked, lock

HOLDER = """
import sys, time
from xsparse.store import lock
with lock(sys.argv[1], "dense1"):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def hold(results: Path, seconds: float) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(results), str(seconds)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_waits_for_another_process_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    RunFolder.open(tmp_path, "dense1", {}, {})
    caplog.clear()
    process = hold(tmp_path, 0.7)
    assert is_locked(tmp_path, "dense1")
    assert not caplog.messages
    start = time.monotonic()
    with lock(tmp_path, "dense1"):
        assert time.monotonic() - start > 0.3
        assert process.wait() == 0
    assert "waiting for run dense1, which process" in caplog.messages[0]
    assert "is free after" in caplog.messages[1]


def test_a_killed_holder_does_not_block(tmp_path: Path):
    process = hold(tmp_path, 60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not is_locked(tmp_path, "dense1")
    with lock(tmp_path, "dense1", timeout_s=5):
        pass


def test_other_runs_are_free(tmp_path: Path):
    with lock(tmp_path, "dense1"), lock(tmp_path, "dense2", timeout_s=0):
        assert is_locked(tmp_path, "dense1")
        assert not is_locked(tmp_path, "dense3")


def test_gives_up_in_time(tmp_path: Path):
    process = hold(tmp_path, 60)
    try:
        with pytest.raises(TimeoutError, match="run dense1 is held"), lock(tmp_path, "dense1", 0.3):
            pass
    finally:
        process.kill()
        process.wait()


def test_freed_by_an_exception(tmp_path: Path):
    with pytest.raises(KeyError), lock(tmp_path, "dense1"):
        raise KeyError
    assert not is_locked(tmp_path, "dense1")


def test_threads_compute_a_baseline_once(tmp_path: Path):
    computed = []

    def point():
        with lock(tmp_path, "dense1"):
            run = RunFolder.open(tmp_path, "dense1", {}, {})
            for index in run.missing("niah", 512, 3):
                time.sleep(0.02)
                computed.append(index)
                run.append({"task": "niah", "length": 512, "index": index})
            run.finish([{"n": 3}])

    threads = [threading.Thread(target=point) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert computed == [0, 1, 2]

"""One process at a time computes a run.

flock, through filelock: the kernel drops the lock with the process that holds it, however it
ends, so nothing stale is ever left. Lock files stay behind in runs/.locks; removing one while
somebody waits for it would let two processes in.
"""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xsparse.store.files import read_json

log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}")


def run_path(results_dir: str | Path, run_id: str) -> Path:
    """The folder of a run. Raises ValueError for what cannot be the name of one."""
    if not _NAME.fullmatch(run_id):
        raise ValueError(f"run_id={run_id!r}: expected up to 64 letters, digits, '_' or '-'")
    return Path(results_dir) / "runs" / run_id


@contextmanager
def lock(results_dir: str | Path, run_id: str, timeout_s: float = -1) -> Iterator[None]:
    """Hold the run `run_id`; whoever has to wait says for what.

    After waiting, look at the run again: the holder has probably finished it. Not re-entrant.
    Raises TimeoutError after `timeout_s` (0: at once; negative: waits for ever).
    """
    from filelock import FileLock, Timeout

    path = run_path(results_dir, run_id)
    file = path.parent / ".locks" / f"{run_id}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    guard = FileLock(file)
    try:
        guard.acquire(timeout=0)
    except Timeout:
        status = read_json(path / "status.json") or {}
        holder = f"process {status.get('pid', '?')} on {status.get('host', 'an unknown host')}"
        if timeout_s != 0:
            log.info("waiting for run %s, which %s computes (lock %s)", run_id, holder, file)
        since = time.monotonic()
        try:
            guard.acquire(timeout=timeout_s, poll_interval=0.2)
        except Timeout:
            raise TimeoutError(f"run {run_id} is held by {holder} (lock {file})") from None
        log.info("run %s is free after %.0f s", run_id, time.monotonic() - since)
    try:
        yield
    finally:
        guard.release()


def is_locked(results_dir: str | Path, run_id: str) -> bool:
    """Whether somebody holds the run, as far as this process may ask."""
    if not (run_path(results_dir, run_id).parent / ".locks" / f"{run_id}.lock").exists():
        return False
    try:
        with lock(results_dir, run_id, timeout_s=0):
            return False
    except (OSError, RuntimeError):  # held; no right to ask; RuntimeError: held by this thread
        return True

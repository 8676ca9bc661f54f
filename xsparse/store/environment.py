"""What a run ran on: recorded beside the results, found without importing torch."""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from xsparse.store.identity import PACKAGE

LIBRARIES = (
    *("torch", "transformers", "triton", "numpy", "tokenizers"),
    *("flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-cu13"),
)

# Set by users and schedulers; they change what a timing means.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_JOB_ID", "TRITON_INTERPRET")


def versions() -> dict[str, str | None]:
    """Versions of the libraries that compute, None for what is not installed, and of Python."""
    from importlib import metadata

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def environment(package: str | Path = PACKAGE) -> dict[str, Any]:
    """The content of env.json. `package` is the folder whose git commit is recorded."""
    return {
        "host": os.uname().nodename,
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "versions": versions(),
        "git": _git(Path(package)),
        "command": shlex.join(sys.orig_argv),
        "argv": list(sys.argv),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def _output(*command: str) -> str | None:
    """What a command prints, or None if it is missing, fails or takes more than 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _gpus() -> list[dict[str, str]]:
    keys = ("name", "driver_version", "memory.total")
    table = _output("nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader")
    rows = [line.split(", ") for line in (table or "").splitlines()]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def _git(package: Path) -> dict[str, Any]:
    """Commit and dirty flag; None where the package is not part of a repository.

    A copy of a tree without its repository names the commit in XSPARSE_GIT_COMMIT.
    An installed package may lie inside a repository of somebody else, hence the first question.
    """
    tracked = _output("git", "-C", str(package), "ls-files", "--error-unmatch", "__init__.py")
    if tracked is None:
        return {"commit": os.environ.get("XSPARSE_GIT_COMMIT"), "dirty": None}
    changes = _output("git", "-C", str(package), "status", "--porcelain")
    return {
        "commit": _output("git", "-C", str(package), "rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }

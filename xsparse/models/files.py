"""Files on disk and what identifies them: the cache folder, content hashes, remembered hashes.

A run that is already stored must be recognised without reading gigabytes of weights, so the
sha256 of a file is remembered together with its size and modification time; a file whose size or
time differs is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple


class ModelError(ValueError):
    """A model that cannot be had or used as asked; the message is one line for the user."""


class FileRecord(NamedTuple):
    size: int
    mtime_ns: int
    sha256: str


def cache_dir() -> Path:
    """`$XSPARSE_CACHE`, else `xsparse` in the user's cache folder."""
    if chosen := os.environ.get("XSPARSE_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "xsparse"


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(hashes: Mapping[str, str]) -> str:
    """One sha256 over named hashes, whatever their order."""
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write so that a reader sees the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(value, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_records(path: Path) -> dict[str, FileRecord]:
    """The records that `write_records` left at `path`; empty when absent or damaged."""
    try:
        stored = json.loads(path.read_text())["files"]
        return {name: FileRecord(**fields) for name, fields in stored.items()}
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return {}


def write_records(path: Path, records: Mapping[str, FileRecord], **extra: object) -> None:
    fields = {name: record._asdict() for name, record in sorted(records.items())}
    write_json(path, {**extra, "files": fields})


def record_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Hash files of a folder, several at once: hashing releases the interpreter's lock."""

    def record(name: str) -> FileRecord:
        before = (folder / name).stat()
        return FileRecord(before.st_size, before.st_mtime_ns, sha256_file(folder / name))

    names = sorted(names)
    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(names, pool.map(record, names), strict=True))


def is_unchanged(folder: Path, name: str, record: FileRecord) -> bool:
    """Whether size and modification time are as recorded: the quick check."""
    try:
        now = (folder / name).stat()
    except OSError:
        return False
    return (now.st_size, now.st_mtime_ns) == (record.size, record.mtime_ns)


def remembered_hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """sha256 per file of a folder that is not ours, read at most once while files do not change."""
    names = sorted(names)
    key = hashlib.sha256(str(folder).encode()).hexdigest()[:32]
    memory = cache_dir() / "hashes" / f"{key}.json"
    known = read_records(memory)
    current = {n: known[n] for n in names if n in known and is_unchanged(folder, n, known[n])}
    if missing := [name for name in names if name not in current]:
        current |= record_files(folder, missing)
        with contextlib.suppress(OSError):  # a read-only cache only costs the time to hash again
            write_records(memory, {**known, **current}, folder=str(folder))
    return {name: record.sha256 for name, record in current.items()}

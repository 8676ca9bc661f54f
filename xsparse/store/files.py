"""Writing files so that a reader, or the process after a crash, never meets half of one."""

import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any


def plain(value: Any, on_float: Callable[[float], Any]) -> Any:
    """Copy of `value` in JSON's types; arrays and array scalars become lists and numbers.

    `on_float` maps every float. Raises TypeError for what JSON cannot hold.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return on_float(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item, on_float) for key, item in value.items()}
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist(), on_float)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [plain(item, on_float) for item in value]
    raise TypeError(f"a {type(value).__name__} cannot be stored as JSON: {value!r}")


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON in ASCII (one line without `indent`); NaN and infinities become null."""
    return json.dumps(plain(value, _finite), indent=indent, allow_nan=False)


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None where there is no file. ValueError if it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`: another process sees the old or the new file, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append one line durably, in one write; a write that fails leaves the file as it was."""
    data = line.encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, data)
            if written != len(data):  # a full disk writes a part without an error
                raise OSError(f"{path}: wrote {written} of {len(data)} bytes; is the disk full?")
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if size == 0:
        sync_folder(path.parent)


def truncate(path: Path, size: int) -> None:
    """Cut the file to `size` bytes, durably."""
    with open(path, "r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make new names in a folder survive a power cut, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems cannot; the content itself is synced
    finally:
        os.close(descriptor)

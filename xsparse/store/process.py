"""Whether the process that wrote a file still runs.

Process numbers are reused, quickly so in containers, hence the start time beside the number.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """What identifies this process to `is_alive`."""
    pid = os.getpid()
    return {"pid": pid, "host": os.uname().nodename, "process_start": _start(pid)}


def is_alive(process: Mapping[str, Any]) -> bool | None:
    """Whether the process recorded by `this_process` runs; None if it is of another host."""
    pid = process.get("pid")
    if process.get("host") != os.uname().nodename or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and is another user's
    return process.get("process_start") in (None, _start(pid))


def _start(pid: int) -> int | None:
    """Clock ticks from boot to the start of the process; None where there is no /proc.

    A zombie (killed, not yet reaped by its parent) counts as gone: it gives -1.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces
    return -1 if fields[0] == "Z" else int(fields[19])

"""Results on disk: which run is which, what it has computed so far, and who is computing it.

The folder is the record (docs/results.md); everything shown elsewhere (reports, W&B) is made from
it. A run is found again by the hash of all that can change a number, so no sweep computes twice
what another one has, and a killed run goes on where it stopped. Standard library and filelock
only: listing results needs no torch.
"""

from xsparse.store.environment import environment, versions
from xsparse.store.identity import SOURCE_PARTS, identity, source_hash
from xsparse.store.locks import is_locked, lock
from xsparse.store.run import RunFolder, find_run, list_runs
from xsparse.store.sweep import SweepFolder

__all__ = [
    "SOURCE_PARTS",
    "RunFolder",
    "SweepFolder",
    "environment",
    "find_run",
    "identity",
    "is_locked",
    "list_runs",
    "lock",
    "source_hash",
    "versions",
]

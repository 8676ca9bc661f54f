"""Synthetic sweeps shared by the tests of the report; they only read them."""

from pathlib import Path

import pytest
from synthetic_sweeps import make_sweep


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five points on niah at two lengths, and one that failed."""
    return make_sweep(tmp_path_factory.mktemp("sweep"), failed=["threshold=7"])


@pytest.fixture(scope="session")
def many_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    return make_sweep(root, tasks=("niah", "vt", "cwe"), lengths=(4096,), n=50)

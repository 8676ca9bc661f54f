"""A run id changes with whatever can change a number, and with nothing else."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xsparse.store as store
from xsparse.store import identity, source_hash

PAYLOAD = {"config": {"threshold": 0.9, "stride": 8, "length": [2048, 4096]}, "weights": "ab" * 32}


def with_config(**changes):
    return {**PAYLOAD, "config": {**PAYLOAD["config"], **changes}}


def test_is_sha256_of_canonical_json():
    text = '{"a":0.8,"b":[1,true,null,"x"]}'
    expected = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert identity({"b": (1.0, True, None, "x"), "a": 0.7999999999999999}) == expected


def test_range_and_literal_are_one_run():
    start, step = 0.7, 0.05
    ids = {identity(with_config(threshold=start + 2 * step)), identity(with_config(threshold=0.8))}
    assert 0.7 + 2 * 0.05 != 0.8
    assert len(ids) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"threshold": 1.0},
        {"threshold": np.float64(1.0)},
        {"threshold": np.float32(1.0)},
        {"threshold": np.int64(1)},
        {"threshold": np.array(1)},
    ],
)
def test_spelling_of_a_number_does_not_count(other):
    assert identity(other) == identity({"threshold": 1})


def test_small_numbers_stay_apart():
    assert identity({"x": 1e-12}) != identity({"x": 2e-12}) != identity({"x": 0.0})
    assert identity({"x": -0.0}) == identity({"x": 0})
    assert identity({"x": True}) != identity({"x": 1})


@pytest.mark.parametrize(
    "change", [{"threshold": 0.91}, {"stride": 16}, {"length": [4096, 2048]}, {"extra": None}]
)
def test_every_change_counts(change):
    assert identity(with_config(**change)) != identity(PAYLOAD)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=10,
    )
)
def test_order_of_keys_does_not_count(value):
    def reverse(item):
        if isinstance(item, dict):
            return {key: reverse(item[key]) for key in reversed(item)}
        return [reverse(entry) for entry in item] if isinstance(item, list) else item

    assert identity({"v": value, "w": 1}) == identity({"w": 1, "v": reverse(value)})
    assert identity({"v": value}) == identity(json.loads(json.dumps({"v": value})))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="finite"):
        identity(with_config(threshold=bad))


def test_refuses_what_is_not_data():
    with pytest.raises(TypeError, match="object"):
        identity({"x": object()})


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("ops/a.py", "ops/sub/b.py", "tasks/words.txt", "attention.py", "report/page.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path


def test_source_hash_follows_content_and_names(package: Path):
    before = source_hash(package)
    seen = {before}
    (package / "ops/sub/b.py").write_text("changed")
    seen.add(source_hash(package))
    (package / "ops/sub/b.py").rename(package / "ops/sub/c.py")
    seen.add(source_hash(package))
    (package / "tasks/words.txt").write_text("other words")
    seen.add(source_hash(package))
    (package / "runner.py").write_text("new")
    seen.add(source_hash(package))
    assert len(seen) == 5


def test_source_hash_ignores_the_rest(package: Path):
    before = source_hash(package)
    (package / "report/page.py").write_text("changed")
    (package / "ops/README.md").write_text("words")
    (package / "ops/__pycache__").mkdir()
    (package / "ops/__pycache__/a.cpython-311.pyc").write_bytes(b"\0")
    (package / "ops/.a.py.swp").write_text("editor")
    (package / "attention.py").touch()
    assert source_hash(package) == before


def test_source_hash_needs_source(tmp_path: Path):
    with pytest.raises(ValueError, match="no package source"):
        source_hash(tmp_path)


def test_source_hash_of_this_package():
    assert source_hash() == source_hash(Path(store.__file__).parents[1])


def test_versions():
    import numpy
    import torch

    found = store.versions()
    assert {"python", "torch", "transformers", "triton", "numpy", "tokenizers"} <= set(found)
    assert found["numpy"] == numpy.__version__
    assert found["torch"] == torch.__version__


def git(folder: Path, *command: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *author, *command], cwd=folder, check=True, capture_output=True)


def test_environment_and_git(tmp_path: Path):
    package = tmp_path / "package"
    package.mkdir()
    assert store.environment(package)["git"] == {"commit": None, "dirty": None}
    git(tmp_path, "init")
    (package / "__init__.py").write_text("")
    assert store.environment(package)["git"]["commit"] is None  # not part of it yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    env = store.environment(package)
    assert len(env["git"]["commit"]) == 40
    assert env["git"]["dirty"] is False
    (package / "__init__.py").write_text("x = 1")
    assert store.environment(package)["git"]["dirty"] is True
    assert env["ram_gb"] > 0
    assert env["cpu"]
    assert env["argv"] == sys.argv
    assert env["versions"] == store.versions()
    json.dumps(env, allow_nan=False)


def test_gpus_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        '#!/bin/sh\necho "NVIDIA H200, 570.1, 143771 MiB"\necho "NVIDIA H200, 570.1, 143771 MiB"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpus = store.environment()["gpus"]
    assert (
        gpus
        == [{"name": "NVIDIA H200", "driver_version": "570.1", "memory.total": "143771 MiB"}] * 2
    )


def test_import_is_light():
    heavy = "torch transformers pandas matplotlib yaml rich wandb filelock"
    code = f"import sys, xsparse.store; print([m for m in '{heavy}'.split() if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

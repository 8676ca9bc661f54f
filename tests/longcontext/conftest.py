from dataclasses import replace

import pytest
import torch
from tokenizers import decoders

from experiments.longcontext import packs
from experiments.longcontext.settings import compose
from tests.models import tiny
from xsparse.config import ModelConfig

# A tokenizer of bytes: a token is a character.
SMALL = [
    "pack_tokens=1500",
    "accumulate=2",
    "phases=[{steps: 3, shortest: 700, longest: 1000}, {steps: 3, shortest: 1000, longest: 1500}]",
    "rank=4",
    "alpha=8",
    "warmup_steps=1",
    "max_position_embeddings=4096",
    "workers=0",
    "compile=false",
    "device=cpu",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XSPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of a tiny model wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.write_model(folder)
    return folder


@pytest.fixture(scope="session")
def frame(base):
    tokenizer = packs.tokenizer(str(base))
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    return packs.Frame(tokenizer)


@pytest.fixture
def config(base, tmp_path):
    """A training of the tiny model; `config(key=value)` replaces keys."""
    composed = compose("train", [*SMALL, f"folder={tmp_path / 'run'}"])
    node = ModelConfig(name="tiny", source="path", id=str(base))
    return lambda **changes: replace(composed, **{"model": node, **changes})

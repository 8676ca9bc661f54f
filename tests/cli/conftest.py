"""The real command line in a temporary folder, on a tiny random model with the real tokenizer."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass
class Done:
    code: int
    out: str
    err: str
    seconds: float


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    from xsparse import models
    from xsparse.cli import compose
    from xsparse.config import register

    register()
    folder = tmp_path_factory.mktemp("models") / "tiny=1"
    tokenizer = models.load_tokenizer(compose([]).model)
    tokenizer.save_pretrained(folder)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=8192,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)
    return folder


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "run.py"), *arguments]


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "2", "COLUMNS": "200", **changes}


@pytest.fixture
def run(tmp_path):
    """run(*arguments) -> Done, in a temporary working folder; `python` runs another module."""

    def call(*arguments: str, module: str | None = None, **env: str) -> Done:
        words = [sys.executable, "-m", module, *arguments] if module else command(*arguments)
        begin = time.monotonic()
        done = subprocess.run(
            words, cwd=tmp_path, env=environment(**env), capture_output=True, text=True, timeout=300
        )
        return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)

    return call


@pytest.fixture
def small(tiny_folder) -> list[str]:
    """Overrides of a point that takes a second or two."""
    return [
        f"model={tiny_folder}",
        "task=niah_single_1",
        "length=1024",
        "samples=2",
        "tracker=disabled",
        "chunk_size=512",
    ]

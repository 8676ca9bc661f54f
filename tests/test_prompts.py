"""Prompts made ahead by processes are those made in turn, in order, and stopping leaves nothing."""

import itertools

from omegaconf import OmegaConf

from xsparse import prompts
from xsparse.config import ModelConfig, TaskConfig
from xsparse.models import load_tokenizer
from xsparse.prompts import Source

NODE = OmegaConf.load("conf/model/smollm2-135m-lc.yaml")
SOURCE = Source(ModelConfig(**NODE), TaskConfig(name="ruler"), seed=3)
WANTED = [
    (task, length, index)
    for index, length, task in itertools.product(
        range(3), (512, 700), ("niah_single_1", "niah_multikey_2")
    )
]


def test_processes_change_neither_prompts_nor_their_order():
    tokenizer = load_tokenizer(SOURCE.model)
    alone = list(SOURCE.samples(WANTED, tokenizer))
    assert [(s.task, s.length, s.index) for s in alone] == WANTED
    assert list(SOURCE.samples(WANTED, None, workers=2)) == alone
    begun = SOURCE.samples(WANTED, None, workers=2)
    assert next(begun) == alone[0]
    begun.close()  # as an exception in the run does
    other = Source(SOURCE.model, SOURCE.task, seed=4)
    assert list(other.samples(WANTED[:2], None, workers=2)) != alone[:2]
    prompts._pool(2).shutdown()
    prompts._pool.cache_clear()

"""Names, checks and counts of task nodes, in every form a node may have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from xsparse import tasks
from xsparse.config import TaskConfig
from xsparse.tasks.families import RULER, specs

CONF = Path(__file__).parents[2] / "conf" / "task"


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda p: p.stem)
def test_config_files(path):
    node = OmegaConf.merge(OmegaConf.structured(TaskConfig), OmegaConf.load(path))
    forms = [node, OmegaConf.to_container(node), OmegaConf.to_object(node)]
    found = [tasks.names(form) for form in forms]
    assert found[0] == found[1] == found[2]
    if path.stem.startswith("qa"):
        with pytest.raises(ValueError, match="task.qa_data=None: qa_. needs a folder"):
            tasks.check(found[0][0], 4096, node)
    else:
        for name in found[0]:
            tasks.check(name, 4096, node)


def test_every_task_has_a_config():
    assert set(specs()) <= {path.stem for path in CONF.glob("*.yaml")}


def test_ruler_is_eleven_tasks_without_data():
    assert tasks.names({"name": "ruler"}) == [n for n in RULER if not n.startswith("qa")]
    assert len(tasks.names({"name": "ruler"})) == 11


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"name": "rulr"}, r"task=rulr: known are ruler, niah_single_1"),
        ({"name": "x", "tasks": ["vt", "xx"]}, "task=xx"),
        ({"name": "vt", "depths": [0]}, "task.depths=.*no meaning for task vt"),
        ({"name": "vt", "rounds": 3}, "task.rounds=3"),
        ({"name": "vt", "haystack": "noise"}, "task.haystack=noise"),
        ({"name": "niah", "haystack": "essays"}, "task.haystack='essays': allowed are essay"),
        ({"name": "niah", "depths": [0, 101]}, "task.depths has 101"),
        ({"name": "niah", "depths": []}, "at least one depth"),
        ({"name": "niah", "rounds": 0}, "task.rounds=0"),
        ({"name": "vt", "ruler_data": "/no/such"}, "task.ruler_data=/no/such: no such folder"),
        ({}, "task.name is missing"),
    ],
)
def test_bad_nodes(node, message):
    def use():
        for name in tasks.names(node):
            tasks.check(name, 4096, node)

    with pytest.raises(ValueError, match=message):
        use()


def test_grid_decides_its_number_of_samples():
    assert tasks.sample_count("niah", 2048, {"name": "niah"}, 4) == 5
    node = {"name": "niah", "depths": [0, 50], "rounds": 3}
    assert tasks.sample_count("niah", 2048, node, 4) == 6
    assert tasks.sample_count("vt", 2048, {"name": "vt"}, 4) == 4


def test_import_and_check_are_light():
    code = (
        "import sys; from xsparse import tasks; tasks.check('vt', 4096, {'name': 'vt'});"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

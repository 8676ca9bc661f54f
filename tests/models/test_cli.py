"""The model configurations of the project, and the small command line over them."""

import pytest
from omegaconf import OmegaConf

from xsparse.config import ModelConfig
from xsparse.models import __main__ as cli
from xsparse.models import fetching, hub, node, shape

from . import tiny

NAMES = sorted(path.stem for path in cli.CONF.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_configurations_have_every_key_and_no_other(name):
    keys = set(OmegaConf.load(cli.CONF / f"{name}.yaml"))
    assert keys == set(ModelConfig.__dataclass_fields__)
    made = cli.read_node([f"model={name}", *(["model.id=x/y"] if name in ("hub", "path") else [])])
    node.check_node(made)
    assert made.name == {"hub": "x/y", "path": "x/y", "random": "random-llama-8b"}.get(name, name)


def test_random_default_has_the_size_of_llama_3_1_8b():
    sizes = shape(cli.read_node(["model=random"]))
    assert sizes.params == 8_030_261_248
    assert sizes.max_length == 131_072
    assert sizes.kv_token_bytes == 131_072


def test_qwen3_does_not_think():
    assert cli.read_node(["model=qwen3-8b"]).chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fetch", "model=hub"], "model=hub needs model.id="),
        (["fetch", "model=absent"], "model=absent: known are hub, "),
        (["fetch", "model.colour=red"], "colour"),
        (["show", "model=path", "model.id=/nowhere"], "/nowhere: no such folder"),
        (["fetch", "smollm2"], "'smollm2': expected model=NAME"),
        (["burn"], "fetch|show|verify"),
        ([], "fetch|show|verify"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_fetch_and_show(tmp_path, capsys):
    tiny.write_model(tmp_path)
    arguments = ["model=path", f"model.id={tmp_path}", "model.name=mine"]
    assert cli.main(["fetch", *arguments]) == 0
    assert f"mine: {tmp_path}" in capsys.readouterr().out
    assert cli.main(["show", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "4 query, 2 KV, head_dim 32" in shown
    assert fetching.fetch(cli.read_node(arguments)).weights_sha256 in shown


def test_show_of_a_hub_model_fetches_its_config_only(tmp_path, capsys, monkeypatch):
    tiny.write_model(tmp_path)
    monkeypatch.setattr(hub, "config_file", lambda repo_id, revision: tmp_path / "config.json")
    monkeypatch.setattr(cli, "local_snapshot", lambda repo_id, revision: None)
    assert cli.main(["show", "model=hub", "model.id=org/tiny"]) == 0
    assert "not fetched yet" in capsys.readouterr().out

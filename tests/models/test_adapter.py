"""LoRA adapters: merged exactly, refused on another base, part of a model's identity."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from xsparse.models import ModelError, adapter, fetch, load, load_tokenizer, shape
from xsparse.models import __main__ as cli

from . import tiny

ROOT = Path(__file__).parents[2]
TARGETS = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.k_proj",
    "model.layers.1.mlp.down_proj",
]


@pytest.fixture
def base(tmp_path):
    tiny.write_model(tmp_path / "base")
    return tmp_path / "base"


def matrices_of(folder, rank=3):
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(5)
    made = {}
    for target in TARGETS:
        out, into = weights[f"{target}.weight"].shape
        made[target] = tuple(
            torch.randn(size, generator=draw) * 0.2 for size in ((rank, into), (out, rank))
        )
    return made


def description(folder, **changes):
    values = {
        "format_version": 1,
        "base": fetch(tiny.Node(id=str(folder))).weights_sha256,
        "rank": 3,
        "alpha": 6.0,
        "targets": TARGETS,
        "config": {"rope_theta": 5e5, "max_position_embeddings": 1024},
        "recipe": "by hand",
        **changes,
    }
    return adapter.Adapter(**values)


@pytest.fixture
def made(base, tmp_path):
    """(node of base with adapter, file, matrices)."""
    path = tmp_path / "own" / adapter.FILE
    matrices = matrices_of(base)
    adapter.write(path, description(base), matrices)
    return tiny.Node(id=str(base), adapter=str(path)), path, matrices


def expected_weights(base, matrices):
    """By hand, in fp64: W + (6 / 3) B A."""
    weights = {n: w.double() for n, w in load_file(base / "model.safetensors").items()}
    for target, (a, b) in matrices.items():
        weights[f"{target}.weight"] += 2.0 * (b.double() @ a.double())
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_merged_in_fp32_and_rounded_once(base, made, dtype):
    node, _, matrices = made
    loaded = load(node, dtype=dtype, device="cpu")
    state = loaded.model.state_dict()
    expected = expected_weights(base, matrices)
    assert loaded.model.dtype == loaded.model.config.dtype == dtype
    for name, weight in expected.items():
        assert state[name].dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(state[name].double(), weight, rtol=1e-6, atol=1e-6)
        else:  # one rounding: within half a unit in the last place of the exact value
            error = (state[name].double() - weight).abs()
            assert (error <= weight.abs() * 2**-8 + 1e-7).all(), name
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_config_is_replaced_before_the_model_is_built(made):
    node, _, _ = made
    model = load(node, dtype=torch.bfloat16, device="cpu").model
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, 5e5 ** -(torch.arange(0, 32, 2).float() / 32))
    assert model.config.max_position_embeddings == 1024
    assert load_tokenizer(node).model_max_length == 1024


@pytest.mark.parametrize("place", ["rope_parameters", "rope_theta"])
def test_rope_theta_goes_where_the_config_has_it(place):
    class Config:
        pass

    config = Config()
    if place == "rope_parameters":
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    adapter.override(config, {"rope_theta": 2e6})
    if place == "rope_parameters":
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 2e6}
    else:
        assert config.rope_theta == 2e6


def test_max_length_follows_the_positions(base, made):
    node, _, _ = made
    assert fetch(node).max_length == shape(node).max_length == 1024
    shorter = replace(node, max_length=512)
    assert fetch(shorter).max_length == shape(shorter).max_length == 512
    with pytest.raises(ModelError, match="max_length=1025: the model has 1024 positions"):
        fetch(replace(node, max_length=1025))


def test_identity_changes_with_the_adapter(base, made):
    node, path, matrices = made
    plain, adapted = fetch(replace(node, adapter=None)), fetch(node)
    assert plain.adapter is None
    assert plain.base_sha256 == plain.weights_sha256 == adapted.base_sha256
    assert adapted.adapter == path
    assert adapted.weights_sha256 != plain.weights_sha256
    assert adapted.tokenizer_hash == plain.tokenizer_hash
    a, b = matrices[TARGETS[0]]
    adapter.write(path, description(base), {**matrices, TARGETS[0]: (a + 1, b)})
    assert fetch(node).weights_sha256 != adapted.weights_sha256


def test_a_folder_and_a_bundled_name(made, monkeypatch):
    node, path, _ = made
    assert fetch(replace(node, adapter=str(path.parent))).adapter == path
    monkeypatch.setattr(adapter, "BUNDLED", path.parent)
    assert fetch(replace(node, adapter="adapter")).adapter == path
    with pytest.raises(ModelError, match="model.adapter=absent: .* bundled are adapter"):
        fetch(replace(node, adapter="absent"))


def test_another_base_is_refused(base, made, tmp_path):
    node, _, _ = made
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    for use in (fetch, lambda node: load(node, dtype="float32", device="cpu")):
        with pytest.raises(ModelError, match="made for a base with weights_sha256=") as error:
            use(node)
        assert "\n" not in str(error.value)


def test_random_weights_take_no_adapter(made):
    node = replace(made[0], source="random", config=tiny.fields("llama"))
    with pytest.raises(ModelError, match="random weights take no adapter"):
        fetch(node)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version=2, allowed is 1"),
        ({"config": {"hidden_size": 1}}, "replaces config.hidden_size, allowed are max_position"),
        ({"rank": 4}, r"lora_A has shape \[3, 64\], need rank 4"),
    ],
)
def test_bad_headers_are_one_line(base, tmp_path, changes, message):
    path = tmp_path / "bad.safetensors"
    adapter.write(path, description(base, **changes), matrices_of(base))
    with pytest.raises(ModelError, match=message) as error:
        fetch(tiny.Node(id=str(base), adapter=str(path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"text that is no header", (9).to_bytes(8, "little")])
def test_files_of_another_kind(base, tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a safetensors file"):
        fetch(tiny.Node(id=str(base), adapter=str(path)))


def test_safetensors_that_are_no_adapter(base):
    with pytest.raises(ModelError, match="does not describe an adapter"):
        fetch(tiny.Node(id=str(base), adapter=str(base / "model.safetensors")))


def test_a_target_that_the_model_does_not_have(base, tmp_path):
    path, matrices = tmp_path / "bad.safetensors", matrices_of(base)
    matrices["model.layers.7.mlp.up_proj"] = matrices.pop(TARGETS[0])
    adapter.write(path, description(base, targets=list(matrices)), matrices)
    with pytest.raises(ModelError, match=r"layers.7.mlp.up_proj changes .* the model has None"):
        load(tiny.Node(id=str(base), adapter=str(path)), dtype="float32", device="cpu")


def test_show_names_adapter_and_base(made, capsys):
    node, path, _ = made
    arguments = ["model=path", f"model.id={node.id}", f"model.adapter={path}"]
    assert cli.main(["show", *arguments]) == 0
    shown = capsys.readouterr().out
    for text in (str(path), fetch(node).base_sha256, fetch(node).weights_sha256, "1,024 tokens"):
        assert text in shown


def test_length_and_identity_need_no_torch(made):
    code = (
        "import sys, json\nfrom types import SimpleNamespace\nfrom xsparse import models\n"
        "node = SimpleNamespace(**json.loads(sys.argv[1]))\n"
        "print(models.fetch(node).max_length, models.shape(node).max_length)\n"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    node = json.dumps(vars(made[0]))
    done = subprocess.run(
        [sys.executable, "-c", code, node], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1024 1024\n[]\n"

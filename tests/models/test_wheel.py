"""The wheel source: downloaded, checked and converted once, whatever is interrupted or damaged."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xsparse.models import ModelError, fetch, files, load, wheel

from . import tiny


@pytest.fixture
def downloads(wheel_source, pin, monkeypatch):
    """Replaces pip by a copy; returns the list of downloads made."""
    made = []

    def copy(pin, dest, progress):
        made.append(pin.file)
        shutil.copy(wheel_source[0] / pin.file, dest)

    monkeypatch.setattr(wheel, "_pip_download", copy)
    return made


@pytest.fixture
def conversions(monkeypatch):
    """Replaces the conversion by two small files; returns the list of conversions made."""
    made = []

    def convert(gguf, out):
        made.append(gguf.name)
        (out / "config.json").write_text('{"max_position_embeddings": 256}')
        (out / "model.safetensors").write_bytes(gguf.read_bytes()[:1000])

    monkeypatch.setattr(wheel, "convert", convert)
    return made


def test_converts_once_and_then_needs_nothing(pin, downloads, conversions, monkeypatch):
    folder = wheel.ensure(pin)
    for name in ("_pip_download", "convert"):
        monkeypatch.delattr(wheel, name)
    assert wheel.ensure(pin) == folder
    assert wheel.ensure(pin, full=True) == folder
    assert (len(downloads), len(conversions)) == (1, 1)
    records = files.read_records(folder / wheel.MANIFEST)
    assert set(records) == {"config.json", "model.safetensors"}


def test_pip_itself_from_a_local_folder(pin, conversions):
    stages = []
    wheel.ensure(pin, lambda stage, done, total: stages.append(stage))
    assert len(conversions) == 1
    assert stages[-1] == "converting"


def test_offline_with_an_empty_cache_says_so_in_one_line(pin, conversions, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelError, match="cannot download tiny-model==1.0 with pip") as error:
        wheel.ensure(pin)
    assert "\n" not in str(error.value)
    assert "PIP_FIND_LINKS" in str(error.value)
    assert not conversions


def test_unreachable_index_is_the_reason_given(pin, conversions, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    with pytest.raises(ModelError, match="the package index cannot be reached"):
        wheel.ensure(pin)


def test_wrong_bytes_from_pip_are_refused(pin, downloads, conversions, cache):
    other = wheel.Pin(**{**vars(pin), "sha256": "0" * 64})
    with pytest.raises(ModelError, match=f"sha256 {pin.sha256}, pinned is 0000"):
        wheel.ensure(other)
    assert not conversions
    assert not list((cache / "wheels").glob("*"))


def test_wrong_gguf_inside_the_wheel_is_refused(pin, downloads, conversions):
    other = wheel.Pin(**{**vars(pin), "gguf_sha256": "0" * 64})
    with pytest.raises(ModelError, match="tiny.gguf has sha256"):
        wheel.ensure(other)
    assert not conversions


def test_half_a_wheel_in_the_cache_is_fetched_again(
    pin, wheel_source, downloads, conversions, cache
):
    whole = (wheel_source[0] / pin.file).read_bytes()
    (cache / "wheels").mkdir(parents=True)
    (cache / "wheels" / pin.file).write_bytes(whole[: len(whole) // 2])
    wheel.ensure(pin)
    assert len(downloads) == 1
    assert (cache / "wheels" / pin.file).read_bytes() == whole


def test_a_whole_wheel_in_the_cache_needs_no_pip(pin, wheel_source, downloads, conversions, cache):
    (cache / "wheels").mkdir(parents=True)
    shutil.copy(wheel_source[0] / pin.file, cache / "wheels")
    wheel.ensure(pin)
    assert not downloads


@pytest.mark.parametrize("reason", [RuntimeError("full disk"), KeyboardInterrupt()])
def test_interrupted_conversion_leaves_nothing_behind(pin, downloads, cache, monkeypatch, reason):
    def half(gguf, out):
        (out / "config.json").write_text("{")
        raise reason

    with monkeypatch.context() as patch:
        patch.setattr(wheel, "convert", half)
        with pytest.raises(type(reason)):
            wheel.ensure(pin)
    left = [path.name for path in (cache / "models").iterdir()]
    assert left == [f"{wheel.model_folder(pin).name}.lock"]


def test_leftovers_of_a_killed_process_are_removed(pin, downloads, conversions, cache):
    leftover = wheel.model_folder(pin).parent / f".{wheel.model_folder(pin).name}-killed"
    leftover.mkdir(parents=True)
    wheel.ensure(pin)
    assert not leftover.exists()


def test_a_folder_without_manifest_is_made_again(pin, downloads, conversions):
    folder = wheel.ensure(pin)
    (folder / wheel.MANIFEST).unlink()
    wheel.ensure(pin)
    assert (len(downloads), len(conversions)) == (1, 2)  # the wheel was kept


@pytest.mark.parametrize("damage", ["changed", "truncated", "deleted", "manifest"])
def test_damage_is_noticed_and_repaired(pin, downloads, conversions, damage):
    folder = wheel.ensure(pin)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    match damage:
        case "changed":
            path.write_bytes(good[:-1] + b"!")
        case "truncated":
            path.write_bytes(good[:10])
        case "deleted":
            path.unlink()
        case _:
            (folder / wheel.MANIFEST).write_text('{"files": {"model.safetensors": 3}}')
    wheel.ensure(pin)
    assert path.read_bytes() == good
    assert len(conversions) == 2


def test_change_behind_the_same_size_and_time_needs_the_full_check(pin, downloads, conversions):
    folder = wheel.ensure(pin)
    path = folder / "model.safetensors"
    good, before = path.read_bytes(), path.stat()
    path.write_bytes(good[:-1] + b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    wheel.ensure(pin)
    assert path.read_bytes() != good
    wheel.ensure(pin, full=True)
    assert path.read_bytes() == good


def test_copied_cache_is_read_once_and_kept(pin, downloads, conversions, monkeypatch):
    folder = wheel.ensure(pin)
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))
    wheel.ensure(pin)
    assert len(conversions) == 1
    monkeypatch.delattr(files, "sha256_file")
    wheel.ensure(pin)


def test_a_cache_that_cannot_be_written_is_one_line(pin, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XSPARSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="XSPARSE_CACHE names another cache folder"):
        wheel.ensure(pin)


def test_unknown_wheel_names_the_known(pin):
    with pytest.raises(ModelError, match="'other==1': wheels known are tiny-model==1.0"):
        fetch(tiny.Node(source="wheel", id="other==1"))


PROCESS = """
import json, sys, time
from pathlib import Path
from xsparse.models import wheel

def convert(gguf, out):
    with open(sys.argv[2], "a") as made:
        made.write("made\\n")
    time.sleep(0.5)
    (out / "config.json").write_text("{}")

wheel.convert = convert
print(wheel.ensure(wheel.Pin(**json.loads(sys.argv[1]))))
"""


def test_two_processes_at_once_convert_once(pin, tmp_path):
    made = tmp_path / "made"
    command = [sys.executable, "-c", PROCESS, json.dumps(vars(pin)), str(made)]
    root = Path(__file__).parents[2]
    both = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) for _ in range(2)]
    answers = [process.communicate(timeout=60)[0].decode().strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert answers == [str(wheel.model_folder(pin))] * 2
    assert made.read_text() == "made\n"


def test_real_conversion_of_a_tiny_gguf(pin, downloads):
    """Weights equal gguf's own dequantisation; the tokenizer splits digits."""
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    loaded = load(tiny.Node(source="wheel", id=pin.requirement), dtype="float32", device="cpu")
    state = loaded.model.state_dict()
    hf_names = {
        "token_embd": "model.embed_tokens",
        "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
        "blk.1.attn_k": "model.layers.1.self_attn.k_proj",
        "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
    }
    weights = tiny.random_weights()
    kind = GGMLQuantizationType.Q4_1
    for gguf_name, hf_name in hf_names.items():
        expected = dequantize(quantize(weights[f"{gguf_name}.weight"], kind), kind)
        np.testing.assert_array_equal(state[f"{hf_name}.weight"].numpy(), expected)
    norm = weights["blk.1.ffn_norm.weight"]
    np.testing.assert_array_equal(
        state["model.layers.1.post_attention_layernorm.weight"].numpy(), norm
    )
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.eos_ids == [2]
    assert loaded.files.weights_sha256 == pin.gguf_sha256
    assert loaded.files.max_length == 256

    tokens = loaded.tokenizer
    assert (tokens.pad_token_id, tokens.eos_token_id, tokens.bos_token_id) == (2, 2, 1)
    words = tokens.convert_ids_to_tokens(tokens("a  12 he</s>").input_ids)
    assert words == ["a", "ĠĠ", "1", "2", "Ġ", "he", "</s>"]
    text = "naïve  123 日本\n4"
    assert tokens.decode(tokens(text).input_ids) == text
    assert (
        tokens.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<s>x</s>"
    )
    assert torch.isfinite(loaded.model(torch.tensor([[1, 5, 9]])).logits).all()


def test_tokenizer_of_another_split_is_refused(tmp_path):
    from xsparse.models.convert import read_metadata, save_tokenizer

    tiny.write_gguf(tmp_path / "other.gguf", split="llama-bpe")
    with pytest.raises(ModelError, match="'llama-bpe'"):
        save_tokenizer(read_metadata(tmp_path / "other.gguf"), tmp_path)


@pytest.mark.slow
def test_the_default_model_answers_a_needle_prompt(monkeypatch):
    """With the real wheel, where a cache already holds it."""
    import torch

    monkeypatch.delenv("XSPARSE_CACHE")
    pin = wheel.find_pin(wheel.DEFAULT_WHEEL)
    if not (wheel.model_folder(pin) / wheel.MANIFEST).is_file():
        pytest.skip("the default model is not in the user's cache")
    node = tiny.Node(source="wheel", id=pin.requirement)
    loaded = load(node, dtype="float32", device="cpu")
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go.\n" * 12
    needle = "One of the special magic numbers for cat is: 8090293.\n"
    question = "What is the special magic number for cat mentioned in the text?"
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": noise + needle + noise + question}],
        add_generation_prompt=True,
        tokenize=False,
    )
    text += "The special magic number for cat mentioned in the text is"
    ids = loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    out = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False
    )
    assert "8090293" in loaded.tokenizer.decode(out[0, ids.shape[1] :])

"""Into memory: the four families, end-of-sequence ids, refusals, random weights, sizes."""

import json

import pytest
import torch

from xsparse.models import ModelError, check_supported, load, load_tokenizer, shape

from . import tiny

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def changes_of(family):
    return {"sliding_window": None} if family == "mistral" else {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_families_load_and_are_counted(family, tied, tmp_path):
    saved = tiny.write_model(tmp_path, family, tie_word_embeddings=tied, **changes_of(family))
    node = tiny.Node(id=str(tmp_path))
    loaded = load(node, dtype=torch.float32, device="cpu")
    ids = torch.tensor([[1, 40, 50, 60]])
    torch.testing.assert_close(loaded.model(ids).logits, saved(ids).logits, rtol=0, atol=0)
    sizes = shape(node)
    assert sizes.params == saved.num_parameters()
    assert (sizes.layers, sizes.q_heads, sizes.kv_heads, sizes.head_dim) == (2, 4, 2, 32)
    assert (sizes.hidden, sizes.vocab, sizes.max_length) == (64, len(tiny.vocabulary()), 256)
    keys = saved(ids, use_cache=True).past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in keys.layers)
    assert sizes.kv_token_bytes == 2 * numbers // ids.shape[1]


def test_attention_and_mlp_biases_are_counted(tmp_path):
    saved = tiny.write_model(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    assert shape(tiny.Node(id=str(tmp_path))).params == saved.num_parameters()


def test_dtype_by_name(tmp_path):
    tiny.write_model(tmp_path)
    loaded = load(tiny.Node(id=str(tmp_path)), dtype="bfloat16", device="cpu")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


def test_every_end_of_sequence_id(tmp_path):
    tiny.write_model(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [7, 5], "bos_token_id": 1}))
    loaded = load(tiny.Node(id=str(tmp_path)), dtype="float32", device="cpu")
    assert loaded.eos_ids == [7, 5, 2]  # the tokenizer's own comes last
    path.unlink()
    loaded = load(tiny.Node(id=str(tmp_path)), dtype="float32", device="cpu")
    assert loaded.eos_ids == [2]


def test_pad_token(tmp_path):
    tiny.write_model(tmp_path)
    assert load_tokenizer(tiny.Node(id=str(tmp_path))).pad_token == "</s>"
    tiny.write_tokenizer(tmp_path, pad="<unk>")
    assert load_tokenizer(tiny.Node(id=str(tmp_path))).pad_token == "<unk>"


def test_absent_weights_are_not_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny.write_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tiny.Node(id=str(tmp_path)), dtype="float32", device="cpu")


REFUSED = [
    ("mistral", {"sliding_window": 4096}, "sliding_window=4096"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_attention"),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, "sliding_attention"),
    ("gemma2", {}, "sliding_attention"),
    ("gemma2", {"layer_types": ["full_attention"] * 2}, "attn_logit_softcapping=50.0"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary"),
    ("t5", {}, "encoder-decoder"),
]


@pytest.mark.parametrize(("family", "changes", "reason"), REFUSED)
def test_what_attention_cannot_do_is_refused(family, changes, reason):
    from transformers import AutoConfig

    config = AutoConfig.for_model(**tiny.fields(family, **changes))
    with pytest.raises(ValueError, match=reason) as error:
        check_supported(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 131072}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),  # of 2: none is windowed
        ("qwen3", {"use_sliding_window": False, "sliding_window": None}),
    ],
)
def test_full_attention_is_accepted(family, changes):
    from transformers import AutoConfig

    check_supported(AutoConfig.for_model(**tiny.fields(family, **changes)))


def test_a_class_without_exchangeable_attention_is_refused():
    from transformers import AutoConfig, LlamaForCausalLM

    class Fixed(LlamaForCausalLM):
        _supports_attention_backend = False

    config = AutoConfig.for_model(**tiny.fields("llama"))
    check_supported(config, LlamaForCausalLM)
    with pytest.raises(ValueError, match="Fixed has no exchangeable attention"):
        check_supported(config, Fixed)


def test_load_refuses_before_reading_weights(tmp_path):
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.fields("mistral", sliding_window=128)))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="sliding_window=128"):
        load(tiny.Node(id=str(tmp_path)), dtype="float32", device="cpu")


@pytest.fixture
def random_node(tmp_path):
    tiny.write_tokenizer(tmp_path)
    return lambda **changes: tiny.Node(
        source="random", id=str(tmp_path), config=tiny.fields("llama", **changes)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_are_seeded_and_whole(random_node, dtype):
    state = torch.random.get_rng_state()
    one = load(random_node(), dtype=dtype, device="cpu")
    torch.manual_seed(123)
    two = load(random_node(), dtype=dtype, device="cpu")
    for (name, a), (_, b) in zip(
        one.model.state_dict().items(), two.model.state_dict().items(), strict=True
    ):
        assert a.dtype == dtype
        assert torch.equal(a, b), name
    linear = one.model.model.layers[0].mlp.up_proj.weight.float()
    assert linear.std() == pytest.approx(one.model.config.initializer_range, rel=0.1)
    assert torch.isfinite(one.model(torch.tensor([[1, 2, 3]])).logits).all()
    assert not any(parameter.requires_grad for parameter in one.model.parameters())
    assert one.eos_ids == [2]
    torch.random.set_rng_state(state)
    load(random_node(), dtype=dtype, device="cpu")
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's draws go on undisturbed


def test_random_rope_is_fp32_and_as_configured(random_node):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    loaded = load(random_node(rope_parameters=rope), dtype=torch.bfloat16, device="cpu")
    frequencies = loaded.model.model.rotary_emb.inv_freq
    expected = 1.0 / 1e6 ** (torch.arange(0, 32, 2).float() / 32)
    torch.testing.assert_close(frequencies, expected)


def test_random_shape_and_vocabulary(random_node):
    assert shape(random_node()).params == sum(
        parameter.numel()
        for parameter in load(random_node(), dtype="float32", device="cpu").model.parameters()
    )
    with pytest.raises(ModelError, match="vocab_size=10: the tokenizer has"):
        load(random_node(vocab_size=10), dtype="float32", device="cpu")
    with pytest.raises(ModelError, match="hidden_size=None: need an integer"):
        shape(random_node(hidden_size=None))


def test_random_takes_the_default_wheels_tokenizer(pin):
    node = tiny.Node(source="random", config=tiny.fields("llama"))
    assert len(load_tokenizer(node)) == len(tiny.vocabulary())

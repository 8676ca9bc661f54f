"""Training on the CPU with a tiny model: gradients, packing, interruption, export."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from experiments.longcontext import checkpoint, packs
from experiments.longcontext.attention import packed, positions
from experiments.longcontext.export import Stage, export
from experiments.longcontext.lora import Lora
from experiments.longcontext.settings import ExportConfig
from experiments.longcontext.train import Trainer, learning_rate, load_base, train
from tests.models import tiny
from xsparse.models import adapter, fetch, load


@pytest.fixture
def model(base):
    node = tiny.Node(id=str(base))
    return load(node, dtype="float32", device="cpu").model


def learned_state(folder):
    """Factors of the newest checkpoint."""
    path = checkpoint.newest(folder)
    assert path is not None
    return checkpoint.load(path, "cpu")


def test_packing_equals_separate_documents(model):
    ids = torch.randint(3, 250, (1, 90), generator=torch.Generator().manual_seed(1))
    lengths = [40, 17, 33]
    with torch.no_grad():
        alone = [model(piece).logits[0] for piece in ids.split(lengths, dim=1)]
        with packed(model) as attention:
            attention.lengths = lengths
            together = model(input_ids=ids, position_ids=positions(lengths, "cpu"), use_cache=False)
    torch.testing.assert_close(together.logits[0], torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_gradients_of_the_factors_are_those_of_autograd(model):
    """Against W + scale B A as a differentiable function of A and B."""
    lora = Lora(model, rank=3, alpha=6.0, seed=0)
    draw = torch.Generator().manual_seed(2)
    for b in lora.b.values():
        b.data = torch.randn(b.shape, generator=draw) * 0.1
    base = {name: layer.weight.detach().clone() for name, layer in lora._layers.items()}
    ids = torch.randint(3, 250, (1, 30), generator=draw)

    def loss(**weights):
        logits = torch.func.functional_call(model, weights, (ids,)).logits[0, :-1]
        return F.cross_entropy(logits, ids[0, 1:])

    weights = {f"{n}.weight": base[n] + 2.0 * (lora.b[n] @ lora.a[n]) for n in base}
    expected = torch.autograd.grad(loss(**weights), lora.parameters)

    lora.merge()
    own = loss()
    own.backward()
    lora.pull_gradients()
    for parameter, gradient in zip(lora.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)
    assert all(layer.weight.grad is None for layer in lora._layers.values())
    names = {name.rpartition(".")[2] for name in lora.targets}
    assert names == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_a_new_adapter_changes_nothing(model):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    Lora(model, rank=3, alpha=6.0, seed=0).merge()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_lower_the_loss_of_a_fixed_batch(config, frame, checkpointing):
    own = config(checkpointing=checkpointing)
    batch = [packs.pack(own.recipe(), frame, 0, index) for index in range(2)]
    model = load_base(own, "cpu")
    with packed(model) as attention:
        trainer = Trainer(model, attention, own)
        rows = [trainer.step(batch, 1e-2) for _ in range(12)]
    losses = [row["loss"] for row in rows]
    assert losses[-1] < losses[0] - 0.2
    assert rows[-1]["text_loss"] < rows[0]["text_loss"]
    counted = sum(count for _, count, _, _ in rows[0]["families"].values())
    assert counted == sum(family != packs.TEXT for pack in batch for family in pack.families)


def test_losses_are_those_of_the_whole_logits(config, frame, monkeypatch):
    """Where nothing is learned no logits are made, and pieces of rows add up."""
    from experiments.longcontext import train as module

    monkeypatch.setattr(module, "LOGIT_ROWS", 100)
    own = config(text_weight=0.5)
    batch = [packs.pack(own.recipe(), frame, 1, index) for index in range(2)]
    model = load_base(own, "cpu")
    answers, texts = [], []
    with torch.no_grad():
        for pack in batch:
            start = 0
            for length, family in zip(pack.lengths, pack.families, strict=True):
                ids = torch.from_numpy(pack.ids[start : start + length]).long()
                kept = torch.from_numpy(pack.learned[start : start + length])[1:]
                losses = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
                (texts if family == packs.TEXT else answers).append(losses[kept])
                start += length
    with packed(model) as attention:
        row = Trainer(model, attention, own).step(batch, 0.0)
    assert row["loss"] == pytest.approx(torch.cat(answers).mean().item(), abs=1e-4)
    assert row["text_loss"] == pytest.approx(torch.cat(texts).mean().item(), abs=1e-4)


def test_an_interrupted_training_ends_like_one_that_was_not(config, tmp_path):
    whole, parts = config(folder=str(tmp_path / "whole")), config(folder=str(tmp_path / "parts"))
    train(whole, time.monotonic())
    for steps in (2, 1, None):
        train(replace(parts, steps=steps), time.monotonic())
    one, two = learned_state(tmp_path / "whole"), learned_state(tmp_path / "parts")
    assert one["step"] == two["step"] == 6
    for side in "ab":
        for name, matrix in one["lora"][side].items():
            assert torch.equal(matrix, two["lora"][side][name]), name
            assert side != "b" or matrix.any()
    rows = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    assert [row["step"] for row in rows[1]] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert len(list((tmp_path / "parts").glob("checkpoint-*"))) == 1


def test_a_limit_of_time_ends_with_a_checkpoint(config, tmp_path):
    path = train(config(limit_s=1.0), time.monotonic())
    assert path.name == "checkpoint-1"


def test_rows_after_the_checkpoint_are_dropped(config, tmp_path):
    own = config()
    train(replace(own, steps=2), time.monotonic())
    journal = tmp_path / "run" / "log.jsonl"
    journal.write_text(journal.read_text() + json.dumps({"step": 3, "loss": 99}) + "\n")
    train(replace(own, steps=1), time.monotonic())
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["loss"] != 99


def test_a_checkpoint_of_another_training_or_a_damaged_one_is_refused(config, tmp_path):
    train(config(steps=1), time.monotonic())
    with pytest.raises(ValueError, match="is of another training"):
        train(config(learning_rate=0.5), time.monotonic())
    part = tmp_path / "run" / "checkpoint-1" / "part-0"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match="checkpoint-1 is damaged"):
        train(config(), time.monotonic())


def test_parts_are_small(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1000)
    state = {"step": 1, "x": torch.arange(900)}
    path = checkpoint.save(tmp_path, 1, state, "me")
    sizes = [part.stat().st_size for part in path.glob("part-*")]
    assert len(sizes) > 7
    assert max(sizes) == 1000
    assert torch.equal(checkpoint.load(path, "cpu")["x"], state["x"])


def test_an_exported_adapter_is_the_trained_model(config, base, tmp_path):
    own = config()
    train(own, time.monotonic())
    written = export(
        ExportConfig(folder=own.folder, name="small", out=str(tmp_path / "out"), machine="a CPU")
    )
    path = tmp_path / "out" / "small.safetensors"
    assert written == str(path)
    assert path.stat().st_size < 100_000
    described = adapter.read(path)
    assert described.config == {"rope_theta": 2e6, "max_position_embeddings": 4096}
    assert described.base == fetch(tiny.Node(id=str(base))).weights_sha256

    node = tiny.Node(id=str(base), adapter=str(path))
    loaded = load(node, dtype="float32", device="cpu").model
    # The trainer's own model, with its factors rounded to bf16 as the file's are.
    model = load_base(config(folder=str(tmp_path / "again")), "cpu")
    lora = Lora(model, rank=own.rank, alpha=own.alpha, seed=1)
    state = learned_state(tmp_path / "run")["lora"]
    lora.load_state({side: {n: m.bfloat16() for n, m in state[side].items()} for side in "ab"})
    lora.merge()
    ids = torch.randint(3, 250, (1, 300), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        theirs, ours = loaded(ids).logits, model(ids).logits
        plain = load(replace(node, adapter=None), dtype="float32", device="cpu").model(ids).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
    assert (theirs - plain).abs().max() > 1e-3

    tiny.write_model(tmp_path / "other", rms_norm_eps=1e-3)
    with pytest.raises(ValueError, match="made for a base with"):
        fetch(replace(node, id=str(tmp_path / "other")))


def test_nothing_to_export(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint, train first"):
        export(ExportConfig(folder=str(tmp_path), name="x", out=str(tmp_path), machine="a CPU"))


def test_the_learning_rate_warms_up_and_falls(config):
    own = config(learning_rate=1.0, warmup_steps=10, final_share=0.1)
    rates = [learning_rate(own, step, 110) for step in range(110)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))


@pytest.fixture
def stages(config, tmp_path):
    """A training and a second that goes on from its adapter, and where its file is."""
    first = config()
    train(first, time.monotonic())
    export(ExportConfig(folder=first.folder, name="one", out=str(tmp_path), machine="a CPU"))
    path = str(tmp_path / "one.safetensors")
    node = replace(first.model, adapter=path)
    return first, config(model=node, folder=str(tmp_path / "two"), seed=5, steps=1), path


def test_a_second_stage_begins_with_the_first_ones_adapter(stages, frame):
    _, second, path = stages
    model = load_base(second, "cpu")
    with packed(model) as attention:
        trainer = Trainer(model, attention, second)
        trainer.begin_from(path)
        trainer.lora.merge()
        ids = torch.randint(3, 250, (1, 200), generator=torch.Generator().manual_seed(4))
        attention.lengths = [200]
        with torch.no_grad():
            ours = model(ids, position_ids=positions([200], "cpu"), use_cache=False).logits
            theirs = load(second.model, dtype="float32", device="cpu").model(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_an_adapter_tells_of_every_stage_it_went_through(stages, tmp_path):
    first, second, path = stages
    train(second, time.monotonic())
    train(second, time.monotonic())  # goes on from its own checkpoint
    export(ExportConfig(folder=second.folder, name="both", out=str(tmp_path), machine="a GPU"))
    one, both = adapter.read(Path(path)), adapter.read(tmp_path / "both.safetensors")
    assert both.stages[:1] == one.stages
    assert both.recipe == "+".join(stage["recipe"] for stage in both.stages)
    stored = [Stage.of(stage) for stage in both.stages]
    assert [stage.config for stage in stored] == [first, second]
    assert [stage.steps for stage in stored] == [6, 2]
    assert [stage.machine for stage in stored] == ["a CPU", "a GPU"]
    rows = [json.loads(r) for r in (Path(first.folder) / "log.jsonl").read_text().splitlines()]
    assert stored[0].seconds == pytest.approx(sum(row["step_s"] for row in rows), abs=0.06)


@pytest.mark.parametrize("change", [{"rank": 8}, {"alpha": 1.0}, {"rope_theta": 1e4}])
def test_an_adapter_of_another_shape_is_no_beginning(stages, change):
    _, second, path = stages
    with pytest.raises(ValueError, match=f"{next(iter(change))}=.*allows .* alone"):
        train(replace(second, **change), time.monotonic())


def test_an_adapter_without_a_record_is_no_beginning(stages):
    _, second, path = stages
    found = adapter.read(Path(path))
    factors = adapter.read_factors(Path(path), found, "cpu")
    pairs = {name: (factors["a"][name], factors["b"][name]) for name in found.targets}
    adapter.write(Path(path), replace(found, stages=[]), pairs)
    with pytest.raises(ValueError, match="does not say how it was trained"):
        train(second, time.monotonic())


def test_an_adapter_of_some_layers_is_no_beginning(stages):
    _, second, path = stages
    found = adapter.read(Path(path))
    factors = adapter.read_factors(Path(path), found, "cpu")
    fewer = replace(found, targets=found.targets[1:])
    pairs = {name: (factors["a"][name], factors["b"][name]) for name in fewer.targets}
    adapter.write(Path(path), fewer, pairs)
    with pytest.raises(ValueError, match=f"{found.targets[0]} is not in both"):
        train(second, time.monotonic())


def test_a_recipe_names_the_source_that_made_its_data(config, tmp_path, monkeypatch):
    """Not the source at the time of the export; and with another nothing goes on."""
    from experiments.longcontext import identity

    own = config(steps=1)
    train(own, time.monotonic())
    before = identity.data_source()
    monkeypatch.setattr(identity, "_DATA_SOURCE", ("lora.py",))
    assert identity.data_source() != before
    export(ExportConfig(folder=own.folder, name="x", out=str(tmp_path), machine="a CPU"))
    assert adapter.read(tmp_path / "x.safetensors").recipe.split("-")[1] == before
    with pytest.raises(ValueError, match=f"of another training \\(data {before}"):
        train(own, time.monotonic())

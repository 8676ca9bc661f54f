"""What users of similar tools have reported as broken, tried here: each test is one such report.

Reports on one part are tested beside that part; these run across parts or through the command
line.
"""

import json
import os
import signal
import statistics
import subprocess
import time

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

import xsparse
from tests.cli.conftest import command, environment, run, small, tiny_folder  # noqa: F401
from tests.families import prompt, tiny
from tests.ops.cases import Case, make
from tests.selectors.views import site
from tests.test_tracking import recorded
from xsparse import cli, store, sweep
from xsparse.config import ConfigError, register
from xsparse.selectors import TensorKeys, build

DENSE_LENGTHS = (1, 7, 127, 128, 129, 256)


def test_two_chunks_of_2048_score_as_one_of_4096():
    case = Case(4096, q_heads=2, content="structured")
    q, k, _ = make(case)
    whole = build("xattention").select(q, TensorKeys(k), site(case))
    assert whole.scores is not None
    for start in (0, 2048):
        piece = slice(start, start + 2048)
        keys = TensorKeys(k[:, : piece.stop])
        part = build("xattention").select(q[:, piece], keys, site(case, q_start=start))
        assert part.scores is not None
        rows = slice(start // 128, piece.stop // 128)
        want = whole.scores[:, rows, : piece.stop // 128]
        torch.testing.assert_close(part.scores, want, atol=1e-5, rtol=0)


def test_kept_mass_of_a_16k_prompt_reaches_the_threshold_and_no_block_too_many():
    case = Case(16384, q_heads=1, content="structured")
    q, k, _ = make(case)
    selection = build("xattention", threshold=0.9).select(q, TensorKeys(k), site(case))
    assert selection.scores is not None
    [mask], [scores] = selection.mask, selection.scores.double()
    kept = (scores * mask).sum(-1)
    need = 0.9 * scores.sum(-1)
    assert (kept >= need - 1e-4).all()
    optional = mask.clone()
    optional[:, 0] = False
    optional.fill_diagonal_(False)
    least = scores.masked_fill(~optional, torch.inf).amin(-1)
    assert (kept - least < need + 1e-4).all()  # without the least of them it would not do
    assert mask.sum() < 0.9 * mask.tril().numel() / 2


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("length", [*DENSE_LENGTHS, 1023])
def test_short_prompts_with_the_usual_block_size(length, offload):
    """Up to two blocks there is nothing to select; nothing crashes behind that."""
    model, ids = tiny("llama"), prompt(length)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with torch.inference_mode():
        want, want_new = model(input_ids=ids).logits, model.generate(ids, **options)
    with (
        torch.inference_mode(),
        xsparse.attach(model, threshold=0.5, offload=offload, chunk_size=256) as stats,
    ):
        got = model(input_ids=ids).logits
        density = stats.mask_density
        new = model.generate(ids, **options)
    assert torch.isfinite(got).all()
    if length in DENSE_LENGTHS:
        assert density == 1
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        assert torch.equal(new, want_new)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_any_head_dimension_uses_its_own_scale(head_dim):
    model, ids = tiny("qwen3", head_dim=head_dim), prompt(200)
    with torch.inference_mode():
        want = model(input_ids=ids).logits
        for offload in (False, True):
            with xsparse.attach(
                model, threshold=1.0, offload=offload, block_size=32, chunk_size=64
            ):
                got = model(input_ids=ids).logits
            torch.testing.assert_close(got, want, atol=2e-4, rtol=0)


# The command line


def read_rows(results, run_id):
    return json.loads((results / "runs" / run_id / "rows.json").read_text())


def only_sweep(results):
    [folder] = (results / "sweeps").iterdir()
    return folder, json.loads((folder / "index.json").read_text())["points"]


def test_a_job_that_raises_does_not_end_as_a_success_of_wandb(run, small, tmp_path):  # noqa: F811
    """One offline run per job, each with an id, an exit code and a summary of its own."""
    words = [w for w in small if not w.startswith("tracker")]
    done = run(
        "-m", "engine=offload", "engine.host_memory_gb=0.0000001,8", "tracker=offline", *words
    )
    assert done.code == 3, done.err
    folder, points = only_sweep(tmp_path / "results")
    failed, good = recorded(tmp_path / "results")
    assert [failed.exit_code, good.exit_code] == [1, 0]
    assert failed.run.run_id != good.run.run_id
    assert failed.run.run_group == good.run.run_group == folder.name
    assert good.config["run_id"] == points[1]["run_id"]
    assert good.config["threshold"] == 0.9
    [mean] = [
        r for r in read_rows(tmp_path / "results", points[1]["run_id"]) if r["task"] == "mean"
    ]
    assert good.summary["accuracy"] == mean["accuracy"]


def test_a_folder_may_hold_an_equals_sign_and_overrides_a_list(run, small, tmp_path):  # noqa: F811
    words = [w for w in small if not w.startswith("length")]
    arguments = ["-m", "threshold=0.5,0.9", "length=[1024,1100]", "results=out=1 b", *words]
    first = run(*arguments)
    assert first.code == 0, first.err
    folder, points = only_sweep(tmp_path / "out=1 b")
    assert [p["state"] for p in points] == ["done", "done"]
    for threshold, point in zip((0.5, 0.9), points, strict=True):
        rows = read_rows(tmp_path / "out=1 b", point["run_id"])
        assert {(r["length"], r["threshold"]) for r in rows} == {
            (1024, threshold),
            (1100, threshold),
        }
    table = (folder / "report" / "results.csv").read_text()
    assert all(point["run_id"] in table for point in points)

    again = run(*arguments)
    assert again.code == 0
    assert again.err.count("skipped") == 2


def test_the_cost_of_selection_is_inside_the_time_that_is_compared(run, small, tmp_path):  # noqa: F811
    """With offload and on short prompts sparse attention is slower, and the row says so."""
    done = run(*small, "engine=offload", "samples=3", "threshold=0.5")
    assert done.code == 0, done.err
    _, [point] = only_sweep(tmp_path / "results")
    row = read_rows(tmp_path / "results", point["run_id"])[0]

    def samples(run_id):
        text = (tmp_path / "results" / "runs" / run_id / "samples.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    sparse, dense = samples(point["run_id"]), samples(row["dense_run_id"])
    assert len(sparse) == len(dense) == row["n"] == 3  # the warm-up is none of them
    assert row["warmup_tokens"] == 256
    for sample, base in zip(sparse, dense, strict=True):
        assert sample["prompt_hash"] == base["prompt_hash"]
        assert 0.95 * 1024 <= sample["prompt_tokens"] + 128 <= 1024  # with room for an answer
        stages = sample["stages_s"]
        assert stages["estimate"] > 0
        assert sum(stages.values()) <= sample["prefill_s"] <= sample["ttft_s"]
    time_s = [statistics.median(s["prefill_s"] for s in part) for part in (dense, sparse)]
    assert row["prefill_speedup"] == pytest.approx(time_s[0] / time_s[1])
    assert row["ops_backend"] == "torch"  # what ran, not what was asked for
    assert row["device"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit"])
def test_a_killed_job_counts_as_failed_and_the_same_command_resumes(
    launcher,
    run,  # noqa: F811
    small,  # noqa: F811
    tmp_path,
):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher")
    words = [*small, "samples=30", "threshold=0.3,0.5,0.9", "-m"]
    words += {
        "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        "submitit": ["hydra/launcher=submitit_local"],
    }[launcher]
    process = subprocess.Popen(
        command(*words), cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL
    )
    started = None
    deadline = time.monotonic() + 120
    while not started and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        for file in tmp_path.glob("results/sweeps/*/points/00001.json"):
            point = json.loads(file.read_text())
            samples = tmp_path / "results" / "runs" / str(point["run_id"]) / "samples.jsonl"
            if point["state"] == "running" and samples.exists() and samples.stat().st_size:
                started = point
    assert started
    os.kill(started["pid"], signal.SIGKILL)
    process.wait(120)
    assert process.returncode == 3
    _, points = only_sweep(tmp_path / "results")
    assert len(points) == 3
    assert points[1]["state"] == "interrupted"
    assert all(p["state"] == "done" or p["error"] for p in points)
    if launcher == "submitit":  # every job has a process of its own
        assert points[0]["state"] == points[2]["state"] == "done"
    have = sum(
        file.read_bytes().count(b"\n") for file in tmp_path.glob("results/runs/*/samples.jsonl")
    )
    again = run(*words)
    assert again.code == 0
    after = sum(
        file.read_bytes().count(b"\n") for file in tmp_path.glob("results/runs/*/samples.jsonl")
    )
    assert have < after == 4 * 30  # one baseline, three points, nothing twice


def test_points_that_never_started_are_listed_as_failures(tmp_path, capsys):
    folder = store.SweepFolder.create(tmp_path, "run.py -m")
    for number, threshold in enumerate((0.1, 0.2)):
        folder.add_point(number, [f"threshold={threshold}"])
    folder.set_point(0, "running", run_id="abc")
    gone = json.loads((folder.path / "points" / "00000.json").read_text())
    gone["process_start"] = "another process"
    (folder.path / "points" / "00000.json").write_text(json.dumps(gone))
    assert sweep.finish(folder) == sweep.FAILED
    shown = capsys.readouterr().out
    assert "threshold=0.1" in shown
    assert "killed" in shown
    assert "threshold=0.2" in shown
    assert "never started" in shown
    index = json.loads((folder.path / "index.json").read_text())
    assert [p["state"] for p in index["points"]] == ["interrupted", "pending"]
    assert all(p["error"] for p in index["points"])


def test_every_point_is_announced_before_the_first_one_runs(tmp_path):
    register()
    overrides = ["threshold=0.5,0.9", f"hydra.sweep.dir={tmp_path}/sweeps/x", "hydra.mode=MULTIRUN"]
    with initialize_config_dir(str(cli.CONF), version_base="1.3"):
        node = compose("config", overrides=[*overrides[1:]], return_hydra_config=True)
    node.hydra.overrides.task = overrides[:1]
    sweep.Announce().on_multirun_start(node)
    points = store.SweepFolder(tmp_path / "sweeps" / "x").points()
    assert [(p["overrides"], p["state"]) for p in points] == [
        (["threshold=0.5"], "pending"),
        (["threshold=0.9"], "pending"),
    ]


def test_a_plugin_that_is_missing_is_named():
    register()
    with pytest.raises(HydraException) as caught:
        cli.compose(["hydra/launcher=no_such"])
    assert cli.one_line(caught.value).startswith("hydra/launcher=no_such: no Hydra plugin")


def test_the_slurm_launcher_composes():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    register()
    with initialize_config_dir(str(cli.CONF), version_base="1.3"):
        node = compose("config", overrides=["hydra/launcher=slurm"], return_hydra_config=True)
    launcher = node.hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert launcher.gpus_per_node == 1


def test_an_interval_is_left_to_the_sweeper_that_draws_from_it():
    cli.check_types(["threshold=interval(0.5,0.99)", "stride=choice(4,8)"])
    with pytest.raises(ConfigError, match="threshold=x"):
        cli.check_types(["threshold=choice(0.5,x)"])


def test_objectives_are_the_means_over_lengths():
    rows = [
        {"task": "mean", "accuracy": 0.5, "mask_density": 0.25},
        {"task": "mean", "accuracy": 1.0, "mask_density": 0.75},
        {"task": "vt", "accuracy": 0.0, "mask_density": 0.0},
    ]
    outcome = sweep.Outcome(plan=None, rows=rows, samples=[], computed=0)  # type: ignore[arg-type]
    assert sweep._objectives(outcome) == (0.75, 0.5)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("results=a=b", "results='a=b'"),
        ("threshold=@a=1.json,@b=2.json", "threshold='@a=1.json','@b=2.json'"),
        ("results='a=b'", "results='a=b'"),
        ("threshold=choice(0.5,0.9)", "threshold=choice(0.5,0.9)"),
        ("threshold=0.5,0.9", "threshold=0.5,0.9"),
        ("length=[1024,2048]", "length=[1024,2048]"),
    ],
)
def test_values_that_the_grammar_cannot_take_are_quoted(given, meant):
    assert cli.quote(given) == meant


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("model=org/name", ["model=hub", "model.id=org/name"]),
        ("model=org/a,org/b", ["model=hub", "model.id=org/a,org/b"]),
        ("model=smollm2-135m", ["model=smollm2-135m"]),
        ("model=no_such", ["model=no_such"]),
    ],
)
def test_a_model_is_named_as_on_the_hub(given, meant):
    assert cli.name_model(given) == meant


def test_a_key_of_all_methods_is_not_one_of_the_selector():
    register()
    with pytest.raises(Exception, match=r"selector\.stride=4: allowed is stride=4"):
        cli.compose(["+selector.stride=4"])


def test_a_stored_configuration_is_the_run_again(run, small, tmp_path, monkeypatch):  # noqa: F811
    """Same identity, same prompts, same answers, same counts."""
    from omegaconf import OmegaConf

    from xsparse import plan
    from xsparse.config import Config, from_hydra

    done = run(*small, "threshold=0.7", "decode_selector=minmax", "engine=offload")
    assert done.code == 0, done.err
    _, [point] = only_sweep(tmp_path / "results")
    folder = tmp_path / "results" / "runs" / point["run_id"]
    for name, value in environment().items():
        monkeypatch.setenv(name, value)  # threads are part of what identifies a run
    stored = OmegaConf.load(folder / "config.yaml")
    config = from_hydra(OmegaConf.merge(OmegaConf.structured(Config), stored))
    config.results = str(tmp_path / "results")
    assert plan.make(config).run_id == point["run_id"]
    assert plan.make(config).complete
    before = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    forced = run(*small, "threshold=0.7", "decode_selector=minmax", "engine=offload", "force=true")
    assert forced.code == 0, forced.err
    after = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for key in ("prompt_hash", "prediction", "score", "counters", "new_tokens"):
        assert [s[key] for s in before] == [s[key] for s in after]

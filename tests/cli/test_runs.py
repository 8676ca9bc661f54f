"""Points and sweeps through the real command line."""

import json
import os
import signal
import subprocess
import time

import pytest

from tests.cli.conftest import command, environment


def sweeps(tmp_path):
    return sorted((tmp_path / "results" / "sweeps").iterdir())


def index(sweep):
    return json.loads((sweep / "index.json").read_text())


def rows(tmp_path, run_id):
    return json.loads((tmp_path / "results" / "runs" / run_id / "rows.json").read_text())


def test_one_point_makes_a_row_a_table_and_a_report(run, small, tmp_path):
    done = run(*small, "threshold=0.5")
    assert done.code == 0, done.err
    [sweep] = sweeps(tmp_path)
    [point] = index(sweep)["points"]
    assert point["state"] == "done"
    task_row, mean_row = rows(tmp_path, point["run_id"])
    assert task_row["task"] == "niah_single_1"
    assert mean_row["task"] == "mean"
    assert task_row["n"] == 2
    assert 0 < task_row["mask_density"] < 1
    assert task_row["dense_kernel"] == "cpu-flash"
    assert task_row["prefill_speedup"] > 0
    assert task_row["device"]
    assert task_row["dense_run_id"] != point["run_id"]
    assert (sweep / "report" / "report.html").is_file()
    assert "niah_single_1" in done.out
    assert "report.html" in done.out


def test_a_finished_sweep_is_skipped_and_says_so(run, small, tmp_path):
    first = run(*small, "threshold=0.5,0.9", "-m")
    assert first.code == 0, first.err
    again = run("threshold=0.5,0.9", *small, "-m", "hydra.sweep.subdir=${hydra.job.num}")
    assert again.code == 0, again.err
    assert again.err.count("skipped") == 2
    one, two = sweeps(tmp_path)
    assert [p["run_id"] for p in index(one)["points"]] == [
        p["run_id"] for p in index(two)["points"]
    ]
    dense = {rows(tmp_path, p["run_id"])[0]["dense_run_id"] for p in index(one)["points"]}
    assert len(dense) == 1  # one baseline for both


def test_more_samples_extend_a_run_and_force_recomputes(run, small, tmp_path):
    run(*small)
    [sweep] = sweeps(tmp_path)
    run_id = index(sweep)["points"][0]["run_id"]
    samples = tmp_path / "results" / "runs" / run_id / "samples.jsonl"
    before = samples.read_text()
    more = run(*small, "samples=3")
    assert "2 prompts computed" in more.err  # one dense, one sparse
    assert samples.read_text().startswith(before)
    assert rows(tmp_path, run_id)[0]["n"] == 3
    forced = run(*small, "samples=3", "force=true")
    assert "6 prompts computed" in forced.err
    again = [json.loads(line) for line in samples.read_text().splitlines()]
    for old, new in zip(before.splitlines(), again, strict=False):
        old = json.loads(old)
        assert (old["prompt_hash"], old["prediction"]) == (new["prompt_hash"], new["prediction"])


def test_keys_without_effect_are_named_once(run, small):
    done = run(*small, "samples=1", "ring_slots=8", "decode_budget_tokens=512")
    assert done.code == 0, done.err
    [line] = [line for line in done.err.splitlines() if line.startswith("WARNING")]
    assert "ring_slots, decode_budget_tokens" in line
    assert "chunk_size" not in line


def test_threshold_one_equals_dense(run, small, tmp_path):
    done = run(*small, "threshold=1.0")
    assert done.code == 0, done.err
    row = rows(tmp_path, index(sweeps(tmp_path)[0])["points"][0]["run_id"])[0]
    assert row["mask_density"] == 1
    assert row["delta"] == 0
    assert row["p_value"] == 1


def test_failing_points_do_not_stop_the_others(run, small, tmp_path):
    done = run("-m", "threshold=0.7,7,0.9", *small)
    assert done.code == 3
    [sweep] = sweeps(tmp_path)
    states = [p["state"] for p in index(sweep)["points"]]
    assert states == ["done", "failed", "done"]
    assert "threshold=7" in done.out
    assert (sweep / "report" / "report.html").is_file()
    log = (sweep / "jobs" / "1" / "xsparse.log").read_text()
    assert "Traceback" in log


def test_a_job_that_raises_is_kept_with_its_traceback(run, small, tmp_path):
    done = run("-m", "engine.host_memory_gb=0.0000001,8", "engine=offload", *small)
    assert done.code == 3
    [sweep] = sweeps(tmp_path)
    first, second = index(sweep)["points"]
    assert first["state"] == "failed"
    assert "GB" in first["error"]
    assert second["state"] == "done"


def test_an_interrupt_is_noted_and_the_run_goes_on_later(run, small, tmp_path):
    words = command(*small, "samples=40")
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(p.stat().st_size for p in tmp_path.glob("results/runs/*/samples.jsonl")):
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    [sweep] = sweeps(tmp_path)
    assert index(sweep)["points"][0]["state"] == "interrupted"
    [run_folder] = tmp_path.glob("results/runs/*/samples.jsonl")
    kept = run_folder.read_text().splitlines()
    status = json.loads((run_folder.parent / "status.json").read_text())
    assert status["state"] == "interrupted"
    done = run(*small, "samples=40")
    assert done.code == 0
    assert run_folder.read_text().splitlines()[: len(kept)] == kept
    assert f"{80 - len(kept)} prompts computed" in done.err


def test_a_kill_loses_at_most_the_sample_in_flight(run, small, tmp_path):
    process = subprocess.Popen(
        command(*small, "samples=40"), cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        lines = [p.read_text() for p in tmp_path.glob("results/runs/*/samples.jsonl")]
        if lines and lines[0].count("\n") >= 3:
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = run(*small, "samples=40")
    assert done.code == 0
    [computed] = [int(w) for w in done.err.split() if w.isdigit()][-1:]
    assert computed <= 77


def test_dry_run_computes_nothing(run, small, tmp_path):
    done = run("-m", "threshold=0.5,0.9", "dry_run=true", *small)
    assert done.code == 0, done.err
    assert "threshold=0.5" in done.out
    assert "threshold=0.9" in done.out
    assert not (tmp_path / "results").exists()


def test_the_report_command_makes_it_again(run, small, tmp_path):
    run(*small)
    [sweep] = sweeps(tmp_path)
    page = sweep / "report" / "report.html"
    page.unlink()
    done = run(str(sweep), module="xsparse.report", PYTHONPATH=os.fspath(ROOT_OF_PROJECT))
    assert done.code == 0, done.err
    assert page.is_file()


@pytest.mark.parametrize(
    ("transfer", "digest", "estimation", "most"),
    [("gather", "resident_k", 0.0, 0.5), ("ring", "streamed", 1.0, 1.0)],
)
def test_bytes_against_those_of_all_history(
    run, small, tmp_path, transfer, digest, estimation, most
):
    """K stays on the device for the baseline too, so the ratio of times is due to selection."""
    words = ["engine=offload", f"transfer={transfer}", f"digest={digest}", "threshold=0.5"]
    done = run(*small, *words)
    assert done.code == 0, done.err
    row = rows(tmp_path, index(sweeps(tmp_path)[0])["points"][0]["run_id"])[0]
    assert row["digest"] == digest
    assert "moved" in done.out
    assert ("warning: More bytes were moved" in done.out) == (row["transfer_ratio"] > 1)
    assert estimation < row["transfer_ratio"] <= estimation + most
    assert rows(tmp_path, row["dense_run_id"])[0]["transfer_ratio"] == most


ROOT_OF_PROJECT = command()[1].rsplit("/", 1)[0]

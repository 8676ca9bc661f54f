"""`python -m xsparse.store`: list, show, remove."""

import subprocess
import sys
from pathlib import Path

import pytest

from xsparse.store import RunFolder, lock
from xsparse.store.__main__ import main


@pytest.fixture
def results(tmp_path: Path) -> Path:
    def run(run_id: str, selector: str) -> RunFolder:
        config = {"model": {"name": "org/[model]"}, "selector": selector, "task": "ruler"}
        return RunFolder.open(tmp_path, run_id, config, {"host": "node1"})

    row = {"task": "vt", "length": 4096, "n": 1, "model": "org/[model]", "accuracy": 0.5}
    dense = run("d00000000001", "dense")
    dense.append({"task": "vt", "length": 4096, "index": 0})
    dense.finish([{**row, "selector": "dense"}])
    sparse = run("a00000000002", "xattention")
    row |= {"selector": "xattention", "threshold": 0.9, "dense_run_id": "d00000000001"}
    sparse.finish([row, {**row, "task": "mean"}])
    run("a00000000003", "xattention").fail(RuntimeError("boom [red]"))
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], results: Path, *arguments: str):
    code = main([*arguments, "--results", str(results)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def runs(results: Path) -> set[str]:
    return {path.name for path in (results / "runs").iterdir() if path.name[0] != "."}


def test_list(results: Path, capsys):
    code, out, _ = call(capsys, results, "list")
    assert code == 0
    lines = {line.split()[0]: line.split() for line in out.splitlines()}
    assert lines["run_id"][1:] == [
        "when",
        "state",
        "model",
        "selector",
        "threshold",
        "tasks",
        "lengths",
        "n",
    ]
    assert lines["d00000000001"][3:] == ["done", "org/[model]", "dense", "vt", "4096", "1"]
    assert lines["a00000000002"][5:] == ["xattention", "0.9", "vt", "4096", "0"]
    assert lines["a00000000003"][3:] == ["failed", "org/[model]", "xattention", "ruler", "0"]


def test_list_shows_the_rest_when_one_is_damaged(results: Path, capsys):
    (results / "runs/a00000000002/rows.json").write_text("{")
    code, out, _ = call(capsys, results, "list")
    assert code == 0
    assert "unreadable" in out
    assert "d00000000001" in out


def test_list_of_nothing(tmp_path: Path, capsys):
    code, out, _ = call(capsys, tmp_path / "absent", "list")
    assert code == 0
    assert "no runs" in out


def test_show(results: Path, capsys):
    code, out, _ = call(capsys, results, "show", "d")
    assert code == 0
    for expected in ("d00000000001: done, 1 samples", "name: org/[model]", '"node1"', "4096"):
        assert expected in out
    assert "boom [red]" in call(capsys, results, "show", "a00000000003")[1]


@pytest.mark.parametrize("wrong", ["zzz", "a", "../runs", ""])
@pytest.mark.parametrize("command", ["show", "remove"])
def test_bad_ids(results: Path, capsys, command: str, wrong: str):
    code, out, err = call(capsys, results, command, wrong)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert len(runs(results)) == 3


@pytest.mark.parametrize(("answer", "left"), [("y", 2), ("n", 3), ("", 3)])
def test_remove_asks(results: Path, capsys, monkeypatch, answer: str, left: int):
    monkeypatch.setattr("builtins.input", lambda prompt: answer)
    code, _, _ = call(capsys, results, "remove", "a00000000003")
    assert code == 0
    assert len(runs(results)) == left


def test_remove_without_anybody_to_ask(results: Path):
    command = [sys.executable, "-m", "xsparse.store", "remove", "d", "--results", str(results)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert len(runs(results)) == 3


def test_remove_names_those_who_need_a_baseline(results: Path, capsys):
    code, out, _ = call(capsys, results, "remove", "d", "--yes")
    assert code == 0
    assert "d00000000001 is the dense baseline of a00000000002" in out
    assert runs(results) == {"a00000000002", "a00000000003"}


def test_remove_of_both_is_nothing_to_mention(results: Path, capsys):
    _, out, _ = call(capsys, results, "remove", "d", "a00000000002", "--yes")
    assert "baseline" not in out
    assert runs(results) == {"a00000000003"}


def test_remove_by_state(results: Path, capsys):
    assert call(capsys, results, "remove", "--state", "failed", "--yes")[0] == 0
    assert runs(results) == {"d00000000001", "a00000000002"}
    code, out, _ = call(capsys, results, "remove", "--state", "failed", "--yes")
    assert (code, "no run is failed" in out) == (0, True)
    assert call(capsys, results, "remove")[0] == 2


def test_remove_refuses_a_locked_run(results: Path, capsys):
    with lock(results, "d00000000001"):
        command = [sys.executable, "-m", "xsparse.store", "remove", "d", "a00000000002", "--yes"]
        done = subprocess.run([*command, "--results", str(results)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "d00000000001 is held" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert len(runs(results)) == 3


def test_remove_refuses_a_running_run(results: Path, capsys):
    RunFolder.open(results, "e1", {}, {})
    code, _, err = call(capsys, results, "remove", "e1", "--yes")
    assert code == 2
    assert "e1 is running" in err

"""The W&B mirror, read back from its own files; and that it can neither stop nor stall a run."""

import json
import logging
import os
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from xsparse import tracking
from xsparse.config import TrackerConfig

CONF = Path(__file__).parents[1] / "conf" / "tracker"


# A reader of .wandb files: a log of protobuf records in blocks of 32 KiB, as LevelDB frames it.


def frames(data: bytes) -> Iterator[bytes]:
    """Whole records; one that does not fit into its block is continued in the next."""
    block, header, at = 1 << 15, 7, 7  # the file starts with a header of 7 bytes
    record = b""
    while at + header <= len(data):
        room = block - at % block
        size, kind = struct.unpack_from("<HB", data, at + 4)  # after the checksum
        if room < header or kind == 0:
            at += room
            continue
        record += data[at + header : at + header + size]
        at += header + size
        if kind in (1, 4):  # full, or the last part
            yield record
            record = b""


class Recorded:
    """What an offline run folder holds."""

    def __init__(self, folder: Path):
        from wandb.proto.wandb_internal_pb2 import Record

        [file] = folder.glob("run-*.wandb")
        data = file.read_bytes()
        assert data.startswith(b":W&B")
        self.folder = folder
        self.history: list[dict] = []
        self.summary: dict = {}
        self.config: dict = {}
        self.metrics: dict = {}
        self.exit_code: int | None = None
        for frame in frames(data):
            record = Record()
            record.ParseFromString(frame)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
                self.config |= self.items(record.run.config.update)
            elif kind == "history":
                self.history.append(self.items(record.history.item))
            elif kind == "summary":
                self.summary |= self.items(record.summary.update)
            elif kind == "metric":
                metric = record.metric
                self.metrics[metric.name or metric.glob_name] = metric.step_metric
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    @staticmethod
    def items(items) -> dict:
        return {
            item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items
        }


def recorded(out_dir: Path, finished: bool = True) -> list[Recorded]:
    """The offline runs below `out_dir`, once their end is written.

    wandb's service may write the last records some milliseconds after `finish` has returned.
    """
    deadline = time.monotonic() + 10
    while True:
        runs = [Recorded(folder) for folder in sorted((out_dir / "wandb").glob("offline-run-*"))]
        ended = all(run.exit_code is not None for run in runs)
        if ended or not finished or time.monotonic() > deadline:
            return runs
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever account the developer has is out of sight."""
    for name in ("API_KEY", "MODE", "BASE_URL", "IDENTITY_TOKEN_FILE", "DIR"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))


def start(mode: str, out_dir: Path, **changes):
    about = {
        "run_id": "abc123",
        "group": "20260101-000000",
        "name": "+threshold=0.9,stride=8",
        "job_type": "ruler",
        "tags": ["xattention", "smollm2"],
        "config": {"threshold": 0.9, "selector": {"name": "xattention"}},
        "out_dir": out_dir,
    }
    return tracking.start(TrackerConfig(name=mode), **(about | changes))


def row(task: str, length: int, accuracy: float, **more) -> dict:
    return {
        "task": task,
        "length": length,
        "n": 2,
        "accuracy": accuracy,
        "delta": accuracy - 1,
        "mask_density": length / 10000,
        "page_density": None,
        "executed_density": 0.5,
        "prefill_tok_s": 1000.0,
        "prefill_speedup": float("nan"),
        **more,
    }


ROWS = [
    row("vt", 4096, 0.5),
    row("cwe", 4096, 0.7),
    row("mean", 4096, 0.6, n=4),
    row("vt", 2048, 0.9),
    row("cwe", 2048, 0.7),
    row("mean", 2048, 0.8, n=4),
]
SAMPLES = [
    {
        "task": "vt",
        "length": 2048,
        "index": index,
        "prediction": "x",
        "references": ["1", "2"],
        "score": score,
        "tpot_s": None,
        "meta": {"depth": 0.25},
    }
    for index, score in enumerate((1, 0.5))
]


def test_offline_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2])
    with start("offline", tmp_path) as mirror:
        assert mirror.mode == "offline"
        mirror.length_rows(ROWS)
        mirror.samples(SAMPLES)
        mirror.image("pareto", figure)
        mirror.image("niah", lambda: figure)
        mirror.summary(ROWS)
    assert [record for record in caplog.records if record.name == tracking.__name__] == []

    [run] = recorded(tmp_path)
    assert run.exit_code == 0
    assert run.run.project == "xsparse"
    assert run.run.run_group == "20260101-000000"
    assert run.run.job_type == "ruler"
    assert list(run.run.tags) == ["xattention", "smollm2"]
    assert run.run.display_name == "threshold=0.9,stride=8"
    assert run.config["run_id"] == "abc123"
    assert run.config["threshold"] == 0.9
    assert run.config["selector"] == {"name": "xattention"}

    points = [point for point in run.history if "context_length" in point]
    assert [point["context_length"] for point in points] == [2048, 4096]
    assert [point["accuracy"] for point in points] == [0.8, 0.6]
    assert [point["mask_density_percent"] for point in points] == pytest.approx([20.48, 40.96])
    assert [point["executed_density_percent"] for point in points] == [50, 50]
    assert [point["tasks/vt/accuracy"] for point in points] == [0.9, 0.5]
    for absent in ("page_density_percent", "prefill_speedup"):
        assert absent not in points[0]
    assert run.metrics["accuracy"] == "context_length"
    assert run.metrics["tasks/*"] == "context_length"

    assert run.summary["accuracy"] == pytest.approx(0.7)
    assert run.summary["mask_density_percent"] == pytest.approx(30.72)
    assert run.summary["prefill_tok_s"] == 1000
    assert run.summary["delta"] == pytest.approx(-0.3)
    assert run.summary["n"] == 8

    [table] = run.folder.glob("files/media/table/*.json")
    content = json.loads(table.read_text())
    first = dict(zip(content["columns"], content["data"][0], strict=True))
    assert (first["task"], first["length"], first["score"]) == ("vt", 2048, 1)
    assert (first["references"], first["depth"], first["tpot_s"]) == ('["1", "2"]', 0.25, None)
    images = sorted(run.folder.glob("files/media/images/*.png"))
    assert [image.name.split("_")[0] for image in images] == ["niah", "pareto"]
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in images)


def test_long_records_span_blocks(tmp_path: Path):
    """The reader above, and so the assertions on it, hold for more than one block."""
    with start("offline", tmp_path, config={"long": "x" * 100_000}) as mirror:
        mirror.summary(ROWS)
    [run] = recorded(tmp_path)
    assert run.config["long"] == "x" * 100_000
    assert run.summary["accuracy"] == pytest.approx(0.7)


def test_runs_of_one_process_are_apart(tmp_path: Path):
    """The second raises; the third starts afresh all the same."""
    with start("offline", tmp_path, config={"point": 0}) as mirror:
        mirror.summary(ROWS)
    with pytest.raises(RuntimeError, match="boom"), start("offline", tmp_path, config={"point": 1}):
        raise RuntimeError("boom")
    with pytest.raises(KeyboardInterrupt), start("offline", tmp_path, config={"point": 2}):
        raise KeyboardInterrupt
    with start("offline", tmp_path, config={"point": 3}):
        pass
    runs = sorted(recorded(tmp_path), key=lambda run: run.config["point"])
    assert len({run.run.run_id for run in runs}) == 4
    assert [run.exit_code for run in runs] == [0, 1, 1, 0]
    assert ["accuracy" in run.summary for run in runs] == [True, False, False, False]


def test_a_run_left_open_is_not_continued(tmp_path: Path):
    left_open = start("offline", tmp_path, config={"point": 0})
    left_open.__enter__()
    with start("offline", tmp_path, config={"point": 1}) as mirror:
        mirror.summary(ROWS)
    runs = {run.config["point"]: run for run in recorded(tmp_path)}
    assert "accuracy" in runs[1].summary
    assert "accuracy" not in runs[0].summary
    left_open.__exit__(None, None, None)


def test_odd_input_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with start("offline", tmp_path, tags=["t" * 100, "", "b", "b"]) as mirror:
        mirror.image("pareto", lambda: 1 / 0)
        mirror.length_rows([{"no": "length"}])
        mirror.samples([{"task": ["odd"], "score": "text", "meta": None}])
        mirror.summary(ROWS)
    ours = [r.getMessage() for r in caplog.records if r.name == tracking.__name__]
    assert [message.split(":")[0] for message in ours] == ["W&B image", "W&B length_rows"]
    [run] = recorded(tmp_path)
    assert list(run.run.tags) == ["t" * 64, "b"]
    assert run.exit_code == 0
    assert run.summary["accuracy"] == pytest.approx(0.7)


def test_a_place_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog):
    (tmp_path / "file").write_text("")
    with start("offline", tmp_path / "file" / "results") as mirror:
        assert mirror.mode == "disabled"
        mirror.summary(ROWS)
    [message] = [r.getMessage() for r in caplog.records if r.name == tracking.__name__]
    assert "no mirror" in message


def test_a_folder_of_its_own(tmp_path: Path):
    node = TrackerConfig(name="offline", dir=str(tmp_path / "mine"))
    with tracking.start(
        node, run_id="a", group="g", name="n", job_type="j", tags=[], config={}, out_dir=tmp_path
    ):
        pass
    assert len(recorded(tmp_path / "mine")) == 1
    assert recorded(tmp_path) == []


# Which mode.


def mode_of(name: str) -> str:
    return tracking.mode_of(TrackerConfig(name=name))


def test_auto_without_a_key_is_offline():
    assert mode_of("auto") == "offline"


def test_auto_with_a_key_is_online(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert mode_of("auto") == "online"


@pytest.mark.parametrize(
    ("machine", "base_url", "mode"),
    [
        ("api.wandb.ai", None, "online"),
        ("api.forge.coreweave.com", None, "online"),
        ("github.com", None, "offline"),
        ("api.wandb.ai", "https://wandb.example.org", "offline"),
        ("wandb.example.org", "https://wandb.example.org/", "online"),
        ("localhost:8080", "http://localhost:8080", "online"),
    ],
)
def test_auto_reads_netrc(tmp_path: Path, monkeypatch, machine, base_url, mode):
    if base_url:
        monkeypatch.setenv("WANDB_BASE_URL", base_url)
    (tmp_path / "netrc").write_text(f"machine {machine}\n  login user\n  password {'0' * 40}\n")
    assert mode_of("auto") == mode


def test_auto_reads_the_settings_file(tmp_path: Path):
    settings = tmp_path / "wandb-config" / "settings"
    settings.parent.mkdir()
    settings.write_text("[default]\nbase_url = https://wandb.example.org\n")
    (tmp_path / "netrc").write_text("machine wandb.example.org login user password secret\n")
    assert mode_of("auto") == "online"


def test_a_broken_netrc_is_no_key(tmp_path: Path):
    (tmp_path / "netrc").write_text("machine\npassword what is this")
    assert mode_of("auto") == "offline"


def test_auto_follows_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode_of("auto") == "disabled"
    assert mode_of("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert mode_of("auto") == "offline"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("+threshold=0.9,++stride=8", "threshold=0.9,stride=8"),
        ("model=org/m +x=1e+5", "model=org/m x=1e+5"),
        ("n" * 300, "n" * 128),
    ],
)
def test_display_name(name: str, shown: str):
    assert tracking._display_name(name) == shown


def test_unknown_name():
    node = SimpleNamespace(name="cloud", project="p", entity=None, dir=None)
    with pytest.raises(ValueError, match="tracker='cloud': expected one of auto"):
        tracking.mode_of(node)


def test_without_wandb(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(tracking, "_installed", lambda: False)
    assert mode_of("auto") == "disabled"
    assert len(caplog.messages) == 1
    for name in ("online", "offline"):
        with pytest.raises(ValueError, match="wandb is not installed"):
            mode_of(name)
    assert mode_of("disabled") == "disabled"


def test_a_folder_named_wandb_is_not_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import importlib.machinery

    (tmp_path / "wandb").mkdir()
    found = importlib.machinery.PathFinder.find_spec("wandb", [str(tmp_path)])
    assert found is not None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    assert mode_of("auto") == "disabled"


@pytest.mark.parametrize("name", tracking.MODES)
def test_config_files(name: str):
    node = TrackerConfig(**yaml.safe_load((CONF / f"{name}.yaml").read_text()))
    assert node == TrackerConfig(name=name)


# In a process of its own: what is imported, and how long a lost network may take.

SCRIPT = """
import logging, os, sys, time
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
from xsparse import tracking
from xsparse.config import TrackerConfig
MODE, OUT = sys.argv[1:]
def start():
    return tracking.start(TrackerConfig(name=MODE), run_id="a", group="g", name="n",
                          job_type="j", tags=[], config={}, out_dir=OUT)
ROWS = [dict(task="vt", length=512, n=1, accuracy=1.0)]
"""


def script(body: str, mode: str, out: Path, **environment: str) -> subprocess.CompletedProcess:
    # Without what wandb has exported to this process: the address of its service, among others.
    inherited = {key: value for key, value in os.environ.items() if key[:6] != "WANDB_"}
    inherited["WANDB_CONFIG_DIR"] = os.environ["WANDB_CONFIG_DIR"]
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(body), mode, str(out)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


RUN_ONCE = """
    with start() as mirror:
        mirror.length_rows(ROWS)
        mirror.summary(ROWS)
    print("wandb" in sys.modules, mirror.mode)
"""


def test_disabled_imports_nothing(tmp_path: Path):
    done = script(RUN_ONCE, "disabled", tmp_path)
    assert done.stdout.split() == ["False", "disabled"]
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_finding_a_mode_imports_nothing(tmp_path: Path):
    body = "print(tracking.mode_of(TrackerConfig(name=MODE)), 'wandb' in sys.modules)"
    done = script(body, "auto", tmp_path, WANDB_API_KEY="0" * 40)
    assert done.stdout.split() == ["online", "False"]


CLOSED = "http://127.0.0.1:9"  # nothing listens on the discard port


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": CLOSED}, "cannot be reached"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://no.invalid"}, "cannot be reached"),
        ({"WANDB_API_KEY": "0" * 40, "HTTPS_PROXY": CLOSED}, "cannot be reached"),
        ({}, "no API key"),
    ],
)
def test_online_without_a_network_goes_on_offline(tmp_path: Path, environment, reason):
    began = time.monotonic()
    done = script(RUN_ONCE, "online", tmp_path, **environment)
    assert time.monotonic() - began < 15
    assert done.stdout.split() == ["True", "offline"]
    [warning] = done.stderr.splitlines()
    assert warning.startswith("WARNING W&B: ")
    assert reason in warning
    [run] = recorded(tmp_path)
    assert str(run.folder) in warning
    assert run.exit_code == 0
    assert run.summary["accuracy"] == 1.0


SERVER = """
    # A stand-in for the W&B server that takes a run and then, or from the start, falls silent.
    import json, threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    silent = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if silent.is_set():
                time.sleep(1000)
            bucket = {"id": "b", "name": body.get("variables", {}).get("name"),
                      "project": {"name": "xsparse", "entity": {"name": "me"}}}
            answer = json.dumps({"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}})
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ.update(WANDB_API_KEY="0" * 40,
                      WANDB_BASE_URL=f"http://127.0.0.1:{server.server_port}")
"""


def test_a_server_that_never_answers(tmp_path: Path):
    began = time.monotonic()
    body = SERVER + "    silent.set()\n" + RUN_ONCE
    done = script(body, "online", tmp_path)
    assert time.monotonic() - began < 15
    assert done.stdout.split() == ["True", "offline"]
    assert len(done.stderr.splitlines()) == 1
    assert len(recorded(tmp_path)) == 1


def test_a_server_lost_during_the_run(tmp_path: Path):
    """The end waits for a bounded time, and the data are still on disk."""
    body = (
        SERVER
        + """
    tracking.FINISH_TIMEOUT_S = 2.0
    with start() as mirror:
        silent.set()
        mirror.summary(ROWS)
        began = time.monotonic()
    print(mirror.mode, time.monotonic() - began < 6)
    """
    )
    done = script(body, "online", tmp_path)
    assert done.stdout.split() == ["online", "True"]
    [folder] = (tmp_path / "wandb").glob("run-*-*")
    assert Recorded(folder).summary["accuracy"] == 1.0


def test_a_dead_wandb_process_is_a_warning(tmp_path: Path):
    """Its service is killed under the run: the body goes on, and so does the next point."""
    body = """
    import psutil
    with start() as mirror:
        for child in psutil.Process().children(recursive=True):
            child.kill()
        time.sleep(0.3)
        mirror.length_rows(ROWS)
        mirror.summary(ROWS)
        print("body")
    with start() as mirror:
        mirror.summary(ROWS)
    print("next", mirror.mode)
    """
    done = script(body, "offline", tmp_path)
    assert done.stdout.split() == ["body", "next", "offline"]
    assert all(line.startswith("WARNING W&B ") for line in done.stderr.splitlines())
    summaries = [run.summary.get("accuracy") for run in recorded(tmp_path, finished=False)]
    assert sorted(summaries, key=str) == [1.0, None]


def test_the_service_of_a_parent_is_not_used(tmp_path: Path):
    service = "3-1-tcp-localhost-9"  # as a parent that used wandb leaves it in the environment
    done = script(RUN_ONCE, "offline", tmp_path, WANDB_SERVICE=service)
    assert (done.stdout.split(), done.stderr) == (["True", "offline"], "")
    assert len(recorded(tmp_path)) == 1


def test_a_killed_run_keeps_what_was_logged(tmp_path: Path):
    body = """
    import os, signal
    with start() as mirror:
        mirror.length_rows(ROWS)
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with pytest.raises(subprocess.CalledProcessError):
        script(body, "offline", tmp_path)
    [run] = recorded(tmp_path, finished=False)
    assert [point["accuracy"] for point in run.history] == [1.0]

"""Bad input: one line naming the key, the value and what is allowed; exit code 2; nothing left."""

import pytest

from tests.cli.conftest import Done


def assert_one_line(done: Done, *words: str) -> None:
    assert done.code == 2, done
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line.strip()]
    assert len(lines) == 1, done.err
    assert "Traceback" not in done.err
    for word in words:
        assert word in lines[0], done.err
    assert done.seconds < 10


CACHED = ["engine=offload", "decode_selector=minmax", "decode_budget_tokens=1024"]

BAD = [
    (["threshold=1.5"], ["threshold=1.5", "[0, 1]"]),
    (["threshold=-1"], ["threshold=-1", "[0, 1]"]),
    (["threshold=nan"], ["threshold=nan", "[0, 1]"]),
    (["threshold=abc"], ["threshold=abc", "[0, 1]"]),
    (["threshold=@no_such_file.json"], ["@no_such_file.json"]),
    (["threshold=[0.1,0.2]"], ["threshold=[0.1, 0.2]", "@file.json"]),
    (["treshold=0.9"], ["treshold", "threshold"]),
    (["stride=7"], ["stride=7", "block_size=128"]),
    (["stride=0"], ["stride=0"]),
    (["stride=x"], ["stride=x", "an integer"]),
    (["block_size_ratio=0"], ["block_size_ratio=0", ">= 1"]),
    (["chunk_size=100"], ["chunk_size=100", "block_size=128"]),
    (["samples=0"], ["samples=0", ">= 1"]),
    (["length=100"], ["length=100"]),
    (["length=[512,512]"], ["each length once"]),
    (["length=1000000"], ["length=1000000", "131072"]),
    (["selector=no_such"], ["selector=no_such", "xattention"]),
    (["+selector.depth=3"], ["depth", "xattention"]),
    (["model=no_such"], ["model=no_such", "smollm2-135m"]),
    (["task=no_such"], ["task=no_such", "niah_single_1"]),
    (["engine=offload", "digest=minmax"], ["digest=minmax", "resident_k"]),
    (["digest=minmax"], ["digest=minmax", "engine=resident"]),
    (["engine=offload", "digest=none"], ["digest=none", "streamed"]),
    (["reduce_heads=all"], ["reduce_heads=all", "vote"]),
    (["selector=random", "reduce_heads=mean_score"], ["mean_score", "random"]),
    (["ops_backend=cuda"], ["ops_backend=cuda", "triton"]),
    (["ops_backend=triton"], ["triton", "CUDA"]),
    (["device=cuda"], ["device=cuda", "cpu"]),
    (["dtype=int8"], ["dtype=int8", "bfloat16"]),
    (["ring_slots=1"], ["ring_slots=1", ">= 2"]),
    (["engine=offload", "engine.host_memory_gb=-1"], ["host_memory_gb=-1"]),
    (["decode_selector=minmax", "decode_budget_tokens=10"], ["decode_budget_tokens=10"]),
    (["device=cpu", "cuda_graph=step"], ["cuda_graph=step", "none", "cpu"]),
    (["device=cpu", "engine=offload", "cuda_graph=pair"], ["cuda_graph=pair", "none", "cpu"]),
    (["engine=offload", "engine.host_memory_gb=0.001"], ["engine.host_memory_gb=0.001", "0.0472"]),
    (CACHED + ["decode_cache_gb=0.001"], ["decode_cache_gb=0.001", ">= 0.0207"]),
    (
        CACHED + ["decode_cache_gb=1", "decode_budget_tokens=66000"],
        ["decode_budget_tokens=66000", "< 65792", "decode_cache_gb"],
    ),
    (["tracker=mlflow"], ["tracker=mlflow", "offline"]),
    (["threshold=0.8,0.9"], ["threshold", "-m"]),
    (["-m", "threshold=0.7,abc,0.9"], ["threshold=abc"]),
    (["-m", "stride=4,x"], ["stride", "x"]),
    (["threshold"], ["threshold"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=lambda a: " ".join(a))
def test_bad_input_is_one_line(run, tmp_path, arguments, words):
    done = run(*arguments)
    assert_one_line(done, *words)
    left = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert left == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["ops_backend=triton", "device=cpu"], "ops_backend=triton"),
        (["cuda_graph=step", "device=cpu"], "cuda_graph=step"),
        (["engine=offload", "engine.host_memory_gb=0.001"], "engine.host_memory_gb=0.001"),
        ([*CACHED, "decode_cache_gb=0.001"], "decode_cache_gb=0.001"),
        (["-m", "engine=offload", "engine.host_memory_gb=0.001,8"], "engine.host_memory_gb=0.001"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_a_dry_run_refuses_what_a_run_would(run, tmp_path, arguments, word):
    assert_one_line(run(*arguments, "dry_run=true"), word)
    assert list(tmp_path.iterdir()) == []


def test_help_is_quick(run):
    done = run("--help")
    assert done.code == 0
    assert "threshold" in done.out
    assert done.seconds < 4  # 2 on an idle machine; tests run beside others

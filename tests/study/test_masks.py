"""Counts of one pass against real runs of the offload engine, and the command that makes them."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from experiments.study import masks
from experiments.study.masks import RATIOS, Counts, Way, counting, reduced_by_ratio, ways
from tests.families import prompt, tiny
from tests.models.tiny import write_model
from xsparse import selectors
from xsparse.build import build
from xsparse.hf import bound, cache_argument
from xsparse.selectors import Selection
from xsparse.selectors.reduce import reduce_mask
from xsparse.settings import Settings

SMALL: dict[str, Any] = {"block_size": 16, "chunk_size": 160, "stride": 4, "threshold": 0.7}
TOKENS = 600  # the last chunk and the last block are not full, and pages cross chunks
METHODS = ("xattention", "minmax", "random")


def counted(model, settings: Settings, ids) -> Counts:
    loaded: Any = SimpleNamespace(model=model)
    plain = replace(
        settings,
        engine="resident",
        digest=None,
        transfer="ring",
        **dict.fromkeys(masks.REDUCTIONS, "any"),
    )
    with counting(loaded, plain) as count:
        return count(settings.method(), ids[0].tolist(), lambda: None)


def real_run(model, settings: Settings, ids) -> tuple[dict[str, Any], torch.Tensor]:
    """Counters of a prefill, and kept blocks [layers, q_heads]."""
    session = build(model, settings)
    kept = torch.zeros(session.engine.shape.layers, session.engine.shape.q_heads).long()
    select = session.selector.select

    def noted(q, keys, site):
        selection = select(q, keys, site)
        for head, rows in enumerate(selection.mask):
            kept[site.layer, head] += int(rows.sum())
        return selection

    session.selector.select = noted  # type: ignore[method-assign]
    session.phase = "prefill"
    with torch.inference_mode(), bound(model, session) as cache:
        for piece in ids.split(settings.chunk_size, dim=1):
            model(input_ids=piece, **{cache_argument(model): cache})
    counters = session.counters.read()
    session.engine.close()
    return counters, kept


def matches(row: dict[str, Any], counters: dict[str, Any], halves: int) -> None:
    """halves: of K and V, those that the run moved"""
    for key in ("pages_moved", "pages_history", "bytes_history", "executed", "mask_causal"):
        assert row[key] == counters[key], (key, row)
    assert row["bytes_moved"] * halves == counters["bytes_h2d"] * 2, row


@pytest.mark.parametrize("method", METHODS)
def test_counts_of_any_are_those_of_the_offload_engine(method):
    """Several layers: with `any` every ratio and transfer hands on the same."""
    model, ids = tiny("llama"), prompt(TOKENS)
    base = Settings(selector=method, engine="offload", **SMALL)
    counts = counted(model, base, ids)
    rows = [r for r in counts.traffic() if {r[key] for key in masks.REDUCTIONS} == {"any"}]
    assert len(rows) == 2 * len(RATIOS)
    digest, halves = ("none", 2) if method == "random" else ("resident_k", 1)
    for row in rows:
        way = {key: row[key] for key in ("transfer", "block_size_ratio")}
        counters, kept = real_run(model, replace(base, digest=digest, **way), ids)
        matches(row, counters, halves)
        assert counts.heads()["mask_kept"] == kept.tolist()
        assert kept.sum() == counters["mask_kept"]
        assert row["executed"] == counters["mask_kept"] < counters["mask_causal"]
    assert sum(counts.causal) * model.config.num_attention_heads == rows[0]["mask_causal"]
    assert len({row["bytes_moved"] for row in rows if row["transfer"] == "gather"}) == 1


@pytest.mark.parametrize("method", METHODS)
def test_counts_of_every_way_are_those_of_the_offload_engine(method):
    """One layer: no later masks, so nothing depends on what a reduction lost."""
    model, ids = tiny("llama", num_hidden_layers=1), prompt(TOKENS)
    base = Settings(selector=method, engine="offload", **SMALL)
    rows = counted(model, base, ids).traffic()
    digest, halves = ("none", 2) if method == "random" else ("resident_k", 1)
    lost = 0
    for row in rows[::3]:  # every way with a ratio or two
        keys = ("transfer", "block_size_ratio", *masks.REDUCTIONS)
        settings = replace(base, digest=digest, **{key: row[key] for key in keys})
        counters, _ = real_run(model, settings, ids)
        matches(row, counters, halves)
        lost += row["executed"] < counters["mask_kept"]
    assert lost >= 3


def test_masks_are_those_made_under_any():
    """Random masks know no queries, so here later layers, too, see the same under every way."""
    model, ids = tiny("llama"), prompt(TOKENS)
    base = Settings(selector="random", engine="offload", digest="none", **SMALL)
    rows = counted(model, base, ids).traffic()
    for row in rows[:: 2 * len(RATIOS) + 1]:
        keys = ("transfer", "block_size_ratio", *masks.REDUCTIONS)
        counters, _ = real_run(model, replace(base, **{key: row[key] for key in keys}), ids)
        matches(row, counters, 2)


def test_a_prompt_leaves_nothing_behind():
    settings = Settings(**SMALL)
    loaded: Any = SimpleNamespace(model=tiny("llama"))
    long, short = prompt(TOKENS)[0].tolist(), prompt(300, seed=1)[0].tolist()
    with counting(loaded, settings) as count:
        one, _, again = (count(settings.method(), ids, lambda: None) for ids in (long, short, long))
    assert again.traffic() == one.traffic()
    assert again.heads() == one.heads()


def test_bytes_are_without_what_an_estimate_streams():
    model, ids = tiny("llama"), prompt(TOKENS)
    base = Settings(engine="offload", digest="streamed", **SMALL)
    shape = build(model, replace(base, engine="resident", digest=None)).engine.shape
    for row in counted(model, base, ids).traffic()[: len(RATIOS)]:
        ratio = row["block_size_ratio"]
        counters, _ = real_run(model, replace(base, block_size_ratio=ratio), ids)
        half = replace(shape, block_size_ratio=ratio).page_bytes(1)
        assert row["bytes_moved"] == counters["bytes_h2d"] - 2 * row["pages_history"] * half


def test_each_reduction_is_varied_alone():
    scored, drawn = ways(selectors.build("minmax")), ways(selectors.build("random"))
    assert len(scored) == 7 + 5
    assert len(drawn) == 4 + 3
    assert set(drawn) <= set(scored)
    assert Way("ring", reduce_sub_blocks="mean_score") in scored
    for way in scored:
        assert [way.reduce_heads, way.reduce_queries, way.reduce_sub_blocks].count("any") >= 2
        assert way.transfer == "ring" or way.reduce_sub_blocks == "any"


@pytest.mark.parametrize("first", [0, 1, 7, 16, 37])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_sets_by_ratio_are_those_of_reduce_mask(first, kv_heads):
    generator = torch.Generator().manual_seed(first)
    scores = torch.rand(6, 5, first + 5, generator=generator).tril(first)
    diagonal = torch.arange(first + 5) == torch.arange(first, first + 5)[:, None]
    mask = (scores > 0.9) | diagonal | (torch.arange(first + 5) == 0)
    site: dict[str, Any] = {"q_start": first * 16, "block_size": 16, "kv_heads": kv_heads}
    for way in ways(selectors.build("minmax")):
        one = Selection(mask, scores)
        found = list(reduced_by_ratio(one, way, threshold=0.5, **site))
        assert len(found) == len(RATIOS)
        for ratio, own in zip(RATIOS, found, strict=True):
            want = reduce_mask(one, ratio=ratio, threshold=0.5, **asdict(way), **site)
            assert torch.equal(own.pages, want.pages), (way, ratio)
            assert torch.equal(own.tiles, want.tiles), (way, ratio)
            assert (own.first_block, own.loses) == (want.first_block, want.loses)


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, max_position_embeddings=8192)
    return folder


@pytest.fixture
def small(folder, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    given = {"--model": folder, "--task": "niah_single_1,vt", "--length": 2048, "--samples": 1}
    given |= {"--chunk_size": 512, "--points": "xattention:0.9:8,minmax:0.5", "--out": "out"}
    return [str(word) for pair in given.items() for word in pair]


def test_the_command_writes_tables_and_goes_on(small, folder, tmp_path, capsys, monkeypatch):
    from xsparse import cli, models, tasks
    from xsparse.config import register

    assert masks.main(small) == 0
    assert "tables of 4 pairs" in capsys.readouterr().out
    heads = pd.read_parquet(tmp_path / "out/heads.parquet")
    traffic = pd.read_parquet(tmp_path / "out/traffic.parquet")
    assert tuple(heads.columns) == masks.HEADS
    assert tuple(traffic.columns) == masks.TRAFFIC
    assert len(heads) == 4 * 2 * 4  # pairs, layers, heads
    assert len(traffic) == 4 * 12 * len(RATIOS)
    assert not traffic.duplicated([*masks.PAIR, *masks.TRAFFIC[6:11]]).any()
    assert set(traffic.selector) == {"xattention", "minmax"}
    assert traffic[traffic.selector == "minmax"].stride.isna().all()
    assert set(traffic[traffic.selector == "xattention"].stride) == {8}
    any_way = traffic[(traffic[list(masks.REDUCTIONS)] == "any").all(axis=1)]
    for row in any_way.to_dict("records"):
        own = heads[(heads.selector == row["selector"]) & (heads.task == row["task"])]
        assert row["executed"] == own.mask_kept.sum()
        assert row["mask_causal"] == own.mask_causal.sum()

    # the runner's own prompt
    register()
    config = cli.compose(["task=vt", "length=2048"])
    task = tasks.build(
        "vt",
        models.load_tokenizer(cli.compose(cli.name_model(f"model={folder}")).model),
        length=2048,
        seed=config.seed,
        node=config.task,
    )
    part = json.loads((tmp_path / "out/parts/xattention-0.9-8/vt-2048-0.json").read_text())
    assert part["prompt_hash"] == task.sample(0).prompt_hash

    # what is there is not made again, and no model is loaded for it
    times = {p: p.stat().st_mtime_ns for p in tmp_path.glob("out/parts/*/*")}
    with monkeypatch.context() as patched:
        patched.setattr(models, "load", None)
        assert masks.main(small) == 0
    (tmp_path / "out/parts/minmax-0.5/vt-2048-0.json").unlink()
    assert masks.main([*small, "--points", "minmax:0.5"]) == 0
    assert "tables of 4 pairs" in capsys.readouterr().out  # of all parts, not of this call's
    assert len(times) == 4
    for path, before in times.items():
        made_again = path.parent.name == "minmax-0.5" and path.name.startswith("vt")
        assert (path.stat().st_mtime_ns != before) == made_again
    pd.testing.assert_frame_equal(traffic, pd.read_parquet(tmp_path / "out/traffic.parquet"))
    assert masks.main([*small, "--chunk_size", "1024"]) == 2
    assert "chunk_size=512, not 1024" in capsys.readouterr().err


def test_a_limit_leaves_whole_pairs(small, tmp_path, capsys, monkeypatch):
    class Clock:
        now_s = 0.0

        def monotonic(self) -> float:
            self.now_s += 1.0  # of every look at it
            return self.now_s

    monkeypatch.setattr(masks, "time", Clock())
    assert masks.main([*small, "--limit-s", "15"]) == masks.STOPPED
    out, err = capsys.readouterr()
    assert "stopped by limit-s=15" in err
    there = len(list(tmp_path.glob("out/parts/*/*")))
    assert 0 < there < 4
    assert f"tables of {there} pairs" in out
    assert len(pd.read_parquet(tmp_path / "out/traffic.parquet")) == there * 12 * len(RATIOS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--points", "full"], "points=full: allowed is a method that selects"),
        (["--points", "xattention:2"], "threshold=2: allowed is "),
        (["--points", "xattention:x"], "threshold=x: allowed is "),
        (["--points", "xattention:0.9:7"], "stride=7: allowed is a divisor"),
        (["--points", "a:1:2:3"], "points=a:1:2:3: allowed is SELECTOR[:THRESHOLD[:STRIDE]]"),
        (["--points", ""], "points=nothing: allowed is SELECTOR"),
        (["--points", "nosuch"], "selector=nosuch: allowed is "),
        (["--task", "nosuch"], "task=nosuch: allowed is "),
        (["--task", "niah,niah_classic"], "task=niah,niah_classic: allowed is one set of options"),
        (["--length", "x"], "length=['x']: allowed is"),
        (["--length", "9000"], "length=9000: allowed is <= 8192"),
        (["--samples", "0"], "samples=0: allowed is >= 1"),
        (["--samples", "x"], "samples=x: allowed is an integer"),
        (["--chunk_size", "100"], "chunk_size=100: allowed is a multiple of"),
        (["--model", "nosuch"], "model=nosuch: allowed is "),
        (["--limit-s", "0"], "limit-s=0.0: allowed is > 0"),
        (["--limit-s", "nan"], "limit-s=nan: allowed is > 0"),
        (["--out", "/dev/null/x"], "out=/dev/null/x: allowed is a folder"),
    ],
)
def test_bad_input_is_one_line_and_code_2(small, given, message, tmp_path, capsys):
    assert masks.main([*small, *given]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"python -m experiments.study.masks: {message}")
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [["--nosuch", "1"], ["--limit-s", "x"]])
def test_a_flag_that_is_not_one_is_one_line_and_code_2(given, capsys):
    with pytest.raises(SystemExit) as caught:
        masks.main(given)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interrupt_says_how_to_go_on(small, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(masks, "_count", interrupted)
    assert masks.main(small) == 130
    assert "goes on" in capsys.readouterr().err

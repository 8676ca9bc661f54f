"""The throughput study on a tiny model: rows add up, bytes are those predicted, tables and plot."""

import pytest

from experiments import throughput
from experiments import throughput_tables as tables


def test_rows_of_a_tiny_model(tmp_path, capsys):
    out = ["--device", "cpu", "--out", str(tmp_path), "--commit", "abc", "--length", "512"]
    assert throughput.main([*out, "--groups", "prefill,ratios"]) == 0
    assert throughput.main([*out, "--groups", "cache"]) == 0
    rows = tables.read(tmp_path / "throughput.csv")
    prefill = [row for row in rows if row["phase"] == "prefill"]
    decode = [row for row in rows if row["phase"] == "decode"]
    assert len(prefill) == 9
    assert len(decode) == 8
    for row in prefill:
        moved = row["bytes_h2d"] or None  # nothing moves where everything is on the device
        assert moved == row["bytes_predicted"], row["case"]
    full = {row["case"]: row for row in prefill}
    assert full["ring full"]["transfer_ratio"] == 1
    assert full["ring full, K resident"]["transfer_ratio"] == 0.5
    assert 0 < full["gather sparse"]["transfer_ratio"] < 0.1
    # The budget holds every block, so with a cache only a block that was completed moves.
    for row in decode:
        assert (row["hit_rate"] > 0.99) == (row["decode_cache_gb"] > 0), row["case"]
    assert "gather 2048, K off, cache 0.5 GB" in capsys.readouterr().out
    assert (tmp_path / "throughput.png").stat().st_size > 10_000


def test_tables_go_between_their_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"above\n{tables.MARKERS[0]}\nold\n{tables.MARKERS[1]}\nbelow\n")
    tables.update(page, [])
    assert page.read_text().splitlines() == ["above", tables.MARKERS[0], tables.MARKERS[1], "below"]


@pytest.mark.parametrize("words", [["--groups", "no_such"], ["--length", "many"]])
def test_bad_words_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        throughput.main(words)
    assert stopped.value.code == 2
    assert words[1] in capsys.readouterr().err

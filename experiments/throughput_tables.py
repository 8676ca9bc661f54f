"""Rows of experiments.throughput as CSV columns, tables and a plot."""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

COLUMNS = (
    *("group", "case", "phase", "context", "repeat", "n", "engine", "transfer", "selector"),
    *("digest", "chunk_size", "ring_slots", "block_size_ratio", "decode_selector"),
    *("decode_cache_gb", "cuda_graph", "seconds", "tok_s", "bytes_h2d", "bytes_predicted"),
    *("bytes_d2h", "link_gb_s", "link_share", "transfer_ratio", "mask_density"),
    *("executed_density", "page_density", "hit_rate", "busy_share", "estimate_s", "select_s"),
    *("transfer_s", "attend_s", "sync_s", "reserve_s", "engine_gpu_gb", "digest_gb", "host_gb"),
    *("peak_gpu_gb", "commit"),
)
MARKERS = ("<!-- throughput -->", "<!-- /throughput -->")
Row = dict[str, Any]


def append(path: Path, row: dict[str, Any]) -> None:
    """One more row of a CSV whose columns are fixed."""
    new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def read(path: Path) -> list[Row]:
    with open(path, newline="", encoding="utf-8") as file:
        return [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    if text == "":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def lines(rows: list[Row]) -> list[str]:
    """Markdown: the link, prefill and decode; medians over repeats at one commit."""
    out = []
    links = [r["link_gb_s"] for r in rows if r["group"] == "link" and r["link_gb_s"]]
    if links:
        out += [
            f"Pinned copy of 1 GiB: {median(links):.1f} GB/s (median of {len(links)} runs).",
            "",
        ]
    cells: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row["phase"]:
            # Code of another commit is another case.
            cells[row["phase"], row["context"], row["case"], row["commit"]].append(row)
    for phase, table in (("prefill", _prefill), ("decode", _decode)):
        found = {key[1:]: value for key, value in cells.items() if key[0] == phase}
        if found:
            out += [*table(found), ""]
    return out


def _prefill(cells: dict[tuple, list[Row]]) -> list[str]:
    out = [
        "| context | case | runs | s | tok/s | executed | moved GB | of predicted | GB/s | of peak"
        " | GPU GB | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (context, case, commit), rows in sorted(cells.items(), key=_place):
        get = _median(rows)
        moved, predicted = get("bytes_h2d"), get("bytes_predicted")
        of = moved / predicted if moved and predicted else None
        cells_ = [
            *(f"{context / 1024:.0f}k", case, str(len(rows)), _show(get("seconds"), 2)),
            *(_show(get("tok_s"), 0), _show(get("executed_density"), 3)),
            *(_show(moved and moved / 1e9, 1), _show(of, 3), _show(get("link_gb_s"), 1)),
            *(_show(get("link_share"), 2), _show(get("peak_gpu_gb"), 1), str(commit or "")),
        ]
        out.append("| " + " | ".join(cells_) + " |")
    return out


def _decode(cells: dict[tuple, list[Row]]) -> list[str]:
    out = [
        "| context | case | runs x tokens | ms/token | tok/s | MB/token | hit rate | busy"
        " | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (context, case, commit), rows in sorted(cells.items(), key=_place):
        get = _median(rows)
        rate, moved = get("tok_s"), get("bytes_h2d")
        cells_ = [
            *(f"{context / 1024:.0f}k", case, f"{len(rows)} x {rows[0]['n']:.0f}"),
            *(_show(rate and 1e3 / rate, 2), _show(rate, 1), _show(moved and moved / 1e6, 0)),
            *(_show(get("hit_rate"), 2), _show(get("busy_share"), 2), str(commit or "")),
        ]
        out.append("| " + " | ".join(cells_) + " |")
    return out


def _place(cell: tuple[tuple, list[Row]]) -> tuple:
    context, case, commit = cell[0]
    return context, _order(case), str(commit)


def _order(case: str) -> tuple[int, str]:
    first = ("resident full", "ring full", "resident sparse", "gather sparse")
    return next((i for i, name in enumerate(first) if case.startswith(name)), len(first)), case


def _median(rows: list[Row]):
    def get(name: str) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]
        return median(values) if values else None

    return get


def _show(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def plot(rows: list[Row], path: Path) -> None:
    """Prefill and decode at the longest context that has most cases."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    for axis, phase, unit in zip(axes, ("prefill", "decode"), ("s", "ms per token"), strict=True):
        cells: dict[tuple, list[Row]] = defaultdict(list)
        for row in rows:
            if row["phase"] == phase:
                cells[row["context"], row["case"]].append(row)
        contexts = [context for context, _ in cells]
        if not contexts:
            continue
        context = max(set(contexts), key=lambda c: (contexts.count(c), c))
        if phase == "prefill":
            context = 131072 if 131072 in contexts else context
        named = sorted((case for c, case in cells if c == context), key=_order, reverse=True)
        values = []
        for case in named:
            get = _median(cells[context, case])
            values.append(get("seconds") if phase == "prefill" else 1e3 / (get("tok_s") or 1))
        colours = ["#2a78b8" if "resident " in case[:9] else "#d06a2c" for case in named]
        bars = axis.barh(named, values, color=colours)
        axis.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axis.set_title(f"{phase}, {context / 1024:.0f}k tokens: {unit}")
        axis.tick_params(labelsize=8)
        axis.set_xscale("log" if phase == "decode" else "linear")
        axis.margins(x=0.12)
    figure.suptitle(
        "Llama-3.1-8B shape, random weights; K and V on the GPU blue, on the host orange"
    )
    figure.savefig(path, dpi=110)


def update(document: Path, rows: list[Row]) -> None:
    """Put the tables between the markers of a document."""
    text = document.read_text(encoding="utf-8")
    begin, end = (text.index(marker) for marker in MARKERS)
    body = "\n".join(["", "", *lines(rows)])
    document.write_text(text[: begin + len(MARKERS[0])] + body + text[end:], encoding="utf-8")

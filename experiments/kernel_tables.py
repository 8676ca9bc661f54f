"""Tables and the plot of the kernel benchmark, from its rows or from a published CSV."""

import csv
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLUMNS = [
    *("op", "variant", "q_heads", "kv_heads", "head_dim", "length", "stride", "masks"),
    *("density", "measured_density", "ms", "min_ms", "max_ms", "repeats", "first_s"),
    *("tflops", "gb_s", "ok", "error", "note", "part"),
]
WHOLE = {"q_heads", "kv_heads", "head_dim", "length", "stride", "repeats"}
TEXT = {"op", "variant", "masks", "ok", "note", "part"}
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def write_csv(rows: list[Row], path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{x:.6g}" if isinstance(x, float) else x for k, x in row.items()})


def read_csv(path: Path) -> list[Row]:
    """Rows as written, without the cells that are empty."""
    with open(path, newline="") as file:
        rows = [{k: x for k, x in row.items() if x != ""} for row in csv.DictReader(file)]
    return [{k: _typed(k, x) for k, x in row.items()} for row in rows]


def _typed(column: str, text: str) -> Any:
    if column == "ok":
        return text == "True"
    return text if column in TEXT else int(text) if column in WHOLE else float(text)


def table(rows: list[Row]) -> list[str]:
    """Markdown: attention by density, estimation as a share of dense attention, the whole chain."""
    timed = [r for r in rows if "ms" in r and "length" in r]
    lines = _checks(rows)
    for shape in dict.fromkeys(_shape(r) for r in timed):
        here = [r for r in timed if _shape(r) == shape]
        lines += _attention(here, shape) + _shares(here, shape)
    lines += _decode(timed)
    lines += [f"{describe(r)}" for r in rows if r["op"] == "gather"]
    missing = [r for r in rows if r["op"] != "check" and "ms" not in r]
    return lines + [f"not measured: {describe(r)}"[:300] for r in missing]


def update(document: Path, rows: list[Row]) -> None:
    """Put the tables between the markers of a document."""
    text = document.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{document}: needs one {BEGIN} and one {END}")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    document.write_text("\n".join([head + BEGIN, "", *table(rows), "", END + tail]))


def _checks(rows: list[Row]) -> list[str]:
    checks = [r for r in rows if r["op"] == "check"]
    failed = [r for r in checks if not r["ok"]]
    lines = [f"checks: {len(checks) - len(failed)} OK, {len(failed)} FAIL"] if checks else []
    return lines + [describe(r)[:300] for r in failed[:10]]


def _shape(row: Row) -> tuple[int, int, int, int]:
    return row["q_heads"], row["kv_heads"], row["head_dim"], row["length"]


def _title(shape: tuple[int, int, int, int]) -> str:
    return "{}/{} heads, d = {}, {} tokens".format(*shape)


def _attention(rows: list[Row], shape: tuple[int, int, int, int]) -> list[str]:
    """TFLOP/s that causality and the mask need, over density."""
    rows = [r for r in rows if r["op"] == "attention"]
    if not rows:
        return []
    columns = sorted({r["density"] for r in rows}, reverse=True)
    recorded = " (recorded masks)" if any(r.get("masks") == "recorded" for r in rows) else ""
    lines = ["", f"Attention, TFLOP/s (ms) by density: {_title(shape)}{recorded}", ""]
    lines += [
        _line(["kernel", *(f"{c:.3g}" for c in columns)]),
        _line(["---"] * (len(columns) + 1)),
    ]
    for variant in dict.fromkeys(r["variant"] for r in rows):
        cells = {
            r["density"]: f"{r['tflops']:.0f} ({r['ms']:.3g})"
            for r in rows
            if r["variant"] == variant
        }
        lines.append(_line([variant, *(cells.get(c, "") for c in columns)]))
    return lines


def _shares(rows: list[Row], shape: tuple[int, int, int, int]) -> list[str]:
    """Estimation + selection over cuDNN dense, and cuDNN dense over the whole chain."""
    dense = [r["ms"] for r in rows if r["op"] == "attention" and r["variant"] == "sdpa-cudnn"]
    lines = []
    for row in rows:
        if row["op"] in ("scores", "select", "estimate+select", "chain"):
            told = [row["op"], row["variant"], str(row["stride"]), f"{row['ms']:.3f}"]
            if dense:
                share = row["ms"] / dense[0]
                told.append(f"{1 / share:.2f}x" if row["op"] == "chain" else f"{share:.1%}")
            lines.append(_line(told))
    if not lines:
        return []
    head = ["step", "variant", "stride", "ms", "share of cuDNN dense (chain: times faster)"]
    about = f"Estimate, select, attend at density 0.1: {_title(shape)}"
    return [
        "",
        about,
        "",
        _line(head[: 4 + bool(dense)]),
        _line(["---"] * (4 + bool(dense))),
        *lines,
    ]


def _decode(rows: list[Row]) -> list[str]:
    lines = [
        _line([_title(_shape(r)), r["variant"], f"{r['density']:.3g}", f"{r['ms'] * 1e3:.1f}"])
        for r in rows
        if r["op"] == "decode"
    ]
    head = [_line(["decode", "variant", "share of K and V read", "us"]), _line(["---"] * 4)]
    return ["", *head, *lines, ""] if lines else []


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def describe(row: Row) -> str:
    if row["op"] == "check":
        verdict = "OK  " if row["ok"] else "FAIL"
        return f"{verdict} {row['variant']} {row.get('error', '')} {row['note']}"
    what = [row["op"], row["variant"]]
    if "q_heads" in row:
        what.append(f"{row['q_heads']}/{row['kv_heads']} d={row['head_dim']} n={row['length']}")
    what += [f"{k}={row[k]:.3g}" for k in ("stride", "density") if k in row]
    what += [f"{row[k]:.4g} {u}" for k, u in UNITS.items() if k in row]
    if "error" in row:
        what.append(f"differs from ours by {row['error']:.1e}")
    return " ".join([*what, row.get("note", "")])


UNITS = {"ms": "ms", "tflops": "TFLOP/s", "gb_s": "GB/s", "first_s": "s first"}


def plot(rows: list[Row], path: Path) -> None:
    """Effective TFLOP/s of attention over density, one panel per shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [r for r in rows if r["op"] == "attention" and "tflops" in r]
    timed = [r for r in timed if r.get("masks") != "recorded"]
    shapes = list(dict.fromkeys(_shape(r) for r in timed if r.get("masks") == "random"))
    if not shapes:
        return
    across = min(3, len(shapes))
    down = -(-len(shapes) // across)
    figure, axes = plt.subplots(
        down, across, figsize=(4.2 * across, 3.6 * down), squeeze=False, sharey="row"
    )
    for axis in axes.flat[len(shapes) :]:
        axis.set_axis_off()
    for axis, shape in zip(axes.flat, shapes, strict=False):
        here = [r for r in timed if _shape(r) == shape]
        for variant in dict.fromkeys(r["variant"] for r in here):
            points = sorted((r["density"], r["tflops"]) for r in here if r["variant"] == variant)
            style = "-" if variant.startswith("xsparse") else "--"
            axis.plot(*zip(*points, strict=True), marker="o", ls=style, label=variant)
        axis.set_xscale("log")
        axis.set_title(_title(shape), fontsize=9)
        axis.set_xlabel("kept share of causal blocks")
        axis.set_ylim(bottom=0)
    for axis in axes[:, 0]:
        axis.set_ylabel("effective TFLOP/s")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)

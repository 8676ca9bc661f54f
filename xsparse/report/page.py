"""The page: one HTML file with its styles and figures inside, so that it can be mailed."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from xsparse.report.findings import Finding
from xsparse.report.tables import Table

STYLE = """
:root { color: #1d232b; background: #fff; font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", "Helvetica Neue", Arial, sans-serif; -webkit-text-size-adjust: 100%; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1320px; padding: 20px 16px 48px; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.13rem; margin: 36px 0 6px; padding-top: 14px; border-top: 1px solid #dfe3e8; }
p { margin: 6px 0; max-width: 78ch; }
.quiet { color: #56606c; font-size: .9rem; }
code { font: .86em ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.findings { list-style: none; margin: 16px 0 0; padding: 0; display: grid; gap: 8px; }
.findings li { border-left: 4px solid; padding: 8px 12px; background: #f6f7f9; }
.findings b { display: block; }
.findings .problem { border-color: #b3261e; background: #fcf1f0; }
.findings .warning { border-color: #c77700; background: #fdf6ea; }
.findings .note { border-color: #5b7290; }
.findings .tag { font-size: .74rem; letter-spacing: .04em; text-transform: uppercase;
  color: #56606c; }
.figures { display: grid; gap: 24px; margin-top: 12px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.flowing { display: block; columns: 400px auto; column-gap: 24px; }
.flowing figure { break-inside: avoid; padding-bottom: 24px; }
figure { margin: 0; min-width: 0; max-width: 560px; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: #56606c; font-size: .88rem; margin-top: 6px; }
.scroll { overflow-x: auto; margin: 10px 0; border: 1px solid #dfe3e8; border-radius: 6px; }
.scroll:focus-visible { outline: 2px solid #5b7290; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .84rem;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 6px 10px; text-align: right; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid #eceff2; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { background: #f6f7f9; vertical-align: bottom; font-weight: 600; }
thead small { display: block; font-weight: 400; color: #56606c; }
.text { text-align: left; }
.wrap { white-space: normal; min-width: 15rem; overflow-wrap: anywhere; }
tbody th { font-weight: 500; position: sticky; left: 0; background: #fff; }
tr.dense > * { background: #f6f7f9; color: #414b57; }
summary { cursor: pointer; margin-top: 10px; }
dl { margin: 8px 0; max-width: 78ch; font-size: .92rem; }
dt { font-weight: 600; margin-top: 8px; }
dd { margin: 0; color: #39424d; }
@media (max-width: 600px) {
  tbody th { max-width: 10.5rem; min-width: 6.5rem; white-space: normal; }
  th, td { padding: 5px 8px; }
}
@media print { .scroll { overflow: visible; } }
"""

DEFINITIONS = {
    "mask density": "kept (query head, query block, key block) triples over causal triples, "
    "prefill only, summed over layers, heads, chunks and prompts.",
    "executed": "triples the attention kernel computed, padding included, over causal triples.",
    "page density": "pages of history that must be present, as a union over KV heads, over all "
    "pages of history.",
    "transfer": "bytes moved from host to device in prefill, estimation reads included, over the "
    "bytes of K and V of all history.",
    "delta": "sparse minus dense on the same prompts, in points of accuracy.",
    "speed-up": "ratio of the median dense time to the median sparse time over the same prompts, "
    "on the same host and device with the same engine and chunking.",
    "intervals": "95 %. Wilson for scores of 0 or 1, a seeded percentile bootstrap for fractions; "
    "Tango's score interval for paired differences. p: exact McNemar or sign-flip permutation.",
}


@dataclass(frozen=True)
class Picture:
    """src: a data URI; alt says in words what is seen."""

    src: str
    alt: str
    caption: str


def document(title: str, sections: list[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        # An empty icon keeps a browser from asking a server for one.
        '<link rel="icon" href="data:,">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(sections) + "\n</body>\n</html>\n"
    )


def header(title: str, lines: list[str], command: str) -> str:
    quiet = "".join(f'<p class="quiet">{escape(line)}</p>' for line in lines if line)
    ran = f'<p class="quiet"><code>{escape(command)}</code></p>' if command else ""
    return f"<header><h1>{escape(title)}</h1>{quiet}{ran}</header>"


def finding_list(found: list[Finding]) -> str:
    items = "".join(
        f'<li class="{f.level}"><span class="tag">{f.level}</span>'
        f"<b>{escape(f.title)}</b> {escape(f.detail)}</li>"
        for f in found
    )
    return f'<ul class="findings">{items}</ul>' if items else ""


def section(heading: str, *parts: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{''.join(parts)}</section>"


def paragraph(words: str) -> str:
    return f'<p class="quiet">{escape(words)}</p>'


def folded(heading: str, content: str) -> str:
    return f"<details><summary>{escape(heading)}</summary>{content}</details>"


def table(made: Table, name: str) -> str:
    """The table in a container that scrolls sideways; `name` is read out by screen readers."""

    def classes(column: int) -> str:
        names = [
            name
            for name, columns in (("text", made.text_columns), ("wrap", made.wrapping))
            if column in columns
        ]
        return f' class="{" ".join(names)}"' if names else ""

    head = "".join(
        f'<th scope="col"{classes(i)}>{escape(title)}'
        + (f"<small>{escape(unit)}</small>" if unit else "")
        + "</th>"
        for i, (title, unit) in enumerate(made.columns)
    )
    body = ""
    for line, cells in enumerate(made.rows):
        row = f'<th scope="row"{classes(0)}>{escape(cells[0])}</th>' + "".join(
            f"<td{classes(i)}>{escape(cell)}</td>" for i, cell in enumerate(cells[1:], 1)
        )
        of_dense = ' class="dense"' if line in made.emphasised else ""
        body += f"<tr{of_dense}>{row}</tr>\n"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>"
    )


def pictures(shown: list[Picture], *, flowing: bool = False) -> str:
    """A grid of equal figures, or columns that figures of unequal height flow into."""
    made = "".join(
        f'<figure><img src="{p.src}" alt="{escape(p.alt)}">'
        f"<figcaption>{escape(p.caption)}</figcaption></figure>"
        for p in shown
    )
    return f'<div class="figures{" flowing" if flowing else ""}">{made}</div>'


def definitions() -> str:
    made = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in DEFINITIONS.items())
    return f"<dl>{made}</dl>"

"""Full attention on the project's tasks: every (task, length) with its interval, kept cell by cell.

Prompts and scoring are the project's own; only the way to run them is another, made to be fast: no
engine, no counters, prompts decoded together. A score file keeps the finished cells, so that runs
limited to minutes add up. Beside an adapter lies its card, `<name>.json`: the scores it was
published with. Where both have a cell, the table says whether the score lies in the card's
interval.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.longcontext.settings import EvaluateConfig
from xsparse import stats, tasks
from xsparse.config import parse_length
from xsparse.models import fetch, load
from xsparse.models.files import write_json
from xsparse.models.folder import read_json
from xsparse.prompts import Source

log = logging.getLogger(__name__)

PROMPT_TOKENS = 1_600_000  # of one batch at most: 37 GB of K and V of the default model
VERDICTS = ("inside the card's interval", "intervals overlap", "DIFFERENT")
_CLOSING_S = 10


@dataclass(frozen=True)
class Cell:
    """Accuracy of one task at one length, 0..1, with its 95 % interval."""

    n: int
    accuracy: float
    low: float
    high: float


Scores = dict[str, dict[str, Cell]]  # length -> task -> cell


@dataclass(frozen=True)
class ScoreFile:
    """What was scored (model, weights, data type, seed) and its cells."""

    subject: dict[str, Any]
    scores: Scores

    @classmethod
    def read(cls, path: Path) -> ScoreFile:
        stored = read_json(path)
        try:
            scores = {
                length: {task: Cell(**cell) for task, cell in row.items()}
                for length, row in stored["scores"].items()
            }
            return cls(stored["subject"], scores)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"scores={path}: not a score file ({error!r})") from error

    def write(self, path: Path) -> None:
        plain = {
            length: {task: asdict(cell) for task, cell in row.items()}
            for length, row in self.scores.items()
        }
        write_json(path, {"subject": self.subject, "scores": plain})


def evaluate(config: EvaluateConfig, started: float) -> str:
    """The table of scores. ValueError for a score file of another subject."""
    import torch

    files = fetch(config.model)
    lengths = parse_length(config.length)
    if max(lengths) > files.max_length:
        raise ValueError(f"length={max(lengths)}: allowed is <= {files.max_length}")
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    subject = {
        "model": files.name,
        "weights_sha256": files.weights_sha256,
        "dtype": dtype,
        "seed": config.seed,
    }
    path = Path(config.scores) if config.scores else None
    scores = _stored(path, subject)
    names = tasks.names(config.task)
    cells = [(length, task) for length in lengths for task in names]
    open_cells = [
        (length, task)
        for length, task in cells
        if task not in scores.get(str(length), {}) or scores[str(length)][task].n < config.samples
    ]
    if open_cells:
        loaded = load(config.model, dtype=dtype, device=device)
        token_s = 0.0  # of the last cell, per token of its length
        for (length, task), samples in _prompts(config, loaded.tokenizer, open_cells):
            begun = time.monotonic()
            expected_s = 1.5 * token_s * length + _CLOSING_S
            if config.limit_s and begun - started + expected_s > config.limit_s:
                done = _count(scores, cells)
                log.info("out of time: %d of %d cells are scored", done, len(cells))
                break
            cell = score(loaded, samples, config.batch)
            token_s = (time.monotonic() - begun) / length
            scores.setdefault(str(length), {})[task] = cell
            log.info(
                "%6d %-16s %.3f [%.3f, %.3f] n=%d %.1f s",
                *(length, task, cell.accuracy, cell.low, cell.high, cell.n),
                time.monotonic() - begun,
            )
            if path:
                ScoreFile(subject, scores).write(path)
    shown: Scores = {
        str(length): {t: scores[str(length)][t] for t in names if t in scores.get(str(length), {})}
        for length in lengths
    }
    return table(shown, card_of(files.adapter, files.weights_sha256))


def score(loaded: Any, samples: Sequence[tasks.Sample], batch: int) -> Cell:
    """Answers of the samples of one cell, scored by the task's own metric."""
    from experiments.longcontext.decoding import answers

    longest = max(len(sample.input_ids) for sample in samples)
    rows = max(1, min(batch, PROMPT_TOKENS // longest))
    values = []
    for start in range(0, len(samples), rows):
        group = samples[start : start + rows]
        found = answers(
            loaded.model,
            [sample.input_ids for sample in group],
            new_tokens=group[0].max_new_tokens,
            eos_ids=loaded.eos_ids,
        )
        for sample, ids in zip(group, found, strict=True):
            text = loaded.tokenizer.decode(ids, skip_special_tokens=True)
            values.append(tasks.score(sample.metric, text, sample.references))
    mean, low, high = stats.mean_ci(values)
    return Cell(len(values), round(mean, 4), round(low, 4), round(high, 4))


def card_of(adapter: Path | None, weights_sha256: str) -> ScoreFile | None:
    """The published scores beside an adapter, if they are of these weights."""
    if adapter is None or not adapter.with_suffix(".json").is_file():
        return None
    card = ScoreFile.read(adapter.with_suffix(".json"))
    return card if card.subject.get("weights_sha256") == weights_sha256 else None


def table(scores: Scores, card: ScoreFile | None) -> str:
    """Markdown: a row per task, a column per length; in percent, with intervals."""
    lengths = list(scores)
    names = list(dict.fromkeys(task for row in scores.values() for task in row))
    lines = [
        f"| task | {' | '.join(lengths)} |",
        "|---|" + "---|" * len(lengths),
    ]
    verdicts: list[str] = []
    for task in names:
        shown = []
        for length in lengths:
            cell = scores[length].get(task)
            published = card.scores.get(length, {}).get(task) if card else None
            text = _text(cell) if cell else ""
            if cell and published:
                verdict = compare(cell, published)
                verdicts.append(verdict)
                text += f"; card {_text(published)}: {verdict}"
            shown.append(text)
        lines.append(f"| {task} | {' | '.join(shown)} |")
    means = []
    for length in lengths:
        row = scores[length]
        complete = row and len(row) == len(names)
        mean = sum(cell.accuracy for cell in row.values()) / max(1, len(row))
        means.append(f"{100 * mean:.1f}" if complete else "")
    lines.append(f"| mean of {len(names)} | {' | '.join(means)} |")
    if verdicts:
        lines += ["", ", ".join(f"{verdicts.count(v)} {v}" for v in VERDICTS)]
    return "\n".join(lines)


def compare(cell: Cell, published: Cell) -> str:
    """A score against the card's: few samples can fall outside and still agree with it."""
    if published.low <= cell.accuracy <= published.high:
        return VERDICTS[0]
    return VERDICTS[1 if cell.low <= published.high and published.low <= cell.high else 2]


def _text(cell: Cell) -> str:
    return f"{100 * cell.accuracy:.1f} [{100 * cell.low:.1f}, {100 * cell.high:.1f}] n={cell.n}"


def _count(scores: Scores, cells: Sequence[tuple[int, str]]) -> int:
    return sum(task in scores.get(str(length), {}) for length, task in cells)


def _stored(path: Path | None, subject: dict[str, Any]) -> Scores:
    if path is None or not path.is_file():
        return {}
    stored = ScoreFile.read(path)
    if stored.subject != subject:
        raise ValueError(f"scores={path}: holds scores of {stored.subject}, this is {subject}")
    return stored.scores


def _prompts(
    config: EvaluateConfig, tokenizer: Any, cells: Sequence[tuple[int, str]]
) -> Iterator[tuple[tuple[int, str], list[tasks.Sample]]]:
    """The samples of each cell, with `workers` made ahead of the model."""
    wanted = [
        (task, length, index)
        for length, task in cells
        for index in range(tasks.sample_count(task, length, config.task, config.samples))
    ]
    source = Source(config.model, config.task, config.seed)
    made = source.samples(wanted, tokenizer, config.workers)
    for cell, own in itertools.groupby(made, key=lambda sample: (sample.length, sample.task)):
        yield cell, list(own)

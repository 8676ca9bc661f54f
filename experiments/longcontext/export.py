"""The adapter of a training as a file of the project, with its scores and its model card.

Three files: `<name>.safetensors`, `<name>.json` (the scores, which `evaluate` compares with) and
`<name>.md`, the card. Without scores only the adapter is written: it is what gets evaluated.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.longcontext import checkpoint
from experiments.longcontext.evaluate import ScoreFile, table
from experiments.longcontext.settings import ExportConfig, TrainConfig
from experiments.longcontext.train import describe
from xsparse.models import adapter, fetch

LIMIT_BYTES = 16_000_000


@dataclass(frozen=True)
class Stage:
    """A training that is done: what an adapter's header keeps of it.

    recipe: identities of it and of its data's source, and its steps. seconds: of all steps."""

    recipe: str
    config: TrainConfig
    steps: int
    seconds: float
    machine: str

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Stage:
        """From what `asdict` made of one."""
        return cls(**{**plain, "config": TrainConfig.of(plain["config"])})


def export(config: ExportConfig) -> str:
    """Write the files; returns their names. ValueError without checkpoint or for other scores."""
    folder = Path(config.folder)
    found = checkpoint.newest(folder)
    if found is None:
        raise ValueError(f"folder={folder}: holds no checkpoint, train first")
    about = checkpoint.about(found)
    trained = TrainConfig.of(about["config"])
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    stage = Stage(
        recipe=f"{about['identity']}-{about['data']}-{about['step']}",
        config=trained,
        steps=len(rows),
        seconds=round(sum(row["step_s"] for row in rows), 1),
        machine=config.machine,
    )
    stages = [*about["stages"], asdict(stage)]
    base = fetch(replace(trained.model, adapter=None)).weights_sha256
    state = checkpoint.load(found, "cpu")
    a, b = state["lora"]["a"], state["lora"]["b"]
    matrices = {name: (a[name].bfloat16(), b[name].bfloat16()) for name in a}
    size = sum(2 * matrix.numel() for pair in matrices.values() for matrix in pair)
    if size > LIMIT_BYTES:
        raise ValueError(f"rank={trained.rank}: {size} bytes, allowed is <= {LIMIT_BYTES}")
    path = Path(config.out) / f"{config.name}.safetensors"
    described = describe(trained, base, list(matrices), stages)
    adapter.write(path, described, matrices)
    written = [path]
    if config.scores:
        scores = ScoreFile.read(Path(config.scores))
        adapted = fetch(replace(trained.model, adapter=str(path)))
        if scores.subject.get("weights_sha256") != adapted.weights_sha256:
            raise ValueError(f"scores={config.scores}: of other weights than {path}")
        written += [path.with_suffix(".json"), path.with_suffix(".md")]
        scores.write(written[1])
        written[2].write_text(card(config.name, described, scores))
    return "\n".join(map(str, written))


def card(name: str, described: adapter.Adapter, scores: ScoreFile) -> str:
    """The model card, in Markdown."""
    stages = [Stage.of(stage) for stage in described.stages]
    trained = stages[-1].config
    longest = max(phase.longest for stage in stages for phase in stage.config.phases)
    counts = sorted({cell.n for row in scores.scores.values() for cell in row.values()})
    what = f"""A LoRA adapter that makes the project's small default model (`{trained.model.id}`,
        SmolLM2-135M-Instruct, Q4_1) able to find things in long prompts, so that what a sparse
        method loses can be seen. Rank {trained.rank}, alpha {trained.alpha:g}, on every linear
        layer but the output, in bf16; rotary base {trained.rope_theta:g},
        {trained.max_position_embeddings:,} positions. It is merged when loaded and refused on
        other weights."""
    data = """Generated prompts of the eleven RULER families that need no data files, plus plain
        text. Words: the EFF's passphrase lists (CC BY 3.0 US) without every word of the
        evaluation's list. Prose: sentence frames of this project and the language reference of
        Python (`pydoc_data.topics`, PSF licence). Noise, wordings and seeds are the training's
        own; `tests/longcontext/test_disjoint.py` shows that they share nothing with the
        evaluation's. Structures are the evaluation's on purpose: this is a model for measuring
        attention, and its scores say nothing of how well it generalises to other tasks."""
    scored = f"""Full attention, percent with 95 % interval, {scores.subject.get("dtype")},
        seed {scores.subject.get("seed")}, n = {" or ".join(map(str, counts))} prompts a cell. The
        wording of the prompts is xsparse's: compare within xsparse only."""
    limits = f"""Trained for retrieval, tracking and counting in English up to
        {longest:,} tokens; beyond, nothing was trained. A model of
        135 million parameters: no knowledge, no reasoning, no safety training beyond its base's.
        Plain text was a small part of the training, so expect it to chat worse than its base."""
    licence = """The adapter is Apache-2.0, as the project and the base model
        (HuggingFaceTB/SmolLM2-135M-Instruct) are. The word list behind the training prompts is
        CC BY 3.0 US, by the Electronic Frontier Foundation; the adapter contains no text of it."""
    return "\n\n".join(
        [
            f"# {name}",
            _paragraph(what),
            "## Data",
            _paragraph(data),
            "## Recipe",
            _made("From the base", stages[0]),
            *(_made("Then from that adapter", stage) for stage in stages[1:]),
            f"Recipe `{described.recipe}`.",
            "## Scores",
            _paragraph(scored),
            table(scores.scores, None),
            "## Limits",
            _paragraph(limits),
            "## Licence",
            _paragraph(licence) + "\n",
        ]
    )


def _made(begun: str, stage: Stage) -> str:
    """How a stage was trained."""
    trained = stage.config
    tokens = stage.steps * trained.pack_tokens * trained.accumulate
    phases = ", ".join(f"{p.steps} steps of {p.shortest}-{p.longest}" for p in trained.phases)
    mixture = ", ".join(f"{name} {weight:g}" for name, weight in trained.mixture.items())
    return _paragraph(
        f"""{begun}: {stage.steps} steps of {trained.accumulate} packs of {trained.pack_tokens:,}
        tokens, {tokens / 1e6:.1f} million tokens in {stage.seconds / 60:.1f} minutes
        ({tokens / max(stage.seconds, 1e-9):,.0f} tokens/s) on {stage.machine}. Lengths, log-uniform
        in tokens: {phases}. Weights of the mixture: {mixture}. Loss on the answers, and
        {trained.text_weight:g} of the mean loss of plain text. AdamW, peak learning rate
        {trained.learning_rate:g}, {trained.warmup_steps} steps of warm-up, cosine. Seed
        {trained.seed}."""
    )


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 99, break_on_hyphens=False)

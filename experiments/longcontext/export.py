"""The adapter of a training as a file of the project, with its scores and its model card.

Three files: `<name>.safetensors`, `<name>.json` (the scores, which `evaluate` compares with) and
`<name>.md`, the card. Without scores only the adapter is written: it is what gets evaluated.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, replace
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
    """A training that is done. recipe: identities of it and of its data's source, and its steps;
    begun_from: the recipe of the adapter that it went on from."""

    folder: Path
    checkpoint: Path
    config: TrainConfig
    recipe: str
    begun_from: str | None

    @classmethod
    def of(cls, folder: Path) -> Stage:
        found = checkpoint.newest(folder)
        if found is None:
            raise ValueError(f"folders: {folder} holds no checkpoint, train first")
        about = checkpoint.about(found)
        return cls(
            folder,
            found,
            TrainConfig.of(about["config"]),
            f"{about['identity']}-{about['data']}-{about['step']}",
            about["begun_from"],
        )

    def rows(self) -> list[dict[str, Any]]:
        """The training's log, a row a step."""
        lines = (self.folder / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def export(config: ExportConfig) -> str:
    """Write the files; returns their names. ValueError without checkpoint or for other scores."""
    path = Path(config.out) / f"{config.name}.safetensors"
    stages = [Stage.of(Path(folder)) for folder in config.folders]
    recipe = None
    for stage in stages:
        if stage.begun_from != recipe:
            raise ValueError(
                f"folders: {stage.folder} began from {stage.begun_from or 'the base'}, "
                f"the one before it ends with {recipe or 'the base'}"
            )
        recipe = stage.recipe if recipe is None else f"{recipe}+{stage.recipe}"
    if recipe is None:
        raise ValueError("folders=[]: name the folder of every stage of the training")
    trained = stages[-1].config
    base = fetch(replace(trained.model, adapter=None)).weights_sha256
    state = checkpoint.load(stages[-1].checkpoint, "cpu")
    a, b = state["lora"]["a"], state["lora"]["b"]
    matrices = {name: (a[name].bfloat16(), b[name].bfloat16()) for name in a}
    size = sum(2 * matrix.numel() for pair in matrices.values() for matrix in pair)
    if size > LIMIT_BYTES:
        raise ValueError(f"rank={trained.rank}: {size} bytes, allowed is <= {LIMIT_BYTES}")
    adapter.write(path, describe(trained, base, list(matrices), recipe), matrices)
    written = [path]
    if config.scores:
        scores = ScoreFile.read(Path(config.scores))
        adapted = fetch(replace(trained.model, adapter=str(path)))
        if scores.subject.get("weights_sha256") != adapted.weights_sha256:
            raise ValueError(f"scores={config.scores}: of other weights than {path}")
        written += [path.with_suffix(".json"), path.with_suffix(".md")]
        scores.write(written[1])
        written[2].write_text(card(config, stages, recipe, scores))
    return "\n".join(map(str, written))


def card(config: ExportConfig, stages: list[Stage], recipe: str, scores: ScoreFile) -> str:
    """The model card, in Markdown."""
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
            f"# {config.name}",
            _paragraph(what),
            "## Data",
            _paragraph(data),
            "## Recipe",
            *(_made(stage, config.machine) for stage in stages),
            f"Recipe `{recipe}`.",
            "## Scores",
            _paragraph(scored),
            table(scores.scores, None),
            "## Limits",
            _paragraph(limits),
            "## Licence",
            _paragraph(licence) + "\n",
        ]
    )


def _made(stage: Stage, machine: str) -> str:
    """How a stage was trained."""
    trained, rows = stage.config, stage.rows()
    tokens = len(rows) * trained.pack_tokens * trained.accumulate
    seconds = sum(row["step_s"] for row in rows)
    phases = ", ".join(f"{p.steps} steps of {p.shortest}-{p.longest}" for p in trained.phases)
    mixture = ", ".join(f"{name} {weight:g}" for name, weight in trained.mixture.items())
    begun = "From the base" if stage.begun_from is None else "Then from that adapter"
    return _paragraph(
        f"""{begun}: {len(rows)} steps of {trained.accumulate} packs of {trained.pack_tokens:,}
        tokens, {tokens / 1e6:.1f} million tokens in {seconds / 60:.1f} minutes
        ({tokens / max(seconds, 1e-9):,.0f} tokens/s) on {machine}. Lengths, log-uniform in tokens:
        {phases}. Weights of the mixture: {mixture}. Loss on the answers, and
        {trained.text_weight:g} of the mean loss of plain text. AdamW, peak learning rate
        {trained.learning_rate:g}, {trained.warmup_steps} steps of warm-up, cosine. Seed
        {trained.seed}."""
    )


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 99, break_on_hyphens=False)

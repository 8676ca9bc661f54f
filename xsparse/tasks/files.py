"""Samples made by RULER's original generator, read from `task.ruler_data`.

Scores on them are comparable with published ones. A row is JSON with index, input, outputs, length,
answer_prefix. `input` may be the bare task, which is put in the chat template, or hold the chat
template of this model already, which is used as it is. Another model's template is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from xsparse.tasks.prompt import Prompt, PromptFormat

# Control words of chat templates: <|im_start|>, <|eot_id|>, <start_of_turn>, [INST].
_CONTROL = re.compile(r"<\|\w+\|>|<start_of_turn>|\[INST\]")
_QUESTION = re.compile(r"\n(?=Question:|What (?:is|are) (?:all )?the )")


def find(folder: Path, task: str, length: int) -> Path | None:
    """The file of a task: as the generator lays folders out, by length, or without lengths."""
    for path in (
        folder / str(length) / "data" / task / "validation.jsonl",
        folder / str(length) / task / "validation.jsonl",
        folder / task / "validation.jsonl",
        folder / f"{task}.jsonl",
    ):
        if path.is_file():
            return path
    return None


def exists(folder: Path, task: str) -> bool:
    """Whether the folder has the task for any length."""
    return find(folder, task, 0) is not None or any(folder.glob(f"*/**/{task}/validation.jsonl"))


class Rows:
    """The rows of a file, one at a time: a file of 500 long prompts is hundreds of megabytes."""

    def __init__(self, path: Path):
        self.path = path
        self._offsets: list[int] = []
        with path.open("rb") as file:
            offset = 0
            for line in file:
                if line.strip():
                    self._offsets.append(offset)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise ValueError(f"index={index}: {self.path} has {len(self)} rows")
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            try:
                row = json.loads(file.readline())
            except ValueError as error:
                raise ValueError(f"{self.path}, row {index}: not JSON ({error})") from error
        for key, kind in (("input", str), ("outputs", list)):
            if not isinstance(row, dict) or not isinstance(row.get(key), kind) or not row[key]:
                raise ValueError(f"{self.path}, row {index}: needs {key!r}, a {kind.__name__}")
        row["outputs"] = [str(output) for output in row["outputs"]]
        return row


def encode(row: dict[str, Any], prompt_format: PromptFormat, where: str) -> Prompt:
    """The prompt of a row, its answer prefix last and in the assistant's turn."""
    prefix = row.get("answer_prefix", "").rstrip()
    control = set(_CONTROL.findall(row["input"]))
    if control:
        unknown = sorted(word for word in control if word not in prompt_format.frame)
        if unknown:
            raise ValueError(
                f"{where}: input holds {unknown[0]}, which this model's chat template does not "
                "have; generate the data without a template or with this model's"
            )
        return prompt_format.encode_raw(row["input"] + prefix)
    if not prefix:
        raise ValueError(
            f"{where}: no answer_prefix, so its place cannot be known; generate the data with a "
            "version of RULER that writes it"
        )
    return prompt_format.encode(row["input"].strip(), prefix)


def places(prompt: Prompt, row: dict[str, Any]) -> tuple[int | None, list[int]]:
    """Character offsets of the question and of the answers' first mentions, where found."""
    question = None
    for match in _QUESTION.finditer(prompt.text):
        question = match.end()
    limit = len(prompt.text) if question is None else question
    found = [prompt.text.find(output, 0, limit) for output in row["outputs"]]
    return question, [offset for offset in found if offset >= 0]

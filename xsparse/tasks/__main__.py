"""python -m xsparse.tasks list
python -m xsparse.tasks show task=NAME length=TOKENS [index=0] [seed=0] [model=NAME] [KEY=VALUE]

list prints the tasks. show prints one prompt, what is expected and where it sits; keys are those
of a run: task.depths=[0,50], task.qa_data=FOLDER, model.id=...; tokenizer=FOLDER replaces a model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from xsparse import tasks
from xsparse.tasks.families import specs


def list_tasks() -> None:
    print(f"{'task':17}{'metric':8}{'new tokens':>11}{'least length':>14}  haystack")
    for spec in specs().values():
        print(
            f"{spec.name:17}{spec.metric:8}{spec.max_new_tokens:11}{spec.min_length:14}"
            f"  {spec.haystack}"
        )


def show(arguments: Sequence[str]) -> None:
    from omegaconf import OmegaConf

    own = ("task=", "task.", "length=", "index=", "seed=", "tokenizer=")
    given = OmegaConf.from_dotlist(
        [
            f"task.name={a[5:]}" if a.startswith("task=") else a
            for a in arguments
            if a.startswith(own)
        ]
    )
    node = OmegaConf.select(given, "task")
    if node is None or "name" not in node or "length" not in given:
        raise ValueError("show needs task=NAME and length=TOKENS")
    names = tasks.names(node)
    if len(names) > 1:
        raise ValueError(f"task={node.name} is a group; show one of {', '.join(names)}")
    tasks.check(names[0], given.length, node)
    tokenizer, template_kwargs = _tokenizer(
        given.get("tokenizer"), [a for a in arguments if not a.startswith(own)]
    )
    task = tasks.build(
        names[0],
        tokenizer,
        length=given.length,
        seed=given.get("seed", 0),
        node=node,
        chat_template_kwargs=template_kwargs,
    )
    _print(task.sample(given.get("index", 0)), tokenizer)


def _tokenizer(folder: str | None, model: list[str]) -> tuple[Any, dict[str, Any]]:
    if folder:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder), {}
    from xsparse.models import load_tokenizer
    from xsparse.models.__main__ import read_node

    node = read_node(model)
    return load_tokenizer(node), node.chat_template_kwargs


def _print(sample: tasks.Sample, tokenizer: Any) -> None:
    tokens = len(sample.input_ids)
    print(tokenizer.decode(sample.input_ids))
    print("-" * 60)
    rows = {
        "task": f"{sample.task}, index {sample.index}, scored by {sample.metric!r}",
        "answers": ", ".join(sample.references),
        "tokens": f"{tokens} + {sample.max_new_tokens} new of {sample.length}",
        "hash": sample.prompt_hash,
        **{key: value for key, value in sample.meta.items() if not isinstance(value, list)},
        "needle_tokens": ", ".join(
            f"{token} ({token / tokens:.0%})" for token in sample.meta["needle_tokens"]
        ),
    }
    for key, value in rows.items():
        print(f"{key:15} {value}")


def main(arguments: Sequence[str]) -> int:
    try:
        if list(arguments) == ["list"]:
            list_tasks()
        elif arguments and arguments[0] == "show":
            show(arguments[1:])
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except BrokenPipeError:  # show ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        print(f"xsparse.tasks: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

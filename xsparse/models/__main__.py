"""python -m xsparse.models fetch|show|verify [model=NAME] [model.KEY=VALUE ...]

fetch downloads and converts what is missing, show prints what is known of a model, verify reads
every byte of a converted wheel again (and makes it anew if it was damaged).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from xsparse.config import ModelConfig
from xsparse.models import ModelError, adapter, fetch, shape
from xsparse.models.hub import local_snapshot

CONF = Path(__file__).parents[2] / "conf" / "model"
DEFAULT = "smollm2-135m-lc"


def read_node(arguments: list[str]) -> ModelConfig:
    """The node of conf/model/NAME.yaml with the given keys replaced."""
    name, changes = DEFAULT, []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key == "model" and equals:
            name = value
        elif key.startswith("model.") and equals:
            changes.append(argument.removeprefix("model."))
        else:
            raise ModelError(f"{argument!r}: expected model=NAME or model.KEY=VALUE")
    path = CONF / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in CONF.glob("*.yaml")))
        raise ModelError(
            f"model={name}: known are {known}; any hub model is model=hub model.id=..."
        )
    merged = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(changes))
    if OmegaConf.is_missing(merged, "id"):
        raise ModelError(f"model={name} needs model.id=...")
    fields = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(fields, dict)
    try:
        return ModelConfig(**{str(key): value for key, value in fields.items()})
    except TypeError as error:
        raise ModelError(f"model={name}: {error}") from error


def fetch_with_progress(node: ModelConfig, *, full: bool = False) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or None)
            bars.update(tasks[stage], completed=done)

        files = fetch(node, progress, full=full)
    print(f"{files.name}: {files.folder or 'random weights, made when loaded'}")


def show(node: ModelConfig) -> None:
    sizes = shape(node)
    rows: dict[str, object] = {"name": node.name, "source": f"{node.source} {node.id or ''}"}
    if node.source == "hub" and local_snapshot(str(node.id), node.revision) is None:
        rows["folder"] = "not fetched yet"
    else:
        files = fetch(node)
        rows["folder"] = files.folder
        if files.adapter:
            described = adapter.read(files.adapter)
            rows["adapter"] = files.adapter
            rows["adapter rank"] = f"{described.rank} on {len(described.targets)} weights"
            rows["adapter recipe"] = described.recipe
            rows["base_sha256"] = files.base_sha256
        rows["weights_sha256"] = files.weights_sha256
        rows["tokenizer_hash"] = files.tokenizer_hash
    rows |= {
        "layers": sizes.layers,
        "heads": f"{sizes.q_heads} query, {sizes.kv_heads} KV, head_dim {sizes.head_dim}",
        "hidden, vocab": f"{sizes.hidden}, {sizes.vocab}",
        "parameters": f"{sizes.params:,}",
        "max_length": f"{sizes.max_length:,} tokens",
        "KV cache": f"{sizes.kv_token_bytes:,} bytes a token at 2 bytes a number",
    }
    for key, value in rows.items():
        print(f"{key:15} {value}")


def main(arguments: list[str]) -> int:
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    commands = {
        "fetch": fetch_with_progress,
        "show": show,
        "verify": lambda node: fetch_with_progress(node, full=True),
    }
    if not arguments or arguments[0] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        commands[arguments[0]](read_node(arguments[1:]))
    except ValueError as error:
        print(f"xsparse.models: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

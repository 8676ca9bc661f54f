"""What the configuration says about a model (`conf/model/<name>.yaml`), and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from xsparse.models.files import ModelError

SOURCES = ("wheel", "hub", "path", "random")


class ModelNode(Protocol):
    """The keys of a model configuration; any object with these attributes will do."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def id(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def max_length(self) -> int | None: ...
    @property
    def adapter(self) -> str | None: ...
    @property
    def config(self) -> dict[str, Any]: ...


def check_node(node: ModelNode) -> None:
    if node.source not in SOURCES:
        raise ModelError(f"model.source={node.source!r}: allowed are {', '.join(SOURCES)}")
    if node.source == "random":
        if node.adapter is not None:
            raise ModelError(
                f"model.adapter={node.adapter}: random weights take no adapter, use null"
            )
        if not node.config:
            raise ModelError("model.config={}: a random model needs the fields of its config")
    else:
        if not node.id:
            raise ModelError(f"model.id={node.id!r}: source={node.source} needs one")
        if node.config:
            raise ModelError(f"model.config is for source=random only, not {node.source}")
    if node.max_length is not None and node.max_length < 1:
        raise ModelError(f"model.max_length={node.max_length}: must be null or at least 1")


def max_length(node: ModelNode, config: Mapping[str, Any]) -> int:
    """The longest sequence allowed: the node's, never beyond the positions of the model."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        if node.max_length is None:
            raise ModelError(
                "model.max_length=null, but the model's config has no max_position_embeddings"
            )
        return node.max_length
    if node.max_length is not None and node.max_length > positions:
        raise ModelError(f"model.max_length={node.max_length}: the model has {positions} positions")
    return node.max_length or positions

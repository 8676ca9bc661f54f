"""The threshold: one number, or a table of one per layer and query head from a file.

A table was calibrated for one model, stride and block size (and for the scores of one method, if it
says so) and is refused on any other: a number that fits by accident would be a silent error.
Nothing here imports torch before it is asked for a tensor.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ALLOWED = "a number in [0, 1], or @ and the path of a table"
KEYS = ("model", "stride", "block_size", "table")


@dataclass
class Thresholds:
    """value: the threshold of every layer and head, or None where `table` has them.

    table: [layers][q_heads]; model, stride, block_size: what the table was made for; selector: the
    method whose scores it was made for, None if it does not say; source: the threshold as it was
    written
    """

    value: float | None = None
    table: list[list[float]] | None = None
    model: str | None = None
    stride: int | None = None
    block_size: int | None = None
    selector: str | None = None
    source: str = ""
    _tensors: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def for_layer(self, layer: int, device: Any = "cpu") -> float | Tensor:
        """The threshold of a layer: a float, or fp64 [q_heads] on the device, made once."""
        if self.table is None:
            assert self.value is not None
            return self.value
        key = layer, str(device)
        if key not in self._tensors:
            import torch

            row = self.table[layer]
            self._tensors[key] = torch.tensor(row, dtype=torch.float64, device=device)
        return self._tensors[key]

    def check(
        self,
        *,
        model: str | None,
        layers: int,
        q_heads: int,
        stride: int | None,
        block_size: int,
        selector: str | None = None,
    ) -> None:
        """Raise ValueError unless the table was made for this; None is not compared.

        selector: the method that will use it; None for one without a threshold
        """
        if self.table is None:
            return
        for key, have, want in (
            ("model", self.model, model),
            ("stride", self.stride, stride),
            ("block_size", self.block_size, block_size),
            ("selector", self.selector or selector, selector),
        ):
            if want is not None and have != want:
                raise ValueError(f"threshold={self.source}: made for {key}={have}, not {want}")
        shape = [len(self.table), len(self.table[0])]
        if shape != [layers, q_heads]:
            raise ValueError(
                f"threshold={self.source}: the table is {shape[0]} layers x {shape[1]} query "
                f"heads, allowed is {layers} x {q_heads}"
            )


def thresholds(
    value: Any,
    *,
    model: str | None,
    stride: int | None,
    block_size: int,
    layers: int,
    q_heads: int,
    selector: str | None = None,
) -> Thresholds:
    """`parse` and, for a table, a check that it was made for this. Raises ValueError."""
    parsed = parse(value)
    parsed.check(
        model=model,
        stride=stride,
        block_size=block_size,
        layers=layers,
        q_heads=q_heads,
        selector=selector,
    )
    return parsed


def parse(value: Any) -> Thresholds:
    """A number, a numeral or "@file.json" (or what this returned). Raises ValueError with the
    value and what is allowed."""
    if isinstance(value, Thresholds):
        return value
    if isinstance(value, str) and value.startswith("@"):
        return _load(value)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 1:
        raise ValueError(f"threshold={value}: allowed is {ALLOWED}")
    return Thresholds(value=number, source=str(value))


def _load(source: str) -> Thresholds:
    def refuse(why: str) -> ValueError:
        return ValueError(f"threshold={source}: {why}; allowed is {ALLOWED}")

    try:
        with open(source[1:], encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise refuse(error.strerror or "cannot be read") from None
    except ValueError:
        raise refuse("is not JSON") from None
    if not isinstance(content, dict) or set(KEYS) - set(content):
        raise refuse(f"must be an object with {', '.join(KEYS)}")
    if not isinstance(content.get("selector"), str | None):
        raise refuse("selector must be the name of a method")
    table = content["table"]
    if not (isinstance(table, list) and table and all(isinstance(r, list) and r for r in table)):
        raise refuse("table must be a list of layers, each a list of one number per query head")
    if len({len(row) for row in table}) > 1:
        raise refuse("the layers of table have different numbers of query heads")
    for layer, row in enumerate(table):
        for head, x in enumerate(row):
            if isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 <= x <= 1:
                raise refuse(f"table[{layer}][{head}]={x} is not in [0, 1]")
    return Thresholds(
        table=[[float(x) for x in row] for row in table],
        model=content["model"],
        stride=content["stride"],
        block_size=content["block_size"],
        selector=content.get("selector"),
        source=source,
    )

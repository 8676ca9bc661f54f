"""The points that the overrides of a command line stand for."""

from typing import Any


def expand(overrides: list[str]) -> list[list[str]]:
    """The points of a sweep as Hydra's basic sweeper makes them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    batches = BasicSweeper.split_arguments(parse(overrides), max_batch_size=None)
    return [list(point) for batch in batches for point in batch]


def parse(overrides: list[str]) -> list[Any]:
    """Hydra's reading of overrides. Raises its HydraException for what is none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_overrides(overrides)

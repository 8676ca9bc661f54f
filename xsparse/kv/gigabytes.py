"""Bytes as GB in messages, rounded so that what a message allows is allowed."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

DIGITS = 3


def gb_up(nbytes: int) -> str:
    """No less than `nbytes`, three digits: what is needed."""
    return _rounded(nbytes, ROUND_CEILING)


def gb_down(nbytes: int) -> str:
    """No more than `nbytes`, three digits: what there is."""
    return _rounded(nbytes, ROUND_FLOOR)


def from_gb(gb: float) -> int:
    """Bytes of a number of GB as it was written: 0.07 GB are 70,000,000 bytes, not one less."""
    return round(gb * 1e9)


def _rounded(nbytes: int, way: str) -> str:
    exact = Decimal(nbytes).scaleb(-9)
    last = Decimal(1).scaleb(max(exact.adjusted() - DIGITS + 1, -9))
    return format(exact.quantize(last, way), "f")

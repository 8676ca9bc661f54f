"""Scores against the official rule written out by hand."""

from __future__ import annotations

import pytest

from xsparse.tasks import score


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "expected"),
    [
        ("all", " 1234567.", ["1234567"], 1.0),
        ("all", "It is 8090293.", ["8090293"], 1.0),
        ("all", "1234567", ["1234567", "7654321"], 0.5),
        ("all", "", ["1234567"], 0.0),
        ("all", "PARIS and rome", ["Paris", "Rome", "Oslo", "Bern"], 0.5),
        ("all", "a\x00b", ["a\nb"], 1.0),
        ("all", "\x01 7", ["7"], 1.0),
        ("part", "in paris, I think", ["Lyon", "Paris"], 1.0),
        ("part", "Nice", ["Lyon", "Paris"], 0.0),
        ("part", "Lyon", ["Lyon", "Paris", "Nice"], 1.0),
    ],
)
def test_score(metric, prediction, references, expected):
    assert score(metric, prediction, references) == expected


def test_bad_calls():
    with pytest.raises(ValueError, match="metric='any': allowed are all, part"):
        score("any", "x", ["x"])
    with pytest.raises(ValueError, match="references"):
        score("all", "x", [])

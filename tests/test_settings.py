"""Which keys concern a combination: what is left out cannot change a number of it."""

import pytest

from xsparse.settings import Settings

GATHER = {"engine": "offload", "transfer": "gather"}


@pytest.mark.parametrize(
    ("settings", "concerned"),
    [
        ({}, False),
        ({"engine": "offload"}, True),
        (GATHER | {"decode_selector": "minmax"}, False),
        (GATHER, True),  # decode reads everything, through the ring
        (GATHER | {"decode_selector": "minmax", "digest": "streamed"}, True),
        (GATHER | {"decode_selector": "minmax", "selector": "full"}, True),
    ],
)
def test_slots_concern_whoever_reads_through_the_ring(settings, concerned):
    assert ("ring_slots" in Settings(**settings).concerns()) == concerned

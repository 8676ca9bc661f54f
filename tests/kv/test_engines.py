"""Engines against a plain list of K and V: whatever is appended comes back, piece by piece."""

import itertools

import pytest
import torch

from xsparse.kv import host
from xsparse.kv.offload import OffloadEngine
from xsparse.kv.resident import ResidentEngine
from xsparse.kv.shape import CacheShape

BLOCK, RATIO, CHUNK, LAYERS, HEADS, D = 8, 4, 32, 3, 2, 4
CPU = torch.device("cpu")
SHAPE = CacheShape(LAYERS, 2 * HEADS, HEADS, D, BLOCK, RATIO, CHUNK, torch.float32, CPU)


def engines():
    """Every way back to the device: K and V or V alone, through slots fewer and more than pages.
    What else a digest keeps is not read here."""
    yield "resident", ResidentEngine(SHAPE)
    for digest in ("none", "resident_k"):
        for slots in (2, 3, 8):
            yield f"ring-{digest}-{slots}", OffloadEngine(SHAPE, digest=digest, ring_slots=slots)
        yield (
            f"gather-{digest}",
            OffloadEngine(SHAPE, transfer="gather", digest=digest),
        )


ALL = dict(engines())


@pytest.fixture(params=ALL)
def engine(request):
    engine = ALL[request.param]
    engine.reset()
    return engine


def fill(engine, pieces, seed=0):
    """Append pieces of the given sizes to every layer; returns K, V [layers, heads, n, D]."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, LAYERS, HEADS, sum(pieces), D, generator=generator)
    start = 0
    for size in pieces:
        for layer in range(LAYERS):
            rows = slice(start, start + size)
            engine.append(layer, kv[0, layer, :, rows], kv[1, layer, :, rows])
        start += size
    return kv


# A prompt in chunks, tails of every kind, and decode steps across block and page edges.
SEQUENCES = [
    [1],
    [7],
    [8],
    [9],
    [32, 32, 5],
    [32, 32, 32],
    [24, 8, 32, 1],
    [32, 31] + [1] * 40,
    [13, 20, 32, 3],
]


def last_layer(engine, pieces):
    """Only the layer that was appended last is still the current chunk of the engine."""
    return LAYERS - 1


@pytest.mark.parametrize("pieces", SEQUENCES, ids=str)
def test_windows_give_back_every_token(engine, pieces):
    k, v = fill(engine, pieces)
    layer, n = last_layer(engine, pieces), sum(pieces)
    blocks = SHAPE.blocks(n)
    wanted = torch.ones(HEADS, blocks, dtype=torch.bool)
    pages = torch.ones(SHAPE.pages(n), dtype=torch.bool)
    seen = torch.zeros(HEADS, blocks, dtype=torch.int)
    for window in engine.windows(layer, wanted, pages):
        tiles = window.tiles
        for head in range(HEADS):
            for column, block in enumerate(tiles.blocks[head].tolist()):
                if block < 0:
                    continue
                seen[head, block] += 1
                rows = slice(block * BLOCK, min(n, (block + 1) * BLOCK))
                size = rows.stop - rows.start
                got_k = tiles.k_pool[tiles.k_index[head, column]]
                got_v = tiles.v_pool[tiles.v_index[head, column]]
                assert torch.equal(got_k[:size], k[layer, head, rows])
                assert torch.equal(got_v[:size], v[layer, head, rows])
                assert torch.isfinite(got_k).all()
                assert torch.isfinite(got_v).all()
    assert (seen == 1).all()


@pytest.mark.parametrize("pieces", SEQUENCES, ids=str)
def test_dense_parts_are_the_sequence_in_order(engine, pieces):
    k, v = fill(engine, pieces)
    parts = [(a.clone(), b.clone(), c) for a, b, c in engine.dense_parts(LAYERS - 1)]
    assert torch.equal(torch.cat([p[0] for p in parts], 1), k[LAYERS - 1])
    assert torch.equal(torch.cat([p[1] for p in parts], 1), v[LAYERS - 1])
    assert [p[2] for p in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1][0].shape[1] >= pieces[-1]


def test_only_what_was_asked_for_comes_back():
    for name, engine in engines():
        if name.startswith("resident"):
            continue
        fill(engine, [32, 32, 32, 10])
        wanted = torch.zeros(HEADS, 14, dtype=torch.bool)
        wanted[0, 0] = wanted[0, 5] = wanted[1, 9] = True
        pages = torch.tensor([True, True, True, False])
        before = engine.traffic.h2d
        windows = list(engine.windows(2, wanted, pages))
        moved = engine.traffic.h2d - before
        halves = 1 if "resident_k" in name else 2
        tile = BLOCK * D * 4
        if name.startswith("gather"):
            assert moved == halves * 3 * tile, name
            blocks = torch.cat([w.tiles.blocks for w in windows])  # the chunk's own are 12 and 13
            found = [[b for b in row if b >= 0] for row in blocks.tolist()]
            assert found == [[0, 5, 12, 13], [9, 12, 13]]
        else:
            assert moved == 3 * halves * HEADS * RATIO * tile, name


def test_a_second_sequence_sees_nothing_of_the_first(engine):
    fill(engine, [32, 32, 20], seed=1)
    engine.reset()
    k, v = fill(engine, [32, 9], seed=2)
    parts = [(a.clone(), b.clone()) for a, b, _ in engine.dense_parts(LAYERS - 1)]
    assert torch.equal(torch.cat([p[0] for p in parts], 1), k[LAYERS - 1])
    assert torch.equal(torch.cat([p[1] for p in parts], 1), v[LAYERS - 1])


def test_bytes_to_the_host_are_the_complete_blocks():
    engine = OffloadEngine(SHAPE, digest="none")
    fill(engine, [32, 32, 13])
    assert engine.traffic.d2h == LAYERS * (72 * 2 * HEADS * D * 4)
    assert engine.traffic.h2d == 0


def test_digests_show_k_of_the_whole_sequence():
    for pieces in SEQUENCES:
        n = sum(pieces)
        engine = OffloadEngine(SHAPE, digest="strided_k", stride=4)
        k, _ = fill(engine, pieces)
        assert torch.equal(engine.keys(2).strided(4), k[2][:, ::4])

        engine = OffloadEngine(SHAPE, digest="minmax")
        k, _ = fill(engine, pieces)
        low, high = engine.keys(2).minmax(BLOCK)
        for block in range(SHAPE.blocks(n)):
            rows = k[2][:, block * BLOCK : (block + 1) * BLOCK]
            assert torch.equal(low[:, block], rows.amin(1))
            assert torch.equal(high[:, block], rows.amax(1))

        for digest in ("streamed", "resident_k"):
            engine = OffloadEngine(SHAPE, digest=digest)
            k, _ = fill(engine, pieces)
            for _ in range(2):
                got = [(start, piece.clone()) for start, piece in engine.keys(2).pieces()]
                assert torch.equal(torch.cat([piece for _, piece in got], 1), k[2])
                starts = [0, *itertools.accumulate(piece.shape[1] for _, piece in got)][:-1]
                assert [start for start, _ in got] == starts


def test_growing_after_a_digest_failed_addresses_what_is_held(monkeypatch):
    """With two digests the first may have grown when the second finds no room."""
    engine = OffloadEngine(SHAPE, digest="resident_k", stats="minmax")
    k, _ = fill(engine, [32, 5])

    def fails(tokens):
        raise torch.OutOfMemoryError("no memory left")

    assert engine.stats is not None
    monkeypatch.setattr(engine.stats, "reserve", fails)
    with pytest.raises(torch.OutOfMemoryError):
        engine.reserve(4096)
    place = engine.token_places(0)[0][0]
    for head in range(HEADS):
        assert torch.equal(place.rows[place.first + head * place.head + 36], k[0, head, 36])


def test_tiles_of_a_capacity_stay_where_they_are():
    """A captured graph holds their addresses until the engine says that its buffers are others."""
    engine = ResidentEngine(SHAPE)
    engine.reserve(128 * BLOCK)
    before, generation = engine.all_tiles(0), engine.generation
    for blocks in range(1, 128):  # as many lengths of a prompt
        engine.lengths[0] = blocks * BLOCK
        list(engine.windows(0, torch.ones(1), None))
    after = engine.all_tiles(0)
    assert engine.generation == generation
    for name in ("k_index", "v_index", "blocks"):
        assert getattr(before, name).data_ptr() == getattr(after, name).data_ptr()


def test_capacity_doubles_only_where_the_host_has_room():
    layer_pages = SHAPE.layers * 4
    limit = layer_pages * SHAPE.page_bytes(1) * 3 // 2
    engine = OffloadEngine(SHAPE, digest="resident_k", limit_bytes=limit)
    engine.reserve(4 * SHAPE.page_size)
    engine.make_room(4 * SHAPE.page_size + 1)
    assert engine.capacity == 5 * SHAPE.page_size


def test_a_slot_is_free_once_after_a_reset():
    engine = OffloadEngine(SHAPE, digest="none", ring_slots=2)
    fill(engine, [32, 32, 5])
    parts = engine.dense_parts(LAYERS - 1)
    next(parts)
    engine.reset()
    parts.close()
    assert len(engine.ring.free) == 2


def test_streaming_keys_twice_costs_their_bytes_twice():
    engine = OffloadEngine(SHAPE, digest="streamed")
    fill(engine, [32, 32, 32])
    before = engine.traffic.h2d
    for _ in range(2):
        list(engine.keys(2).pieces())
    assert engine.traffic.h2d - before == 2 * (64 * HEADS * D * 4)


def test_a_digest_that_does_not_hold_k_says_so():
    engine = OffloadEngine(SHAPE, digest="minmax")
    fill(engine, [9])
    with pytest.raises(ValueError, match="digest=minmax"):
        engine.keys(0).keys()
    with pytest.raises(ValueError, match="digest=minmax"):
        engine.keys(0).strided(4)


def test_host_memory_that_does_not_fit_is_refused_with_numbers(monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 3_000)
    engine = OffloadEngine(SHAPE, digest="none")
    need = 1024 * 2 * LAYERS * HEADS * D * 4
    match = rf"needs {need / 1e9:.6f} GB .* 1024 tokens, 0\.00000300 GB"
    with pytest.raises(MemoryError, match=match):
        engine.reserve(1000)
    assert engine.store is None
    with pytest.raises(MemoryError, match=r"^engine\.host_memory_gb=1: allowed is >= "):
        OffloadEngine(SHAPE, digest="none", limit_bytes=10**9).reserve(10**8)


def test_memory_counts_every_buffer():
    engine = OffloadEngine(SHAPE, digest="resident_k", ring_slots=3)
    engine.reserve(100)
    page = 2 * HEADS * RATIO * BLOCK * D * 4
    memory = engine.memory()
    assert memory.host == {"pages": LAYERS * 4 * page // 2}  # V alone
    assert memory.digest == LAYERS * 4 * page // 2
    assert memory.device == {
        "chunks_and_windows": 2 * 2 * page // 2,
        "tail": LAYERS * HEADS * BLOCK * D * 4,
        "ring": 3 * 4 * page // 2,  # a slot takes as many pages as there are, up to 128 MiB
    }

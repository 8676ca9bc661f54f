import pytest
import torch

from tests.ops import oracle
from tests.ops.cases import CASES, LENGTH_CASES, UNALIGNED_CASES, Case, make
from xsparse.ops import naive_backend, torch_backend

FORMS = {
    "naive": (naive_backend, torch.float64, 1e-11),
    "torch": (torch_backend, torch.float32, 4e-6),
}
SMALL = [c for c in CASES if c.queries * c.q_heads < 3000]


def place(case):
    return {
        "stride": case.stride,
        "block_size": case.block_size,
        "q_start": case.q_start,
        "scaling": case.scaling,
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_scores_follow_the_formula(case):
    q, k, _ = make(case)
    scores = torch_backend.antidiagonal_scores(q, k, **place(case))
    assert scores.dtype == torch.float32
    assert scores.shape == (case.q_heads, case.q_blocks, case.k_blocks)
    assert not scores.isnan().any()
    torch.testing.assert_close(
        scores.double(), oracle.antidiagonal_scores(case, q, k), atol=3e-6, rtol=1e-7
    )


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_naive_scores_follow_the_formula(case):
    q, k, _ = make(case, dtype=torch.float64)
    scores = naive_backend.antidiagonal_scores(q, k, **place(case))
    torch.testing.assert_close(scores, oracle.antidiagonal_scores(case, q, k), atol=1e-11, rtol=0)


@pytest.mark.parametrize(
    ("length", "blocks", "last"), [(1000, 8, 13), (1001, 8, 14), (1023, 8, 16), (1025, 9, 1)]
)
def test_rows_sum_to_their_strided_rows(length, blocks, last):
    case = Case(length)
    q, k, _ = make(case)
    sums = torch_backend.antidiagonal_scores(q, k, **place(case)).sum(-1)
    assert sums.shape[1] == blocks
    torch.testing.assert_close(sums[:, :-1], torch.full_like(sums[:, :-1], 16), atol=1e-5, rtol=0)
    torch.testing.assert_close(sums[:, -1], torch.full_like(sums[:, -1], last), atol=1e-5, rtol=0)


def test_future_blocks_have_no_mass():
    case = Case(1025)
    q, k, _ = make(case)
    scores = torch_backend.antidiagonal_scores(q, k, **place(case))
    assert scores.triu(1).eq(0).all()


@pytest.mark.parametrize("chunk", [8, 128, 384, 512])
@pytest.mark.parametrize("length", [1000, 1025])
def test_chunks_equal_one_shot(length, chunk):
    case = Case(length, q_heads=4, kv_heads=2)
    q, k, _ = make(case)
    whole = torch_backend.antidiagonal_scores(q, k, **place(case))
    summed = torch.zeros_like(whole)
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        rows = torch_backend.antidiagonal_scores(
            q[:, start:stop], k[:, :stop], **{**place(case), "q_start": start}
        )
        first = start // case.block_size
        summed[:, first : first + rows.shape[1], : rows.shape[2]] += rows
    torch.testing.assert_close(summed, whole, atol=4e-6, rtol=0)


def stream(ops, case, q, k, piece):
    at = {"stride": case.stride, "q_start": case.q_start, "scaling": case.scaling}
    pieces = [(s, k[:, s : s + piece]) for s in range(0, case.length, piece)]
    stats = None
    for start, part in pieces:
        one = ops.antidiagonal_stats(q, part, k_start=start, **at)
        assert not one[0].isinf().any()
        stats = one if stats is None else ops.merge_stats(stats, one)
    return torch.cat(
        [
            ops.antidiagonal_block_sums(
                q, part, *stats, k_start=start, block_size=case.block_size, **at
            )
            for start, part in pieces
        ],
        -1,
    )


STREAM_CASES = [Case(1025, 129), Case(1000, 360), Case(650, 394, content="huge"), Case(700, 37)]


@pytest.mark.parametrize("piece", [128, 256, 1152])
@pytest.mark.parametrize("case", STREAM_CASES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_streaming_equals_one_shot(form, case, piece):
    ops, dtype, tolerance = FORMS[form]
    q, k, _ = make(case, dtype=dtype)
    streamed = stream(ops, case, q, k, piece)
    one_shot = ops.antidiagonal_scores(q, k, **place(case))
    torch.testing.assert_close(streamed, one_shot, atol=tolerance, rtol=0)
    torch.testing.assert_close(
        streamed.double(), oracle.antidiagonal_scores(case, q, k), atol=tolerance, rtol=0
    )


@pytest.mark.parametrize("form", FORMS)
def test_piece_that_nobody_sees(form):
    ops, dtype, _ = FORMS[form]
    case = Case(512, 128)
    q, k, _ = make(case, dtype=dtype)
    m, total = ops.antidiagonal_stats(
        q[:, :64], k[:, 384:], stride=8, q_start=128, k_start=384, scaling=case.scaling
    )
    assert (total == 0).all()
    assert m.isfinite().all()
    merged = ops.merge_stats((m, total), (m, total))
    assert not any(t.isnan().any() for t in merged)


@pytest.mark.parametrize("case", UNALIGNED_CASES + LENGTH_CASES[-2:], ids=str)
def test_grouped_heads_equal_repeated_keys(case):
    q, k, _ = make(case)
    repeated = torch_backend.antidiagonal_scores(q, k.repeat_interleave(3, 0), **place(case))
    grouped = torch_backend.antidiagonal_scores(q, k, **place(case))
    torch.testing.assert_close(grouped, repeated, atol=3e-6, rtol=0)


def test_strips_do_not_show(monkeypatch):
    from xsparse.ops.antidiagonal import fast

    case = Case(1025, 700)
    q, k, _ = make(case)
    want = fast.antidiagonal_scores(q, k, **place(case))
    monkeypatch.setattr(fast, "STRIP_NUMBERS", 1)
    torch.testing.assert_close(
        fast.antidiagonal_scores(q, k, **place(case)), want, atol=3e-6, rtol=0
    )


def test_strided_view_of_a_cache():
    case = Case(600, 216)
    q, k, _ = make(case)
    cache = torch.full((1, 1024, case.head_dim), torch.nan)
    cache[:, :600] = k
    torch.testing.assert_close(
        torch_backend.antidiagonal_scores(q, cache[:, :600], **place(case)),
        torch_backend.antidiagonal_scores(q, k, **place(case)),
        atol=0,
        rtol=0,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_mass_follows_the_formula(case):
    q, k, _ = make(case)
    at = {"block_size": case.block_size, "q_start": case.q_start, "scaling": case.scaling}
    mass = torch_backend.attention_mass(q, k, **at)
    # Rows sum to 128 here, eight times what antidiagonals sum to.
    torch.testing.assert_close(mass.double(), oracle.attention_mass(case, q, k), atol=3e-5, rtol=0)


def test_naive_attention_mass():
    case = Case(385, 200, q_heads=4, kv_heads=2)
    q, k, _ = make(case, dtype=torch.float64)
    mass = naive_backend.attention_mass(
        q, k, block_size=128, q_start=case.q_start, scaling=case.scaling
    )
    torch.testing.assert_close(mass, oracle.attention_mass(case, q, k), atol=1e-12, rtol=0)

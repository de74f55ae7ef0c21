"""Where the llama.cpp engine cuts prompts, and what it computes at once."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.llama_cpp_cuts import PREFILL_GRID, Cuts, Part, Piece, packed

EXACT = Cuts(singles_apart=True, unit=2)
ANY = Cuts(singles_apart=False, unit=2)

prompts = st.integers(1, 1200)


def piece(slot: int, start: int, stop: int) -> Piece:
    part = Part(0, (f"s{slot}", 0), list(range(start, stop)), start, stop, wanted=False)
    return Piece.of(part, slot)


def bounds(batches: list[list[Piece]]) -> list[list[tuple[int, int, int]]]:
    return [[(each.slot, each.start, each.stop) for each in batch] for batch in batches]


@given(common=prompts, prompt_tokens=prompts, chunk=st.integers(1, 40))
def test_a_position_is_a_single_token_or_not_by_where_it_is(common: int, prompt_tokens: int, chunk: int) -> None:
    """Whatever a prompt began with and came in: the last one when it alone is beyond the grid, and no other; and no
    piece has one token only."""
    at, singles = EXACT.begins_with(common, prompt_tokens), []
    assert max(0, min(common, prompt_tokens) - 3) <= at < prompt_tokens
    while at < prompt_tokens:
        stop = min((at // PREFILL_GRID + chunk) * PREFILL_GRID, prompt_tokens)
        cut = EXACT.piece_end(at, stop)
        singles += range(cut, stop)
        (*pieces,) = packed([piece(0, at, cut)], 512, together=True) if cut > at else ()
        assert all(len(each) > 1 for batch in pieces for each in batch)
        at = stop
    assert singles == ([prompt_tokens - 1] if prompt_tokens % PREFILL_GRID == 1 else [])


@given(common=prompts, prompt_tokens=prompts)
def test_where_nothing_is_promised_all_that_is_common_is_begun_with(common: int, prompt_tokens: int) -> None:
    """But for one token, so that pieces of several prompts are of one length; and a last token beyond the grid is part
    of its piece."""
    held = ANY.begins_with(common, prompt_tokens)
    assert held == (prompt_tokens - 1 if common >= prompt_tokens - 1 else common // 2 * 2)
    assert ANY.piece_end(0, 65) == 65
    assert ANY.piece_end(64, 65) == 64


@given(
    data=st.data(),
    slots=st.sets(st.integers(0, 15), min_size=1),
    rows=st.sampled_from((32, 64, 512)),
    together=st.booleans(),
)
def test_batches_are_what_llama_cpp_computes_at_once(
    data: st.DataObject, slots: set[int], rows: int, together: bool
) -> None:
    """Each has equally many tokens of slots that follow each other, two or more, and no more rows than fit; all pieces
    are computed, each in order. Several in a batch never make more batches."""
    pieces = []
    for slot in data.draw(st.permutations(sorted(slots))):
        start = data.draw(st.integers(0, 60)) * 2
        stop = data.draw(st.integers(start + 2, start + 700).filter(lambda stop: stop % PREFILL_GRID != 1))
        pieces.append(piece(slot, start, stop))
    batches = packed(pieces, rows, together=together)
    computed: dict[int, int] = defaultdict(int, {each.slot: each.start for each in pieces})
    for batch in batches:
        numbers = [each.slot for each in batch]
        assert numbers == list(range(numbers[0], numbers[0] + len(batch)))
        assert len({len(each) for each in batch}) == 1
        assert len(batch[0]) > 1
        assert sum(map(len, batch)) <= rows
        assert together or len(batch) == 1
        for each in batch:
            assert each.start == computed[each.slot]
            assert [row.position for row in each.rows()] == list(range(each.start, each.stop))
            assert [row.token for row in each.rows()] == list(range(each.start, each.stop))
            assert [row.wanted for row in each.rows()] == [False] * (len(each) - 1) + [True]
            computed[each.slot] = each.stop
    assert computed == {each.slot: each.stop for each in pieces}
    assert len(batches) <= len(packed(pieces, rows, together=False))


@pytest.mark.parametrize(
    ("given_pieces", "expected"),
    [
        pytest.param([piece(slot, 30, 60) for slot in range(16)], [[(slot, 30, 60) for slot in range(16)]], id="equal"),
        pytest.param(
            [piece(0, 0, 60), piece(1, 0, 64), piece(2, 0, 70)],
            [[(0, 0, 60), (1, 0, 60), (2, 0, 60)], [(1, 60, 64), (2, 60, 64)], [(2, 64, 70)]],
            id="of several lengths",
        ),
        pytest.param([piece(0, 0, 60), piece(2, 0, 60)], [[(0, 0, 60)], [(2, 0, 60)]], id="a gap"),
        pytest.param([piece(0, 0, 60), piece(1, 0, 61)], [[(0, 0, 60)], [(1, 0, 61)]], id="one token would be left"),
        pytest.param(
            [piece(0, 30, 1000), piece(1, 0, 300)],
            [[(0, 30, 528)], [(0, 528, 1000)], [(1, 0, 300)]],
            id="longer than a batch",
        ),
    ],
)
def test_pieces_go_together(given_pieces: list[Piece], expected: list[list[tuple[int, int, int]]]) -> None:
    """Pieces of neighbours share a batch."""
    assert bounds(packed(given_pieces, 512, together=True)) == expected


def test_no_pieces_are_no_batches() -> None:
    """Of single tokens alone."""
    assert packed([], 512, together=True) == []

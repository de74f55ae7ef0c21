"""What is measured is decided before: lengths that fit, batches that fit, and points that no fit sees."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.errors import InvalidRequest
from workers.calibration.plan import (
    DECODING_SHARE,
    FEWEST_LENGTHS,
    PAGE_POSITIONS,
    SHORTEST_TOKENS,
    Plan,
    Room,
    batches_up_to,
    ladder,
    longest_prompt,
    output_tokens,
    plan,
)

ROOM = Room(longest_tokens=8192, kv_positions=32_768, sessions=8, grid=16, chunk_tokens=512)


def planned(room: Room = ROOM, *, seconds_per_token: float = 1e-6, seconds: float = 180) -> Plan:
    """For as long prompts as fit."""
    return plan(room, longest=longest_prompt(room), seconds_per_token=seconds_per_token, seconds=seconds)


def test_lengths_are_even_in_their_logarithm_and_on_the_grid() -> None:
    """From the shortest to the longest."""
    lengths = ladder(8192, 16)
    assert (lengths[0], lengths[-1], len(lengths)) == (SHORTEST_TOKENS, 8192, 9)
    assert all(length % 16 == 0 for length in lengths)
    assert all(1.5 < longer / length < 2.6 for length, longer in pairwise(lengths))
    assert ladder(31, 1) == []


@pytest.mark.parametrize(
    ("most", "batches"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))]
)
def test_batches_double(most: int, batches: tuple[int, ...]) -> None:
    """Up to the largest itself."""
    assert batches_up_to(most) == batches


def test_long_prompts_are_decoded_in_smaller_batches() -> None:
    """As the KV allows, and as the time allows; both ends of both are there, so each coefficient shows."""
    by_kv = [visit.batches for visit in planned().visits if visit.batches]
    assert by_kv[0] == (1, 2, 4, 8)
    assert by_kv[-1][-1] < 8
    by_time = [visit.batches for visit in planned(seconds_per_token=1e-3, seconds=60).visits if visit.batches]
    assert by_time[0] == (1, 2, 4, 8)
    assert by_time[-1] == (1, 2)
    assert [len(batches) for batches in by_time] == sorted((len(batches) for batches in by_time), reverse=True)


def test_the_held_out_points_lie_between_those_that_are_fitted() -> None:
    """Neither the shortest nor the longest prompt; of decoding neither the first nor the last cell; and every batch and
    every length is seen by the fit too."""
    found = planned()
    lengths = [visit.prompt_tokens for visit in found.visits]
    assert found.held_prefill and found.held_prefill < set(lengths[1:-1])
    cells = {(visit.prompt_tokens, batch) for visit in found.visits for batch in visit.batches}
    fitted = cells - found.held_decode
    assert found.held_decode < cells
    assert {batch for _, batch in fitted} == {batch for _, batch in cells}
    assert {length for length, _ in fitted} == {length for length, _ in cells}
    mixed = {(visit.prompt_tokens, batch) for visit in found.visits for batch in visit.mixed}
    assert found.held_mixed and found.held_mixed < mixed


def test_prefills_beside_decoding_are_timed_where_they_are_long() -> None:
    """Behind each batch but the last, which nobody joins."""
    decoded = [visit for visit in planned().visits if visit.batches]
    assert not any(visit.mixed for visit in decoded[: len(decoded) // 2])
    assert all(visit.mixed == visit.batches[:-1] for visit in decoded[len(decoded) // 2 :])


def test_one_session_is_never_joined() -> None:
    """And is decoded all the same."""
    room = Room(longest_tokens=2048, kv_positions=2048, sessions=1, grid=1, chunk_tokens=512)
    found = planned(room)
    assert not found.held_mixed
    assert {visit.batches for visit in found.visits} == {(), (1,)}
    assert found.held_decode


@pytest.mark.parametrize("field", ["longest_tokens", "kv_positions"])
def test_a_model_that_holds_too_little_is_refused_by_name(field: str) -> None:
    """With what it holds."""
    given_room = {"longest_tokens": 4096, "kv_positions": 4096, "sessions": 2, "grid": 16, "chunk_tokens": 512}
    with pytest.raises(InvalidRequest, match="holds 100 positions, which is too few") as refused:
        longest_prompt(Room(**(given_room | {field: 100})))
    assert refused.value.param == "kv_budget_bytes"


@given(
    longest_tokens=st.integers(600, 200_000),
    kv_positions=st.integers(600, 2_000_000),
    sessions=st.integers(1, 16),
    grid=st.sampled_from([1, 16, 64]),
    seconds_per_token=st.floats(1e-6, 1.0),
    seconds=st.floats(0, 1000),
)
def test_every_plan_fits(
    longest_tokens: int, kv_positions: int, sessions: int, grid: int, seconds_per_token: float, seconds: float
) -> None:
    """In the context, in the KV, in the number of sessions; and where a batch is larger than two, in its share of the
    time. There is always enough to fit both models."""
    room = Room(longest_tokens, kv_positions, sessions, grid, 512)
    try:
        found = planned(room, seconds_per_token=seconds_per_token, seconds=seconds)
    except InvalidRequest:
        return
    lengths = [visit.prompt_tokens for visit in found.visits]
    assert len(set(lengths) - found.held_prefill) >= 3 and len(lengths) >= FEWEST_LENGTHS
    cells = {(visit.prompt_tokens, batch) for visit in found.visits for batch in visit.batches}
    assert len(cells - found.held_decode) >= 3 and found.held_prefill
    for visit in found.visits:
        most = max(visit.batches, default=1)
        held = visit.prompt_tokens + output_tokens(visit.prompt_tokens, sessions, 512)
        assert held <= longest_tokens and most <= sessions
        assert most * held <= kv_positions + PAGE_POSITIONS
        assert most <= 2 or most * visit.prompt_tokens * seconds_per_token <= seconds * DECODING_SHARE

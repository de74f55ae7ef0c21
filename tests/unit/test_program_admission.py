"""The plan for one candidate on one rank: each check in its order, what force may pass, and the gain of a batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import Decision, Reason, decide, has_reservation, is_forced, standing_of
from pool.rules.programs.batch_gain import Gain, gain_of, growth_of, miss_impact_s
from pool.rules.programs.facts import Means, Observation, Program, Rank, State, Status
from pool.rules.programs.ttl import decode_throughput
from tests.unit.program_snapshots import NOW_MS, PROPERTY, WARM, idle, rank, running, settings, waiting

SETTINGS = settings()
NO_GAIN = settings(enable_batch_gain_admission=False)


def decided(candidate: Program, on: Rank, given: ProgramSettings = SETTINGS, **options: Any) -> Decision:
    return decide(candidate, on, standing_of(on, given, NOW_MS), given, NOW_MS, **options)


def reason(candidate: Program, on: Rank, given: ProgramSettings = SETTINGS, **options: Any) -> Reason:
    return decided(candidate, on, given, **options).reason


def forced(name: str = "f", tokens: int = 100, **fields: Any) -> Program:
    return waiting(name, tokens, waited_ms=60_000, **fields)


def crowd(waiting_requests: int) -> Observation:
    return Observation(NOW_MS, None, waiting=waiting_requests)


def test_it_says_its_numbers() -> None:
    """For logs and diagnostics, whatever the reason."""
    found = decided(waiting("c", 300), rank(running("a", 200), means=WARM), settings(low_watermark_ratio=0.9))
    assert found == Decision("c", "r", Reason.FITS, 200, 200.0, 300, 80.0, 900.0, 1)
    assert found.admitted
    assert not decided(waiting("c", 801), rank(running("a", 200))).admitted


def test_a_candidate_of_another_rank_stays_there() -> None:
    """Unless the rules of relocation chose this one."""
    elsewhere = waiting("c", rank="s")
    assert reason(elsewhere, rank()) is Reason.OTHER_RANK
    assert reason(elsewhere, rank(), cross_rank=True) is Reason.FITS


@pytest.mark.parametrize(
    "other",
    [
        running("c"),
        idle("c"),
        waiting("c", waiting=None),
        waiting("c", status=Status.ACTING),
        forced(state=State.ACTIVE),
    ],
)
def test_only_what_waits_is_admitted(other: Program) -> None:
    """Paused, with a request."""
    assert reason(other, rank()) is Reason.NOT_WAITING


def test_requests_waiting_in_the_engine_shut_the_gate() -> None:
    """From the threshold on, while that is known; not for forced ones; 0 turns it off."""
    assert reason(waiting("c"), rank(observation=crowd(1))) is Reason.ENGINE_WAITING
    assert (
        reason(waiting("c"), rank(observation=crowd(1)), settings(admission_waiting_request_threshold=2)) is Reason.FITS
    )
    assert (
        reason(waiting("c"), rank(observation=crowd(9)), settings(admission_waiting_request_threshold=0)) is Reason.FITS
    )
    assert reason(waiting("c"), rank(observation=replace(crowd(9), began_ms=0))) is Reason.FITS
    assert reason(forced(), rank(observation=crowd(9))) is Reason.FORCED


def test_without_token_capacity_only_their_number_is_bounded() -> None:
    """Forced ones may exceed it."""
    two = settings(max_active_programs_per_target=2)
    full = rank(running("a"), idle("b"), capacity=None)
    assert reason(waiting("c", 10**6), rank(running("a"), capacity=None), two) is Reason.FITS
    assert reason(waiting("c"), full, two) is Reason.ACTIVE_PROGRAMS
    assert reason(forced(), full, two) is Reason.FORCED
    assert decided(waiting("c"), full, two).limit_tokens is None
    assert decided(waiting("c"), full, two).lacking_tokens == 0


def test_with_token_capacity_their_number_is_bounded_too() -> None:
    """Forced ones may exceed it."""
    one = settings(max_active_programs_per_target=1)
    assert reason(waiting("c"), rank(running("a")), one) is Reason.ACTIVE_PROGRAMS
    assert reason(forced(), rank(running("a")), one) is Reason.FORCED


def test_the_low_watermark_is_exact() -> None:
    """A candidate may reach it; one token more may not. Forced ones may pass it, and not the KV there is."""
    low = settings(low_watermark_ratio=0.8)
    shown = rank(running("a", 500))
    assert reason(waiting("c", 300), shown, low) is Reason.FITS
    over = decided(waiting("c", 301), shown, low)
    assert (over.reason, over.lacking_tokens) == (Reason.WATERMARK, 1)
    assert reason(forced("c", 500), shown, low) is Reason.FORCED
    without = decided(forced("c", 501), shown, low)
    assert (without.reason, without.lacking_tokens, without.limit_tokens) == (Reason.NO_KV, 1, 1000)


def test_what_is_larger_than_the_capacity_never_starts() -> None:
    """Not even by force on an idle rank: it would wait, and have room kept for it, for ever."""
    assert reason(waiting("c", 1001), rank()) is Reason.TOO_LARGE
    assert reason(forced("c", 1001), rank()) is Reason.TOO_LARGE
    assert reason(forced("c", 1000), rank()) is Reason.FORCED


def test_what_leaves_is_still_used() -> None:
    """Its KV is there until the engine says that it is gone."""
    assert reason(waiting("c", 500), rank(leaving_tokens=501)) is Reason.WATERMARK


def test_an_expected_output_replaces_the_buffer() -> None:
    """A context of 100 tokens with a hint of 200 needs 300."""
    candidate = waiting("c", 100)
    assert candidate.waiting is not None
    hinted = replace(candidate, waiting=replace(candidate.waiting, expected_output_tokens=200))
    assert decided(hinted, rank(), settings(decode_buffer_tokens=100)).required_tokens == 300
    assert decided(candidate, rank(), settings(decode_buffer_tokens=100)).required_tokens == 200


def test_decayed_holds_count_less_and_their_kv_is_still_in_use() -> None:
    """After 10 s half of its tokens, towards the watermark and the reserve; the KV has to be given up first."""
    hold = idle("h", 200, held_by_hint_ms=NOW_MS - 10_000)
    low = settings(low_watermark_ratio=0.5)
    assert reason(waiting("c", 400), rank(hold), low) is Reason.FITS
    assert reason(waiting("c", 401), rank(hold), low) is Reason.WATERMARK
    assert reason(waiting("c", 400), rank(idle("h", 200)), low) is Reason.WATERMARK
    found = decided(waiting("c", 900), rank(hold))
    assert (found.reason, found.lacking_tokens) == (Reason.NO_KV, 100)


# -- reserve ----------------------------------------------------------------------------------------------------------


def test_room_is_reserved_for_growth() -> None:
    """10 tokens a round for 4 rounds of the candidate, 4 of a fresh Program, 1 of one in its fourth, none of an old."""
    shown = rank(running("a", 100, rounds=0), idle("b", 100, rounds=3), running("c", 100, rounds=9), means=WARM)
    assert decided(waiting("x"), shown, NO_GAIN).reserve_tokens == 90
    assert reason(waiting("x", 610), shown, NO_GAIN) is Reason.FITS
    found = decided(waiting("x", 611), shown, NO_GAIN)
    assert (found.reason, found.lacking_tokens, found.gain) == (Reason.GROWTH_RESERVE, 1, None)
    assert reason(forced("x", 700), shown, NO_GAIN) is Reason.FORCED


@pytest.mark.parametrize("means", [Means(), replace(WARM, full=False), replace(WARM, growth_tokens=None)])
def test_nothing_is_reserved_while_the_window_is_cold(means: Means) -> None:
    """Nor while no growth was seen."""
    assert decided(waiting("x"), rank(running("a"), means=means)).reserve_tokens == 0


def test_each_admission_moves_the_numbers_on() -> None:
    """A batch is planned as if one came after another."""
    shown = rank(running("a", 100), idle("h", 100, rounds=9), means=WARM)
    first = waiting("x", 200)
    then = standing_of(shown, SETTINGS, NOW_MS).moved_on(first, 200, SETTINGS)
    again = rank(running("a", 100), idle("h", 100, rounds=9), running("x", 200), means=WARM)
    assert then == standing_of(again, SETTINGS, NOW_MS)
    cold = replace(shown, means=Means())
    assert standing_of(cold, SETTINGS, NOW_MS).moved_on(first, 200, SETTINGS) == standing_of(
        replace(again, means=Means()), SETTINGS, NOW_MS
    )


# -- batch gain -------------------------------------------------------------------------------------------------------


def test_a_larger_batch_may_outweigh_the_reserve() -> None:
    """Where decoding takes long enough; the gain and both costs are reported."""
    busy = replace(WARM, decode_s=60.0)
    shown = rank(running("a", 900, rounds=9), means=busy)
    found = decided(waiting("x", 80), shown)
    assert found.reason is Reason.BATCH_GAIN
    assert found.admitted
    model = SETTINGS.decode_throughput_model
    relative = decode_throughput(model, 2, 980) / decode_throughput(model, 1, 900) - 1
    assert found.gain == Gain(pytest.approx(60 * relative), miss_impact_s(waiting("x", 80), SETTINGS), 0.0)
    assert reason(waiting("x", 80), replace(shown, means=replace(WARM, decode_s=None))) is Reason.GROWTH_RESERVE
    assert reason(waiting("x", 101), shown) is Reason.WATERMARK


def test_it_never_takes_all_room_of_protected_programs() -> None:
    """They had room for some rounds and would have none: the loss is infinite."""
    shown = rank(running("a", 900), means=replace(WARM, decode_s=10.0**9))
    found = decided(waiting("x", 80), shown)
    assert found.reason is Reason.GROWTH_RESERVE
    assert found.gain is not None
    assert found.gain.loss_s == math.inf


def test_the_loss_is_the_part_of_their_rounds_that_no_longer_fits() -> None:
    """8 rounds of two protected Programs fit before; with a candidate of 90 and its own 4 rounds, 1 of 8 does: seven
    times the mean cost of a miss."""
    shown = rank(running("a", 400), idle("b", 460), means=WARM)
    candidate = waiting("x", 90)
    growth = growth_of(shown, SETTINGS)
    found = gain_of(candidate, growth, SETTINGS, room_tokens=140, required_tokens=90)
    mean = (miss_impact_s(running("a", 400), SETTINGS) + miss_impact_s(idle("b", 460), SETTINGS)) / 2
    assert found.loss_s == pytest.approx(7 * mean)
    assert (growth.batch, growth.context_tokens, growth.protected) == (1, 400, 2)


def test_nothing_is_lost_where_nothing_was_left() -> None:
    """No room before, or no growth, or nobody protected."""
    candidate = waiting("x", 90)
    room: dict[str, Any] = {"room_tokens": -5.0, "required_tokens": 90}
    assert gain_of(candidate, growth_of(rank(running("a"), means=WARM), SETTINGS), SETTINGS, **room).loss_s == 0
    still = replace(WARM, growth_tokens=0.0)
    assert gain_of(candidate, growth_of(rank(running("a"), means=still), SETTINGS), SETTINGS, **room).loss_s == 0
    old = rank(running("a", rounds=4), means=WARM)
    assert gain_of(candidate, growth_of(old, SETTINGS), SETTINGS, **room).loss_s == 0


def test_an_idle_rank_is_not_kept_idle_for_growth_to_come() -> None:
    """Unless idle Programs there are protected, whose TTL will end."""
    assert reason(waiting("x", 990), rank(means=WARM)) is Reason.BATCH_GAIN
    assert reason(waiting("x", 890), rank(idle("a", 100), means=WARM)) is Reason.GROWTH_RESERVE
    assert reason(waiting("x", 890), rank(idle("a", 100, rounds=4), means=WARM)) is Reason.BATCH_GAIN


# -- waiting times ----------------------------------------------------------------------------------------------------


def test_half_of_a_force_wait_makes_a_reservation() -> None:
    """And the whole of it forces."""
    at = {ms: waiting("c", waited_ms=ms) for ms in (29_999, 30_000, 59_999, 60_000)}
    assert [has_reservation(program, NOW_MS) for program in at.values()] == [False, True, True, True]
    assert [is_forced(program, NOW_MS) for program in at.values()] == [False, False, False, True]
    assert not has_reservation(running("c"), NOW_MS)
    assert not is_forced(running("c"), NOW_MS)


programs = st.builds(
    lambda name, tokens, rounds, kind: kind(name, tokens, rounds=rounds),
    st.uuids().map(str),
    st.integers(0, 400),
    st.integers(0, 6),
    st.sampled_from([running, idle]),
)


@PROPERTY
@given(
    st.lists(programs, max_size=6),
    st.integers(0, 1200),
    st.integers(0, 120_000),
    st.floats(0.1, 1.0),
    st.sampled_from([WARM, Means(), replace(WARM, decode_s=500.0)]),
    st.integers(1, 6),
)
def test_never_over_the_limit(
    active: list[Program], tokens: int, waited_ms: int, ratio: float, means: Means, most: int
) -> None:
    """Unless forced, never above the low watermark nor in too great a number; never above the KV there is. Whoever fits
    with the reserve is admitted."""
    given_settings = settings(low_watermark_ratio=ratio, max_active_programs_per_target=most)
    shown = rank(*active, means=means)
    found = decided(waiting("c", tokens, waited_ms=waited_ms), shown, given_settings)
    after = shown.ledger_tokens + tokens
    if found.admitted:
        assert after <= 1000
        assert (found.reason is Reason.FORCED) == (waited_ms >= 60_000)
    if found.admitted and found.reason is not Reason.FORCED:
        assert after <= ratio * 1000
        assert len(active) < most
    if len(active) < most and after + found.reserve_tokens <= ratio * 1000:
        assert found.admitted

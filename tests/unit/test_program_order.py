"""Who comes first, whom nobody overtakes, when force comes, and how long a request waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.rules.programs.admission import standing_of
from pool.rules.programs.facts import Means, Program, Rank
from pool.rules.programs.force import active_rounds, force_ms, give_up_ms
from pool.rules.programs.order import holders, ordered, overtakes
from tests.unit.program_snapshots import NOW_MS, PROPERTY, WARM, idle, rank, running, settings, waiting

SETTINGS = settings()
FCFS = settings(resume_order="fcfs")


def names(programs: list[Program]) -> str:
    return "".join(program.id for program in programs)


def test_the_order() -> None:
    """Expired force deadlines, then priority, then those that have not yielded, then the latest finish."""
    programs = [
        waiting("a", waited_ms=100, last_finish_ms=50),
        waiting("b", waited_ms=10, last_finish_ms=90),
        waiting("c", last_finish_ms=99, yielded=True),
        waiting("d", priority=1, yielded=True),
        waiting("e", waited_ms=60_000, priority=-1),
        running("x"),
    ]
    assert names(ordered(programs, SETTINGS, NOW_MS)) == "edbac"
    assert names(ordered(programs, FCFS, NOW_MS)) == "edabc"
    assert names(ordered(programs, SETTINGS, NOW_MS, cross_rank=True)) == "edabc"


def test_ties_go_by_arrival_and_then_by_id() -> None:
    """In both orders."""
    programs = [waiting("c", waited_ms=5), waiting("b", waited_ms=5), waiting("a", waited_ms=4)]
    assert names(ordered(programs, SETTINGS, NOW_MS)) == names(ordered(programs, FCFS, NOW_MS)) == "bca"


waiters = st.lists(
    st.builds(
        lambda name, waited, priority, yielded, finish: waiting(
            name, waited_ms=waited, priority=priority, yielded=yielded, last_finish_ms=finish
        ),
        st.text("abc", min_size=1, max_size=3),
        st.sampled_from([0, 10, 60_000]),
        st.integers(0, 1),
        st.booleans(),
        st.integers(0, 2),
    ),
    max_size=8,
    unique_by=lambda program: program.id,
)


@PROPERTY
@given(waiters, st.randoms(use_true_random=False), st.booleans(), st.sampled_from([SETTINGS, FCFS]))
def test_the_order_is_total_and_stable(programs: list[Program], random, cross_rank: bool, given_settings) -> None:  # type: ignore[no-untyped-def]
    """Whatever the order of the snapshot, and when some have left."""
    found = ordered(programs, given_settings, NOW_MS, cross_rank=cross_rank)
    shuffled = list(programs)
    random.shuffle(shuffled)
    assert ordered(shuffled, given_settings, NOW_MS, cross_rank=cross_rank) == found
    some = [program for program in found if random.random() < 0.5]
    assert ordered(some, given_settings, NOW_MS, cross_rank=cross_rank) == some


# -- reservations -----------------------------------------------------------------------------------------------------


def test_holders_come_by_expired_deadline_then_by_priority() -> None:
    """Who has not waited for half of its wait holds nothing, nor does one that could never fit."""
    programs = [
        waiting("a", waited_ms=29_000),
        waiting("b", waited_ms=30_000),
        waiting("c", waited_ms=31_000),
        waiting("d", waited_ms=30_000, priority=1),
        waiting("e", waited_ms=60_000),
        waiting("f", waited_ms=61_000, priority=-1),
        waiting("g", 1001, waited_ms=90_000),
    ]
    assert names(holders(rank(*programs), SETTINGS, NOW_MS)) == "fedcb"
    assert names(holders(rank(*programs, capacity=None), SETTINGS, NOW_MS)) == "gfedcb"
    assert holders(replace(rank(), waiting=(running("x"),)), SETTINGS, NOW_MS) == []


def passes(candidate: Program, holder: Program, on: Rank, **fields: object) -> bool:
    given_settings = settings(**fields)
    return not overtakes(candidate, holder, on, standing_of(on, given_settings, NOW_MS), given_settings, NOW_MS)


def test_nobody_takes_room_that_the_holder_needs() -> None:
    """What it leaves, anybody may have."""
    holder = waiting("h", 400, waited_ms=30_000)
    assert passes(waiting("c", 100), holder, rank(running("a", 500)))
    assert not passes(waiting("c", 101), holder, rank(running("a", 500)))
    assert not passes(waiting("c", 100), holder, rank(running("a", 500)), low_watermark_ratio=0.99)
    assert not passes(waiting("c", 1), holder, rank(running("a", 500)), max_active_programs_per_target=2)
    assert not passes(waiting("c", 1), holder, rank(running("a"), capacity=None), max_active_programs_per_target=2)
    assert passes(waiting("c", 1), holder, rank(capacity=None), max_active_programs_per_target=2)


def test_the_higher_pass_until_the_deadline() -> None:
    """Forced ones and larger priorities; after its own deadline nobody does, and the KV there is counts alone."""
    holder = waiting("h", 900, waited_ms=30_000)
    full = rank(running("a", 90))
    assert passes(waiting("c", 20, waited_ms=60_000), holder, full)
    assert passes(waiting("c", 20, priority=1), holder, full)
    assert not passes(waiting("c", 20), holder, full)
    forced = waiting("h", 900, waited_ms=60_000)
    assert not passes(waiting("c", 20, priority=1, waited_ms=60_000), forced, full)
    assert passes(waiting("c", 10), forced, full, low_watermark_ratio=0.5, max_active_programs_per_target=1)
    assert not overtakes(running("c", 10), holder, full, standing_of(full, SETTINGS, NOW_MS), SETTINGS, NOW_MS)


def test_one_that_no_watermark_allows_for_holds_the_whole_rank() -> None:
    """It can only start by force, so it is held against the KV there is."""
    holder = waiting("h", 700, waited_ms=30_000)
    assert passes(waiting("c", 100), holder, rank(running("a", 200)), low_watermark_ratio=0.6)
    assert not passes(waiting("c", 101), holder, rank(running("a", 200)), low_watermark_ratio=0.6)


# -- force and time-outs ----------------------------------------------------------------------------------------------


def forced_after_s(on: Rank, *, ahead: int = 0, deadline_s: float | None = None, **fields: object) -> float:
    return (force_ms(on, settings(**fields), NOW_MS, ahead=ahead, deadline_s=deadline_s) - NOW_MS) / 1000


def test_the_force_wait_is_three_times_what_is_ahead() -> None:
    """A fresh Program's 4 rounds and 20 ahead with 4 each, at 2 requests a second: three times 42 s."""
    assert forced_after_s(rank(running("a"), means=WARM), ahead=20) == 126


def test_a_running_program_has_at_least_one_round_left() -> None:
    """An idle one beyond its rounds has none."""
    shown = rank(running("a", rounds=9), idle("b", rounds=9), running("c", rounds=1), idle("d", rounds=3))
    assert active_rounds(shown, 4) == 1 + 0 + 3 + 1
    assert active_rounds(replace(shown, programs=(waiting("w"),)), 4) == 0


def test_the_force_wait_is_clamped() -> None:
    """At least 30 s, or the longest where that is shorter; at most the longest."""
    assert forced_after_s(rank(means=WARM)) == 30
    assert forced_after_s(rank(means=WARM), force_resume_timeout_seconds=20) == 20
    assert forced_after_s(rank(means=WARM), ahead=10_000) == 300


@pytest.mark.parametrize(
    "means",
    [Means(), replace(WARM, full=False), replace(WARM, throughput_per_s=None), replace(WARM, throughput_per_s=0.0)],
)
def test_a_missing_figure_means_the_longest_wait(means: Means) -> None:
    """A cold window, or no throughput."""
    assert forced_after_s(rank(means=means), ahead=1) == 300


def test_a_deadline_shortens_both_waits() -> None:
    """And never makes one longer; force never comes after the queue timeout."""
    assert forced_after_s(rank(means=WARM), deadline_s=4.5) == 4.5
    assert forced_after_s(rank(means=WARM), deadline_s=900) == 30
    assert forced_after_s(rank(), queue_timeout_seconds=100) == 100
    assert give_up_ms(SETTINGS, 5) == 600_005
    assert give_up_ms(SETTINGS, 5, 4.5) == 4505
    assert give_up_ms(SETTINGS, 5, 900.0) == 600_005


def test_a_later_request_never_postpones_force() -> None:
    """What was said first stands; only its own deadline can bring it forward."""
    first = NOW_MS + 7000
    cold = rank()
    assert force_ms(cold, SETTINGS, NOW_MS, ahead=9, current_ms=first) == first
    assert force_ms(cold, SETTINGS, NOW_MS, ahead=9, current_ms=first, deadline_s=3) == NOW_MS + 3000
    assert force_ms(cold, SETTINGS, NOW_MS, ahead=9, current_ms=first, deadline_s=8) == first

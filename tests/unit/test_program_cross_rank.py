"""Resuming on another rank: every gate, and the choice of the destination."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import Decision, Reason
from pool.rules.programs.cross_rank import Gate, plan_relocations, relocate, standing_as_destination
from pool.rules.programs.facts import Means, Observation, Program, Rank
from tests.unit.program_snapshots import NOW_MS, WARM, idle, rank, running, settings, waiting

GLOBAL = settings(global_queue=True, enable_batch_gain_admission=False)
FIRST = waiting("first", 10, waited_ms=9000, was_active=True, last_finish_ms=NOW_MS)
MOVED = waiting("moved", 100, waited_ms=5000, was_active=True)
SOURCE = rank(running("a", 950), FIRST, MOVED, means=WARM)


def other(name: str = "s", *programs: Program, **fields: Any) -> Rank:
    return rank(*programs, **({"id": name, "means": WARM} | fields))


def tried(
    *ranks: Rank, program: Program = MOVED, given: ProgramSettings = GLOBAL, pooled: Means = WARM
) -> Decision | Gate:
    standings = {each.id: standing_as_destination(each, given, NOW_MS, pooled) for each in ranks}
    return relocate(program, {each.id: each for each in ranks}, standings, given, NOW_MS)


def destination(*ranks: Rank, **fields: Any) -> str | None:
    found = tried(*ranks, **fields)
    return found.rank if isinstance(found, Decision) else None


def test_a_program_moves_where_there_is_room() -> None:
    """With the reason and the numbers of an ordinary admission there."""
    found = tried(SOURCE, other())
    assert isinstance(found, Decision)
    assert (found.rank, found.reason, found.required_tokens) == ("s", Reason.FITS, 100)


def test_one_that_was_never_active_moves_like_others() -> None:
    """It has no KV to lose; else those that begin on one rank would wait there beside idle ones."""
    assert destination(SOURCE, other(), program=replace(MOVED, was_active=False)) == "s"


def test_the_gates_in_their_order() -> None:
    """The first that stays shut is named."""
    early = replace(MOVED, waiting=waiting("m", waited_ms=999).waiting)
    assert tried(SOURCE, other(), given=settings()) is Gate.OFF
    assert tried(SOURCE, other(), program=replace(MOVED, waiting=None)) is Gate.NOT_WAITING
    assert tried(replace(SOURCE, means=Means()), other()) is Gate.COLD_SOURCE
    assert tried(SOURCE, other(), program=early) is Gate.TOO_SOON
    assert tried(replace(SOURCE, waiting=(MOVED,)), other()) is Gate.NO_PRESSURE
    assert tried(SOURCE) is Gate.NO_DESTINATION


@pytest.mark.parametrize(
    ("before", "under_pressure"),
    [
        (FIRST, True),
        (replace(FIRST, waiting=waiting("f", waited_ms=999).waiting), False),
        (replace(FIRST, last_finish_ms=0, waiting=waiting("f", waited_ms=4000).waiting), False),
        (replace(FIRST, waiting=None), False),
    ],
)
def test_one_that_comes_before_it_and_has_waited_is_pressure(before: Program, under_pressure: bool) -> None:
    """Not one that came just now, nor one behind it."""
    found = destination(replace(SOURCE, waiting=(before, MOVED)), other())
    assert (found == "s") is under_pressure


def test_requests_in_the_engine_are_pressure() -> None:
    """While that is known; with the gate off, it is always taken for granted."""
    alone = replace(SOURCE, waiting=(MOVED,))
    crowded = Observation(NOW_MS, None, waiting=1)
    assert destination(replace(alone, observation=crowded), other()) == "s"
    assert destination(replace(alone, observation=replace(crowded, began_ms=0)), other()) is None
    off = settings(global_queue=True, admission_waiting_request_threshold=0)
    assert destination(alone, other(), given=off) == "s"


def test_a_destination_that_another_waiter_calls_its_last_is_left_to_it() -> None:
    """Whether or not that fits there."""
    assert destination(SOURCE, other("s", waiting("x", rank="s"))) is None


def test_the_destination_has_more_room_by_the_context_and_a_fifth() -> None:
    """Below the low watermark. The source has 50 tokens, so it must have 170."""
    assert destination(SOURCE, other("s", running("x", 830, rounds=9), means=Means()), pooled=Means()) == "s"
    assert destination(SOURCE, other("s", running("x", 831, rounds=9), means=Means()), pooled=Means()) is None
    low = settings(global_queue=True, low_watermark_ratio=0.9, cross_rank_headroom_ratio=1.0)
    cold = other("s", running("x", 800, rounds=9), means=Means())
    assert destination(SOURCE, cold, given=low, pooled=Means()) == "s"
    assert destination(SOURCE, replace(cold, ledger_tokens=801), given=low, pooled=Means()) is None


def test_an_idle_destination_is_judged_by_the_pooled_window() -> None:
    """It never fills its own: growth is reserved as elsewhere, 40 tokens for the candidate."""
    snug = other("s", running("x", 780, rounds=9), means=Means())
    assert destination(SOURCE, snug) == "s"
    greedy = replace(WARM, growth_tokens=31)
    assert destination(SOURCE, snug, pooled=greedy) is None
    assert destination(SOURCE, replace(snug, means=WARM), pooled=greedy) == "s"


def test_without_token_capacity_the_number_of_programs_decides() -> None:
    """Headroom is not asked."""
    two = settings(global_queue=True, max_active_programs_per_target=2)
    source = replace(SOURCE, capacity_tokens=None)
    assert destination(source, other("s", running("x"), capacity=None), given=two) == "s"
    assert destination(source, other("s", running("x"), running("y"), capacity=None), given=two) is None
    one_busy = [other("s", running("x"), capacity=None), other("t", capacity=None)]
    assert destination(source, *one_busy, given=two) == "t"


def test_its_last_rank_is_no_destination() -> None:
    """Though it would be admitted there by now."""
    off = settings(global_queue=True, admission_waiting_request_threshold=0)
    assert tried(rank(MOVED, means=WARM, capacity=None), given=off) is Gate.NO_DESTINATION


def test_the_best_destination() -> None:
    """Fewest requests waiting in the engine, then least projected use, then fewest active Programs, then the id."""
    two = settings(global_queue=True, admission_waiting_request_threshold=2)
    crowded = Observation(NOW_MS, None, waiting=1)
    assert destination(SOURCE, other("s", observation=crowded), other("t", running("x", 100)), given=two) == "t"
    assert destination(SOURCE, other("s", running("x", 101, rounds=9)), other("t", running("y", 100, rounds=9))) == "t"
    halves = [running("x", 50, rounds=9), idle("y", 50, rounds=9)]
    assert destination(SOURCE, other("s", *halves), other("t", running("z", 100, rounds=9))) == "t"
    assert destination(SOURCE, other("t"), other("s")) == "s"


# -- all that wait ----------------------------------------------------------------------------------------------------


def test_relocations_go_by_arrival_and_each_counts_for_the_next() -> None:
    """Whatever the order on a rank is; a destination is not filled twice."""
    source = rank(
        running("a", 950),
        FIRST,
        waiting("late", 450, waited_ms=2000, was_active=True, last_finish_ms=9),
        waiting("early", 450, waited_ms=3000, was_active=True),
        means=WARM,
    )
    found = plan_relocations([source, other()], GLOBAL, NOW_MS, WARM, 8)
    assert [(each.source, each.decision.program, each.decision.rank) for each in found] == [("r", "early", "s")]
    both = plan_relocations([source, other("s"), other("t")], GLOBAL, NOW_MS, WARM, 8)
    assert [(each.decision.program, each.decision.rank) for each in both] == [("early", "s"), ("late", "t")]
    assert len(plan_relocations([source, other("s"), other("t")], GLOBAL, NOW_MS, WARM, 1)) == 1


def test_nobody_goes_whom_its_own_rank_would_admit_now() -> None:
    """Two that came after its last plan, and have waited for long as nobody has planned since."""
    off = settings(global_queue=True, admission_waiting_request_threshold=0)
    source = rank(FIRST, MOVED, means=WARM, capacity=None)
    assert plan_relocations([source, other(capacity=None)], off, NOW_MS, WARM, 8) == ()
    full = replace(source, active=off.max_active_programs_per_target)
    assert len(plan_relocations([full, other(capacity=None)], off, NOW_MS, WARM, 8)) == 2


def test_nothing_moves_where_it_is_off_or_nobody_waits() -> None:
    """As between idle ranks."""
    assert plan_relocations([SOURCE, other()], settings(), NOW_MS, WARM, 8) == ()
    assert plan_relocations([other("r"), other("s")], GLOBAL, NOW_MS, WARM, 8) == ()

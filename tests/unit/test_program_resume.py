"""A batch of resumes on one rank, who gives way for those that lack room, and who yields after its segment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import Reason, decide, standing_of
from pool.rules.programs.facts import Observation, PauseReason, Program, Rank
from pool.rules.programs.resume import RankPlan, plan_rank, yields
from tests.unit.program_snapshots import NOW_MS, PROPERTY, WARM, idle, rank, running, settings, waiting

SETTINGS = settings()


def planned(*programs: Program, given: ProgramSettings = SETTINGS, limit: int = 8, **fields: Any) -> RankPlan:
    return plan_rank(rank(*programs, **fields), given, NOW_MS, limit)


def reasons(plan: RankPlan) -> dict[str, Reason]:
    return {decision.program: decision.reason for decision in plan.decisions}


def paused(plan: RankPlan) -> list[str]:
    assert {reason for _, reason in plan.pauses} <= {PauseReason.CAPACITY_REPAIR}
    return [name for name, _ in plan.pauses]


def forced(name: str, tokens: int = 100, **fields: Any) -> Program:
    return waiting(name, tokens, waited_ms=60_000, **fields)


# -- a batch ----------------------------------------------------------------------------------------------------------


def test_each_is_admitted_on_the_numbers_that_the_ones_before_it_left() -> None:
    """Those that do not fit any more stay, and a smaller one behind them may go."""
    found = planned(running("a", 300), waiting("b", 400), waiting("c", 301), waiting("d", 300))
    assert reasons(found) == {"b": Reason.FITS, "c": Reason.WATERMARK, "d": Reason.FITS}
    assert [(each.used_tokens, each.active) for each in found.decisions] == [(300, 1), (700, 2), (700, 2)]
    assert [each.program for each in found.admissions] == ["b", "d"]


def test_a_batch_is_bounded() -> None:
    """No candidate is looked at beyond the last admission; those refused do not count."""
    found = planned(waiting("a", 10), waiting("b", 1000), waiting("c", 10), waiting("d", 10), limit=2)
    assert list(reasons(found)) == ["a", "b", "c"]
    assert planned(waiting("a"), limit=0) == RankPlan()


@PROPERTY
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from([0, 29_000, 31_000, 61_000]), st.integers(0, 1)), max_size=7
    ),
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from([running, idle])), max_size=4),
    st.floats(0.4, 1.0),
    st.integers(1, 5),
)
def test_a_batch_keeps_to_every_limit(
    waiters: list[tuple[int, int, int]], active: list[tuple[int, Any]], ratio: float, most: int
) -> None:
    """All together, not just one by one. Who was admitted would have been alone; and nobody but a larger priority or a
    forced one took room that the holder needs."""
    given_settings = settings(low_watermark_ratio=ratio, max_active_programs_per_target=most)
    shown = rank(
        *(kind(f"a{place}", tokens) for place, (tokens, kind) in enumerate(active)),
        *(waiting(f"w{i}", tokens, waited_ms=ms, priority=high) for i, (tokens, ms, high) in enumerate(waiters)),
        means=WARM,
    )
    found = plan_rank(shown, given_settings, NOW_MS, 8)
    by_id = {program.id: program for program in shown.waiting}
    used = shown.ledger_tokens
    for place, decision in enumerate(found.admissions):
        used += decision.required_tokens
        alone = decide(
            by_id[decision.program], shown, standing_of(shown, given_settings, NOW_MS), given_settings, NOW_MS
        )
        assert used <= 1000
        if decision.reason is not Reason.FORCED:
            assert used <= ratio * 1000
            assert shown.active + place < most
            assert alone.reason is not Reason.WATERMARK
    assert {name for name, _ in found.pauses} | set(found.marks) <= {program.id for program in shown.programs}


# -- reservations -----------------------------------------------------------------------------------------------------


def test_after_half_its_force_wait_nobody_overtakes_any_more() -> None:
    """Neither those behind it nor, where the latest finish comes first, those before it."""
    large = waiting("large", 800, waited_ms=30_000)
    recent, later = waiting("recent", 50, last_finish_ms=NOW_MS), waiting("small", 50)
    found = planned(running("a", 250), large, recent, later)
    assert reasons(found) == {"recent": Reason.OVERTAKING, "large": Reason.WATERMARK, "small": Reason.OVERTAKING}
    early = replace(large, waiting=waiting("large", 800, waited_ms=29_999).waiting)
    found = planned(running("a", 250), early, recent, later)
    assert [each.program for each in found.admissions] == ["recent", "small"]


def test_the_reservation_passes_on() -> None:
    """Once its holder is admitted, to the next in the same batch."""
    first, second = waiting("first", 500, waited_ms=40_000), waiting("second", 600, waited_ms=31_000)
    small = waiting("z", 50)
    assert reasons(planned(first, second, small)) == {
        "first": Reason.FITS,
        "second": Reason.WATERMARK,
        "z": Reason.OVERTAKING,
    }
    assert reasons(planned(first, small)) == {"first": Reason.FITS, "z": Reason.FITS}


def test_one_larger_than_the_capacity_stops_nobody() -> None:
    """It could hold the rank for ever."""
    assert reasons(planned(forced("a", 1001), waiting("b", 900))) == {"a": Reason.TOO_LARGE, "b": Reason.FITS}


# -- who gives way ----------------------------------------------------------------------------------------------------


def test_idle_programs_within_their_ttl_are_never_paused_for_others() -> None:
    """Nor running ones marked, for one that is not forced."""
    found = planned(idle("a", 500), running("b", 500), waiting("w", 100, waited_ms=59_999))
    assert (found.pauses, found.marks) == ((), ())
    assert planned(idle("a", 1000), forced("w", 100)).pauses == ()


def test_a_forced_one_without_kv_has_the_fewest_running_ones_marked() -> None:
    """Which pause when idle; those that had their place longest, as in a repair."""
    shown = [running("a", 300, activated_ms=1), running("b", 300, activated_ms=2), idle("c", 300), running("d", 100)]
    assert planned(*shown, forced("w", 300)).marks == ("a",)
    assert planned(*shown, forced("w", 301)).marks == ("a", "b")
    assert planned(*shown, forced("w", 900)).marks == ("a", "b", "d")


def test_what_is_on_its_way_out_is_not_asked_for_twice() -> None:
    """Marked ones and those whose KV leaves count already."""
    leaving = planned(running("a", 500), forced("w", 500), leaving_tokens=300)
    assert (reasons(leaving)["w"], leaving.marks) == (Reason.NO_KV, ())
    assert planned(running("a", 500, pause_when_idle=True), running("b", 500), forced("w", 500)).marks == ()
    assert planned(running("a", 500, pause_when_idle=True), running("b", 500), forced("w", 501)).marks == ("b",)


def test_running_ones_are_marked_for_the_holder_alone() -> None:
    """Of several forced ones, for the longest overdue."""
    first, second = waiting("w", 700, waited_ms=90_000), waiting("x", 100, waited_ms=60_000, priority=1)
    found = planned(running("a", 500), running("b", 500), first, second)
    assert reasons(found) == {"x": Reason.NO_KV, "w": Reason.NO_KV}
    assert found.marks == ("a", "b")


def test_holds_beyond_the_automatic_ttl_end_for_whoever_lacks_their_kv() -> None:
    """The longest first, as many as are needed; then nobody is marked."""
    holds = [idle(f"h{age}", 200, held_by_hint_ms=NOW_MS - age) for age in (90_000, 80_000)]
    found = planned(*holds, running("a", 500), waiting("w", 300))
    assert (reasons(found)["w"], paused(found)) == (Reason.NO_KV, ["h90000"])
    found = planned(*holds, running("a", 500), forced("w", 500))
    assert (paused(found), found.marks) == (["h90000", "h80000"], ())
    assert planned(*holds, running("a", 400), waiting("w", 200)).pauses == ()


def test_a_blocking_child_pauses_its_own_idle_ancestors() -> None:
    """The farthest first, as many as it needs; not those that run, are elsewhere, or are nobody's to it."""
    tree = [idle("root", 300), idle("middle", 300), running("parent", 200), idle("other", 200)]
    child = waiting("child", 250, awaited_by=("parent", "middle", "root", "gone"))
    assert paused(planned(*tree, child)) == ["root"]
    assert paused(planned(*tree, replace(child, context_tokens=301))) == ["root", "middle"]
    assert paused(planned(*tree, replace(child, context_tokens=900))) == ["root", "middle"]
    assert paused(planned(*tree, replace(child, awaited_by=()))) == []
    assert paused(planned(*tree, child, leaving_tokens=250)) == ["root"]
    assert paused(planned(*tree[:3], replace(child, context_tokens=200), leaving_tokens=250)) == []


def test_children_of_one_parent_pause_it_once() -> None:
    """And it counts for both, until the next plan."""
    children = [waiting(f"c{each}", 300, awaited_by=("parent",)) for each in range(2)]
    assert paused(planned(idle("parent", 500), running("x", 500), *children)) == ["parent"]


def test_a_child_lacks_a_place_or_growth_too() -> None:
    """Whatever the room is that it lacks, its ancestors make it."""
    one = settings(max_active_programs_per_target=2)
    parents = [idle("a", 100), idle("b", 100)]
    child = waiting("child", 100, awaited_by=("a", "b"))
    assert paused(planned(*parents, child, given=one)) == ["b"]
    assert paused(planned(*parents, child, given=one, capacity=None)) == ["b"]
    growing = planned(*parents, replace(child, context_tokens=790), means=WARM)
    assert (reasons(growing)["child"], paused(growing)) == (Reason.GROWTH_RESERVE, ["b", "a"])


def test_a_child_behind_a_reservation_pauses_all_its_idle_ancestors() -> None:
    """They wait as long as it does, and the holder needs the room."""
    found = planned(
        idle("parent", 300),
        idle("root", 100),
        waiting("child", 50, awaited_by=("parent", "root")),
        waiting("h", 700, waited_ms=30_000),
    )
    assert (reasons(found)["child"], paused(found)) == (Reason.OVERTAKING, ["root", "parent"])


def test_a_shut_gate_pauses_nobody() -> None:
    """Room on the rank is not what it lacks."""
    found = planned(
        idle("parent", 900),
        waiting("child", 500, awaited_by=("parent",)),
        observation=Observation(NOW_MS, None, waiting=1),
    )
    assert (reasons(found)["child"], found.pauses) == (Reason.ENGINE_WAITING, ())


# -- yield ------------------------------------------------------------------------------------------------------------

DONE = idle("d", 400, rounds=14)


def yielding(*others: Program, program: Program = DONE, given: ProgramSettings = SETTINGS, **fields: Any) -> bool:
    return yields(program, rank(program, *others, **fields), given, NOW_MS)


def test_a_program_yields_after_its_segment_to_one_that_waits() -> None:
    """Not before, not while it runs, not without a waiter, nor where that fits beside it."""
    full, waiter = running("a", 600), waiting("w", 300)
    assert yielding(full, waiter)
    assert not yielding(full, waiter, program=replace(DONE, rounds=13))
    assert yielding(full, waiter, program=replace(DONE, rounds=13), given=settings(max_segment_rounds=13))
    assert not yielding(full, waiter, program=running("d", 400, rounds=14))
    assert not yielding(full)
    assert not yielding(waiter)
    assert not yielding(full, waiting("w", 1001))
    assert not yielding(full, program=replace(DONE, waiting=waiter.waiting))


@pytest.mark.parametrize(("marked_tokens", "expected"), [(299, True), (300, False)])
def test_it_stays_where_marked_programs_will_free_enough(marked_tokens: int, expected: bool) -> None:
    """Or what leaves already will."""
    marked = running("m", marked_tokens, pause_when_idle=True)
    assert yielding(running("a", 600), marked, waiting("w", 300)) is expected
    assert yielding(running("a", 600), waiting("w", 300), leaving_tokens=marked_tokens) is expected


def test_it_yields_to_the_holder_of_a_reservation() -> None:
    """Though the first in the order fits."""
    first = waiting("first", 10, last_finish_ms=NOW_MS)
    assert not yielding(running("a", 100), first)
    assert yielding(running("a", 100), first, waiting("holder", 900, waited_ms=30_000))


def test_who_yielded_ranks_behind_its_equals() -> None:
    """Though it finished last."""
    found: Rank = rank(waiting("d", 900, yielded=True, last_finish_ms=NOW_MS), waiting("w", 900))
    assert [each.program for each in plan_rank(found, SETTINGS, NOW_MS, 8).admissions] == ["w"]

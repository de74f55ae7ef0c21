"""Who gives way when a rank holds too much: the fewest that reach the low watermark, by score, never all."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.rules.programs.facts import Means, PauseReason, Program
from pool.rules.programs.repair import Repair, Victim, fewest, plan_repair, projected_tokens, score, victims
from tests.unit.program_snapshots import NOW_MS, PROPERTY, WARM, idle, rank, running, settings

SETTINGS = settings()


def since(seconds: float) -> int:
    return NOW_MS - round(seconds * 1000)


def test_overflow_by_one_token_pauses_exactly_one() -> None:
    """And a full rank pauses nobody."""
    assert plan_repair(rank(idle("a", 500), idle("b", 500)), SETTINGS, NOW_MS) == Repair(projected_tokens=1000)
    found = plan_repair(rank(idle("a", 500), idle("b", 500), idle("c", 1)), SETTINGS, NOW_MS)
    assert found == Repair((("a", PauseReason.CAPACITY_REPAIR),), (), 1001, 0)


def test_idle_ones_are_paused_and_running_ones_are_marked() -> None:
    """The one that has had its place longest comes first."""
    shown = rank(
        running("a", 500, activated_ms=since(9)),
        idle("b", 500, activated_ms=since(8)),
        running("c", 700),
        idle("d", 600),
    )
    found = plan_repair(shown, SETTINGS, NOW_MS)
    assert found == Repair((("d", PauseReason.CAPACITY_REPAIR),), ("c",), 2300, 0)
    found = plan_repair(rank(*shown.programs[:3]), SETTINGS, NOW_MS)
    assert found == Repair((), ("c",), 1700, 0)


def test_it_begins_above_the_high_watermark_and_ends_at_the_low_one() -> None:
    """Between them nothing happens."""
    marks = settings(high_watermark_ratio=0.9, low_watermark_ratio=0.5)
    hundreds = [idle(f"p{each}", 100, activated_ms=since(each)) for each in range(10)]
    assert plan_repair(rank(*hundreds[:9]), marks, NOW_MS).pauses == ()
    found = plan_repair(rank(*hundreds), marks, NOW_MS)
    assert [name for name, _ in found.pauses] == ["p9", "p8", "p7", "p6", "p5"]


def test_what_is_projected() -> None:
    """A mean output for each request in flight; without marked Programs and what leaves, which will be free."""
    shown = rank(
        running("a", 400), running("b", 300, pause_when_idle=True), idle("c", 200), means=WARM, leaving_tokens=50
    )
    assert projected_tokens(shown, SETTINGS, NOW_MS) == 400 + 200 + 20
    assert projected_tokens(replace(shown, ledger_tokens=0), SETTINGS, NOW_MS) == 0
    assert projected_tokens(replace(shown, means=replace(WARM, output_tokens=19.1)), SETTINGS, NOW_MS) == 620


def test_a_repair_is_not_repeated_while_what_it_paused_leaves() -> None:
    """Paused ones count as used until their KV is gone, and marked ones until they are idle; both are on their way."""
    assert plan_repair(rank(idle("b", 500), leaving_tokens=501), SETTINGS, NOW_MS).pauses == ()
    shown = rank(running("a", 501, pause_when_idle=True), running("b", 500))
    assert plan_repair(shown, SETTINGS, NOW_MS) == Repair(projected_tokens=500)


def test_one_program_always_stays() -> None:
    """Pausing the last one would help nobody: it says what is lacking."""
    assert plan_repair(rank(idle("a", 1500)), SETTINGS, NOW_MS) == Repair((), (), 1500, 500)
    both = rank(idle("a", 1500, activated_ms=since(1)), running("b", 1500, activated_ms=since(2)))
    assert plan_repair(both, SETTINGS, NOW_MS) == Repair((), ("b",), 3000, 500)
    assert plan_repair(rank(leaving_tokens=0, ledger_tokens=1200), SETTINGS, NOW_MS) == Repair((), (), 1200, 200)


def test_without_token_capacity_only_holds_beyond_their_share_end() -> None:
    """Nothing else can be repaired; with one, their room is counted."""
    four = settings(max_active_programs_per_target=4)
    shown = rank(idle("a", 600, held_by_hint_ms=NOW_MS - 2), idle("b", 600, held_by_hint_ms=NOW_MS - 1), capacity=None)
    assert plan_repair(shown, four, NOW_MS) == Repair((("a", PauseReason.TTL_EXPIRED),))
    shown = replace(shown, capacity_tokens=2400)
    assert plan_repair(shown, four, NOW_MS) == Repair((("a", PauseReason.TTL_EXPIRED),), (), 1200)
    shown = replace(shown, capacity_tokens=500)
    assert plan_repair(shown, four, NOW_MS).pauses == (("a", PauseReason.TTL_EXPIRED), ("b", PauseReason.TTL_EXPIRED))


@pytest.mark.parametrize(("prompt_tokens", "factor"), [(100, 1.0), (25, 2.0), (400, 0.5), (10_000, 0.5), (0, 1000.0)])
def test_the_score_is_less_for_long_prompts(prompt_tokens: int, factor: float) -> None:
    """Down to half, as they cost more to compute again; without a mean, the time alone counts."""
    program = idle("a", prompt_tokens=prompt_tokens, activated_ms=since(10))
    assert score(program, 100, NOW_MS) == pytest.approx(10 * factor)
    assert score(program, None, NOW_MS) == 10
    assert score(program, 0, NOW_MS) == 10


def test_victims_go_by_score_then_size_then_id() -> None:
    """Marked ones have given way already."""
    shown = rank(
        idle("b", 10),
        idle("a", 10),
        running("c", 20),
        running("m", 99, pause_when_idle=True),
        idle("z", 1, activated_ms=0),
    )
    assert [each.program.id for each in victims(shown, SETTINGS, NOW_MS, without=set())] == ["z", "c", "a", "b"]
    assert [each.program.id for each in victims(shown, SETTINGS, NOW_MS, without={"z", "a"})] == ["c", "b"]


@PROPERTY
@given(st.lists(st.integers(0, 12), max_size=6), st.integers(-3, 50), st.integers(0, 7))
def test_the_fewest_are_chosen_and_of_those_sets_the_first(sizes: list[int], lacking: int, at_most: int) -> None:
    """Compared with trying every set, smallest first, in the order of the victims."""
    ordered = [Victim(idle(str(place)), size) for place, size in enumerate(sizes)]
    found = fewest(ordered, lacking, at_most=at_most)
    wanted = next(
        (
            list(chosen)
            for number in range(min(at_most, len(sizes)) + 1)
            for chosen in combinations(ordered, number)
            if sum(each.tokens for each in chosen) >= lacking
        ),
        ordered[:at_most],
    )
    assert found == wanted


active = st.builds(
    lambda tokens, age, kind, marked: kind("p", tokens, activated_ms=since(age), pause_when_idle=marked),
    st.integers(0, 600),
    st.integers(0, 9),
    st.sampled_from([running, idle]),
    st.booleans(),
)


@PROPERTY
@given(st.lists(active, max_size=8), st.floats(0.3, 1.0), st.floats(0.3, 1.0), st.sampled_from([WARM, Means()]))
def test_a_repair_reaches_the_low_watermark_or_says_what_is_lacking(
    programs: list[Program], one: float, other: float, means: Means
) -> None:
    """With the fewest, and never everybody; repeating it changes nothing."""
    ratios = settings(high_watermark_ratio=max(one, other), low_watermark_ratio=min(one, other))
    shown = rank(*(replace(program, id=f"p{place}") for place, program in enumerate(programs)), means=means)
    found = plan_repair(shown, ratios, NOW_MS)
    gone = {name for name, _ in found.pauses} | set(found.marks)
    candidates = victims(shown, ratios, NOW_MS, without=set())
    left = found.projected_tokens - sum(each.tokens for each in candidates if each.program.id in gone)
    assert (found.lacking_tokens > 0) <= (len(gone) == max(len(candidates) - 1, 0))
    if found.projected_tokens <= ratios.high_watermark_ratio * 1000:
        assert not gone
    elif not found.lacking_tokens:
        assert left <= ratios.low_watermark_ratio * 1000
    if gone and not found.lacking_tokens:
        largest = sorted(each.tokens for each in candidates)[-len(gone) + 1 :] if len(gone) > 1 else []
        assert found.projected_tokens - sum(largest) > ratios.low_watermark_ratio * 1000
    assert len(gone) < max(len(candidates), 1)
    after = rank(
        *(
            replace(program, pause_when_idle=True) if program.id in found.marks else program
            for program in shown.programs
            if program.id not in dict(found.pauses)
        ),
        means=means,
    )
    again = plan_repair(after, ratios, NOW_MS)
    assert not again.pauses
    assert not again.marks

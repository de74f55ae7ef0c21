"""Used tokens of a rank and where they come from; holds beyond the automatic TTL."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.rules.programs.capacity import (
    Edge,
    Scrape,
    acting_tokens,
    edge,
    engine_waiting,
    installed,
    is_fresh,
    remote_tokens,
    usage,
)
from pool.rules.programs.facts import CapacitySource, Observation
from pool.rules.programs.holds import Hold, discount_tokens, given_up, held, over_share, weight
from tests.unit.program_snapshots import NOW_MS, PROPERTY, idle, rank, running, settings, waiting

SETTINGS = settings()


def seen(age_ms: int = 0, tokens: int | None = 500, **fields: Any) -> Observation:
    return Observation(began_ms=NOW_MS - age_ms, tokens=tokens, **fields)


def test_usage_is_what_was_observed_and_what_changed_since() -> None:
    """Half of 1,000 tokens observed, and 50 added since the scrape: 550, whatever the ledger says."""
    tokens = remote_tokens(kv_usage=0.5, capacity_tokens=1000, running=2, reasoning=2, acting_tokens=0)
    shown = rank(running("a", 77), observation=seen(tokens=tokens, changed_tokens=50))
    found = usage(shown, SETTINGS, NOW_MS)
    assert (found.used_tokens, found.source, found.age_ms) == (550, CapacitySource.OBSERVATION, 0)


def test_usage_is_never_negative() -> None:
    """More may have left since than was observed."""
    assert usage(rank(observation=seen(tokens=10, changed_tokens=-30)), SETTINGS, NOW_MS).used_tokens == 0


@pytest.mark.parametrize(
    ("observation", "source", "age_ms"),
    [
        (None, CapacitySource.MISSING, None),
        (seen(3001), CapacitySource.STALE, 3001),
        (seen(-1), CapacitySource.STALE, -1),
        (seen(3000, None), CapacitySource.NO_ESTIMATE, 3000),
    ],
)
def test_the_ledger_counts_where_no_observation_can(
    observation: Observation | None, source: CapacitySource, age_ms: int | None
) -> None:
    """Private tokens of active Programs, and of those whose KV is still leaving; the source says why."""
    shown = rank(running("a", 70), idle("b", 30), waiting("c"), leaving_tokens=7, observation=observation)
    found = usage(shown, SETTINGS, NOW_MS)
    assert (found.used_tokens, found.source, found.age_ms) == (107, source, age_ms)


def test_an_observation_is_fresh_for_three_intervals() -> None:
    """At half a second each, for 1.5 s; one from the future never is."""
    half = settings(metrics_interval_seconds=0.5)
    assert [is_fresh(seen(age), half, NOW_MS) for age in (-1, 0, 1500, 1501)] == [False, True, True, False]


def test_waiting_requests_count_while_fresh() -> None:
    """An old figure says nothing, nor does none."""
    assert engine_waiting(rank(observation=seen(3000, waiting=4)), SETTINGS, NOW_MS) == 4
    assert engine_waiting(rank(observation=seen(3001, waiting=4)), SETTINGS, NOW_MS) == 0
    assert engine_waiting(rank(), SETTINGS, NOW_MS) == 0


def test_a_remote_engine_is_scaled_to_the_programs_it_does_not_run_yet() -> None:
    """Two of three run in 400 tokens, so three will in 600; the cached KV of idle ones comes on top."""
    known: dict[str, Any] = {"kv_usage": 0.4, "capacity_tokens": 1000, "running": 2, "acting_tokens": 5}
    assert remote_tokens(**known, reasoning=3) == 605
    assert remote_tokens(**known, reasoning=1) == 405
    assert remote_tokens(**(known | {"running": 0, "kv_usage": 0.0}), reasoning=0) == 5


@pytest.mark.parametrize("absent", ["kv_usage", "capacity_tokens", "running"])
def test_a_missing_series_is_no_observation(absent: str) -> None:
    """Never a zero."""
    known: dict[str, Any] = {"kv_usage": 0.4, "capacity_tokens": 1000, "running": 2}
    assert remote_tokens(**(known | {absent: None}), reasoning=1, acting_tokens=5) is None


def test_an_engine_that_runs_nothing_cannot_say_what_programs_will_use() -> None:
    """Nothing can be scaled from nothing."""
    assert remote_tokens(kv_usage=0.0, capacity_tokens=1000, running=0, reasoning=1, acting_tokens=5) is None


def test_acting_tokens_are_those_of_idle_active_programs() -> None:
    """Neither running nor waiting ones."""
    assert acting_tokens((running("a", 1), idle("b", 10), idle("c", 100), waiting("d", 1000)), 2) == 114


# -- installing -------------------------------------------------------------------------------------------------------


@PROPERTY
@given(st.lists(st.integers(-50, 50), max_size=8), st.lists(st.integers(-50, 50), max_size=8))
def test_only_transitions_from_before_a_scrape_are_subtracted(before: list[int], during: list[int]) -> None:
    """What happens while an engine is being looked at survives the installation."""
    scrape = Scrape(NOW_MS, rank_set=1, transitions_tokens=sum(before), tokens=500, waiting=2, running=3)
    found = installed(seen(5000), scrape, rank_set=1, transitions_tokens=sum(before) + sum(during))
    assert found == Observation(NOW_MS, 500, changed_tokens=sum(during), waiting=2, running=3)


def test_a_scrape_of_another_rank_set_or_older_than_the_installed_one_is_dropped() -> None:
    """Whole: none of its figures is used."""
    scrape = Scrape(NOW_MS, rank_set=1, transitions_tokens=0, tokens=500, waiting=2, running=3)
    assert installed(None, scrape, rank_set=2, transitions_tokens=0) is None
    assert installed(seen(-1), scrape, rank_set=1, transitions_tokens=0) is None
    assert installed(seen(0), scrape, rank_set=1, transitions_tokens=0) is not None
    assert installed(None, scrape, rank_set=1, transitions_tokens=0) is not None


def test_edges_are_logged_once_each_way() -> None:
    """Into the ledger and back, not between its sources, nor while all is well."""
    observed, missing, stale = CapacitySource.OBSERVATION, CapacitySource.MISSING, CapacitySource.STALE
    steps = [None, observed, stale, missing, observed, observed]
    assert [edge(before, after) for before, after in pairwise(steps) if after] == [
        None,
        Edge.FALLBACK,
        None,
        Edge.RECOVERED,
        None,
    ]
    assert edge(None, missing) is Edge.FALLBACK


# -- holds ------------------------------------------------------------------------------------------------------------


def test_a_hold_counts_half_after_ten_seconds() -> None:
    """Fully at first, and before its time."""
    assert [weight(ms) for ms in (-5, 0, 10_000, 20_000)] == [1, 1, 0.5, 0.25]
    assert discount_tokens([Hold(NOW_MS - 10_000, "a", 100), Hold(NOW_MS, "b", 100)], NOW_MS) == 50


def test_only_idle_programs_are_held_and_the_longest_comes_first() -> None:
    """One that runs again, or is still within its automatic TTL, needs no hint."""
    shown = rank(
        idle("a", 10, held_by_hint_ms=NOW_MS - 5),
        idle("b", 20, held_by_hint_ms=NOW_MS - 9),
        idle("c", 40),
        idle("e", 160, held_by_hint_ms=NOW_MS + 1),
        running("d", 80, held_by_hint_ms=NOW_MS - 9),
    )
    assert held(shown, SETTINGS, NOW_MS) == [Hold(NOW_MS - 9, "b", 20), Hold(NOW_MS - 5, "a", 10)]


def test_holds_take_a_quarter_of_a_rank_at_most() -> None:
    """Of 1,000 tokens 250, or of 8 places 2; the longest held end."""
    programs = [idle(f"p{age}", 100, held_by_hint_ms=NOW_MS - age) for age in (1, 2, 3, 4)]
    assert [hold.id for hold in over_share(rank(*programs), SETTINGS, NOW_MS)] == ["p4", "p3"]
    assert over_share(rank(*programs[:2], capacity=800), SETTINGS, NOW_MS) == []
    eight = settings(max_active_programs_per_target=8)
    assert [hold.id for hold in over_share(rank(*programs, capacity=None), eight, NOW_MS)] == ["p4", "p3"]
    assert over_share(rank(*programs[:1], capacity=None), eight, NOW_MS) == []


def test_holds_end_until_enough_is_free() -> None:
    """None where nothing lacks, all where they are not enough."""
    holds = [Hold(1, "a", 100), Hold(2, "b", 100)]
    assert [len(given_up(holds, lacking)) for lacking in (0, 1, 100, 101, 900)] == [0, 1, 1, 2, 2]

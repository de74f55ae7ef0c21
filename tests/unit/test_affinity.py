"""Which replica serves a job of a session: its home, or the next on its ring that has room."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.rules.affinity import LOAD_FACTOR, QUIET, Load, chosen, home_of
from pool.rules.programs.binding import home, ring_of

RANKS = ("tiny@a", "tiny@b", "tiny@c")
SESSIONS = [f"{number:016x}" for number in range(300)]


def idle(*ranks: str, slots: int = 8) -> dict[str, Load]:
    """Replicas of which nothing is asked."""
    return {rank: Load(0, slots) for rank in ranks}


def one(session: str, loads: dict[str, Load]) -> str:
    """The replica for one job."""
    (rank,) = chosen([session], loads)
    return rank


def next_of(session: str, *gone: str) -> str | None:
    """The first on the session's ring, but for these."""
    return home(ring_of(RANKS, 160), session, {*RANKS} - {*gone})


def test_an_idle_fleet_serves_every_session_at_its_home() -> None:
    """Whatever the order in which replicas are named; each has its part of the sessions."""
    homes = [one(session, idle(*RANKS)) for session in SESSIONS]
    assert homes == [home_of(session, RANKS[::-1]) for session in SESSIONS]
    assert all(count > 60 for count in Counter(homes).values())
    assert len(set(homes)) == 3


def test_a_job_without_a_session_is_not_decided_on() -> None:
    """And does not count for those that come with it."""
    session, own = SESSIONS[0], home_of(SESSIONS[0], RANKS)
    assert chosen(["", session, ""], idle(*RANKS)) == ["", own, ""]
    assert chosen([*[""] * 9, session], idle(*RANKS, slots=1)) == [*[""] * 9, own]


def test_without_replicas_nothing_is_chosen() -> None:
    """Nor where none has a free slot."""
    assert home_of(SESSIONS[0], ()) is None
    assert one(SESSIONS[0], {}) == ""
    assert one(SESSIONS[0], {rank: Load(2, 2) for rank in RANKS}) == ""


def test_a_replica_without_slots_is_nobodys_home() -> None:
    """Its engine has gone."""
    loads = idle(*RANKS) | {RANKS[0]: Load(0, 0)}
    assert {one(session, loads) for session in SESSIONS} == {*RANKS[1:]}


def test_one_that_goes_moves_its_own_sessions_and_no_others() -> None:
    """And one that comes takes some from all, and moves none between those that were there."""
    for gone in RANKS:
        left = [rank for rank in RANKS if rank != gone]
        for session in SESSIONS:
            before, after = one(session, idle(*RANKS)), one(session, idle(*left))
            assert after == (next_of(session, gone) if before == gone else before)


def test_a_full_home_is_passed_over_on_the_ring() -> None:
    """So that what does not fit there has a second home, too."""
    for session in SESSIONS[:30]:
        own = home_of(session, RANKS)
        assert own is not None
        assert one(session, idle(*RANKS) | {own: Load(8, 8)}) == next_of(session, own)


@pytest.mark.parametrize(
    ("own", "others", "comes_home"),
    [
        (0, 0, True),
        # Less than half of its slots are taken: whatever others have.
        (3, 0, True),
        (4, 0, False),
        # 1.25 times a third of what is in flight then, rounded up: 1.25 * 12 / 3 = 5, 1.25 * 13 / 3 = 5.4.
        (5, 3, False),
        (5, 4, True),
        # 1.25 * 18 / 3 = 7.5
        (7, 5, True),
        (7, 3, False),
        (8, 8, False),
    ],
)
def test_a_home_is_left_when_it_is_much_fuller_than_others(own: int, others: int, comes_home: bool) -> None:
    """Of eight slots each."""
    session = SESSIONS[0]
    at = home_of(session, RANKS)
    loads = {rank: Load(own if rank == at else others, 8) for rank in RANKS}
    assert (one(session, loads) == at) is comes_home


def test_parts_are_by_slots() -> None:
    """Eighteen of two dozen and six of eight are alike."""
    loads = {RANKS[0]: Load(18, 24), RANKS[1]: Load(6, 8), RANKS[2]: Load(6, 8)}
    assert all(one(session, loads) == home_of(session, RANKS) for session in SESSIONS)
    loads = {RANKS[0]: Load(23, 24), RANKS[1]: Load(3, 8), RANKS[2]: Load(3, 8)}
    assert {one(session, loads) for session in SESSIONS} == {*RANKS[1:]}


def test_jobs_that_come_at_once_count_for_each_other() -> None:
    """A burst of one session does not fill its home beyond the bound."""
    found = Counter(chosen([SESSIONS[0]] * 12, idle(*RANKS)))
    assert sorted(found.values(), reverse=True) == [5, 5, 2]
    assert found.most_common(1)[0][0] == home_of(SESSIONS[0], RANKS)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 99))
def test_whoever_is_chosen_has_room_and_somebody_is_while_a_slot_is_free(
    given_: list[tuple[int, int]], at: int
) -> None:
    """In any fleet, and never beyond the bound."""
    loads = {f"rank-{number}": Load(min(busy, slots), slots) for number, (busy, slots) in enumerate(given_)}
    rank = one(SESSIONS[at], loads)
    assert bool(rank) == any(load.in_flight < load.slots for load in loads.values())
    if not rank:
        return
    load, coming = loads[rank], 1 + sum(each.in_flight for each in loads.values())
    part = coming * load.slots / sum(each.slots for each in loads.values())
    assert load.in_flight < load.slots
    assert load.in_flight + 1 <= max(math.ceil(LOAD_FACTOR * part), math.ceil(QUIET * load.slots))

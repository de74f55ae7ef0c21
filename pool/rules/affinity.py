"""Which replica serves a job of a session: `request_policy = "consistent_hash"`, for work that belongs to no Program.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016, arXiv:1608.01350) over the ring that binds
Programs (`programs/binding.py`): of a session's ring the first replica that has room serves, which mostly is the first
of all, its *home*. A replica has room while it has a free slot and, with the job, no more in flight than LOAD_FACTOR
times its part of all that is. Parts are by slots, so that unequal replicas fill evenly here, too. One that has gone
moves its own sessions, each to the next on its ring, and no others.

Where little is in flight the bound alone would part two sessions of a home that is almost empty. So a replica also has
room while less than QUIET of its slots are taken. Simulated with 3 replicas of 8 slots, exponential times, and 2 (4)
generations in flight on average, 100 (91) of 100 turns come home, instead of 88 (83); the replica that takes one is
then fuller than the emptiest by 0.04 (0.10) of its slots, instead of 0.03 (0.07).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pool.rules.programs.binding import Ring, home, ring_of

#: How much more than its part of what is in flight a replica takes, the paper's c.
LOAD_FACTOR = 1.25
#: The part of its slots that a replica fills whatever others have.
QUIET = 0.5
#: Points of each replica on the ring.
VIRTUAL_NODES = 160


@dataclass(frozen=True, slots=True)
class Load:
    """How full a replica is, in generations."""

    in_flight: int
    slots: int


def home_of(session: str, ranks: Sequence[str]) -> str | None:
    """The session's home among these replicas, however full they are; None without any."""
    return home(_ring(tuple(sorted(ranks))), session)


def chosen(sessions: Sequence[str], loads: Mapping[str, Load]) -> list[str]:
    """The replica for each of these jobs, which come at once; "" for one without a session ("") or where no replica has
    room. `loads`: of the replicas that are there."""
    ring, now = _ring(tuple(sorted(loads))), dict(loads)
    found = []
    for session in sessions:
        rank = (home(ring, session, _with_room(now)) or "") if session else ""
        if rank:
            now[rank] = Load(now[rank].in_flight + 1, now[rank].slots)
        found.append(rank)
    return found


def _with_room(loads: Mapping[str, Load]) -> set[str]:
    """As long as any has a free slot, one of them is in here."""
    all_slots = sum(load.slots for load in loads.values())
    coming = 1 + sum(load.in_flight for load in loads.values())

    def most(slots: int) -> int:
        return min(slots, max(math.ceil(LOAD_FACTOR * coming * slots / all_slots), math.ceil(QUIET * slots)))

    return {rank for rank, load in loads.items() if load.slots > 0 and load.in_flight < most(load.slots)}


@lru_cache(maxsize=16)
def _ring(ranks: tuple[str, ...]) -> Ring:
    return ring_of(ranks, VIRTUAL_NODES)

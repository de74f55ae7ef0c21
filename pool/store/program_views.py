"""Snapshots of ranks for the rules: bounded, and of one version of the rank's book, which a plan made on it names.

What is read after the version may be newer than it; then the plan is refused, and a new snapshot is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Observation, Rank, State
from pool.rules.programs.lineage import MAX_DEPTH
from pool.rules.programs.windows import ContinuitySample, PauseSample, RequestSample, Windows, means_of
from pool.store.connection import Client
from pool.store.program_keys import WINDOWS, ProgramKeys
from pool.store.program_records import Stored, stored_of
from pool.store.program_waiters import parent_of, waiter_of

#: Waiting Programs that a snapshot shows: those that come first, and those that are forced first, of whom the order
#: knows nothing; and active ones, of which sums are to be exact.
MOST_IN_ORDER = 24
MOST_BY_FORCE = 8
MOST_ACTIVE = 1000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank at `now_ms`, the state server's time. `version`: of its book; `incarnation`: its process, "" while it is
    away; `fronts`: token of the request that each waiting Program waits with; `rank_set`: version of the set of ranks;
    `moved_tokens`: what transitions ever added to ledger and leaving KV; `is_whole`: nothing was left out; `windows`:
    what `rank.means` was made of; `told`: the source of capacity that logs last told, "" for none yet; `made`: private
    tokens, active and reasoning Programs by their records, None where not all were read; `strays`: Programs in lists of
    the rank of which nothing else says so."""

    rank: Rank
    now_ms: int
    version: int
    incarnation: str
    rank_set: int
    moved_tokens: int
    fronts: Mapping[str, str]
    is_whole: bool
    windows: Windows
    told: str = ""
    made: tuple[int, int, int] | None = None
    strays: tuple[str, ...] = ()


def snapshot(client: Client, keys: ProgramKeys, rank: str, settings: ProgramSettings) -> Snapshot:
    """Read one rank. Three round trips, one more for each level of blocking parents of those that wait."""
    place = keys.place(rank)
    pipe = client.pipeline(transaction=False)
    pipe.hgetall(place["book"])
    pipe.hget(keys.placement, "ranks")
    pipe.time()
    pipe.zrange(place["waiting"], 0, MOST_BY_FORCE - 1, withscores=True)
    pipe.zrange(place["order"], 0, MOST_IN_ORDER - 1)
    pipe.zcard(place["waiting"])
    pipe.zrange(place["active"], 0, MOST_ACTIVE - 1)
    for name in WINDOWS:
        pipe.lrange(place[name], -settings.stats_window_size, -1)
    stored, rank_set, clock, by_force, by_order, count, active, *samples = pipe.execute()
    book = {name.decode(): value.decode() for name, value in stored.items()}
    now_ms = clock[0] * 1000 + clock[1] // 1000
    # Nobody holds a reservation who has more than half of the longest force wait before him.
    near_ms = now_ms + round(settings.force_resume_timeout_seconds * 500)
    holders = (program.decode() for program, force_ms in by_force if force_ms <= near_ms)
    wanted = dict.fromkeys([*holders, *(member[-32:].decode() for member in by_order)])
    waiters, records = _details(client, keys, rank, list(wanted), [program.decode() for program in active])
    parents = _Parents(client, keys, waiters, records)
    waiting = [waiter_of(each, rank, packed, parents.above(each)) for each, packed in waiters.items()]
    windows = _windows(samples)
    mine = [each for each in records.values() if each.text("state") == State.ACTIVE and each.text("rank") == rank]
    listed = [*wanted, *(program.decode() for program in active)]
    return Snapshot(
        rank=replace(
            _rank_of(rank, book, settings),
            means=means_of(windows, settings.stats_window_size),
            programs=tuple(each.program(parents.above(each.id)) for each in mine),
            waiting=tuple(each.program for each in waiting),
        ),
        now_ms=now_ms,
        version=int(book.get("version", 0)),
        incarnation=book.get("incarnation", ""),
        rank_set=int(rank_set or 0),
        moved_tokens=int(book.get("moved", 0)),
        fronts={each.program.id: each.front for each in waiting},
        is_whole=count <= MOST_IN_ORDER,
        windows=windows,
        told=book.get("told", ""),
        made=_made(mine) if len(active) < MOST_ACTIVE else None,
        strays=tuple(set(listed) - waiters.keys() - {each.id for each in mine}),
    )


def _made(active: Sequence[Stored]) -> tuple[int, int, int]:
    """What active Programs make of their rank's book: tokens, their number, and of those with a request in flight."""
    reasoning = sum(each.number("inflight") > 0 for each in active)
    return sum(each.number("private") for each in active), len(active), reasoning


@dataclass(frozen=True, slots=True)
class Outline:
    """A rank without its Programs, at `now_ms`: what the choice of a first rank and upkeep look at. `waiting`: Programs
    that wait for it; `incarnation`, `version`: as in a snapshot; `is_registered`: whether that process's registration
    still holds; `is_drained`: whether nothing of a former process is left there; `entries`: jobs in its stream."""

    rank: Rank
    waiting: int
    incarnation: str
    version: int
    now_ms: int
    is_registered: bool
    is_drained: bool
    entries: int


def outlines(client: Client, keys: ProgramKeys, ranks: Sequence[str], settings: ProgramSettings) -> list[Outline]:
    """These ranks, in one round trip."""
    pipe = client.pipeline(transaction=False)
    for rank in ranks:
        place = keys.place(rank)
        pipe.hgetall(place["book"])
        pipe.zcard(place["waiting"])
        pipe.hget(keys.rank(rank), "incarnation")
        pipe.xlen(place["stream"])
    pipe.time()
    *replies, clock = pipe.execute()
    now_ms = clock[0] * 1000 + clock[1] // 1000
    found = []
    for at, rank in enumerate(ranks):
        stored, waiting, registered, entries = replies[4 * at : 4 * at + 4]
        book = {name.decode(): value.decode() for name, value in stored.items()}
        seat = book.get("incarnation", "")
        found.append(
            Outline(
                _rank_of(rank, book, settings),
                waiting,
                seat,
                int(book.get("version", 0)),
                now_ms,
                is_registered=registered is not None and registered.decode() == seat,
                is_drained=book.get("drained") == seat,
                entries=entries,
            )
        )
    return found


def _rank_of(rank: str, book: Mapping[str, str], settings: ProgramSettings) -> Rank:
    """What a book says of its rank."""
    return Rank(
        id=rank,
        capacity_tokens=settings.token_capacity_per_dp_rank,
        ledger_tokens=int(book.get("tokens", 0)),
        leaving_tokens=int(book.get("leaving", 0)),
        active=int(book.get("active", 0)),
        reasoning=int(book.get("reasoning", 0)),
        observation=_observation(book),
    )


def _details(
    client: Client, keys: ProgramKeys, rank: str, waiting: Sequence[str], active: Sequence[str]
) -> tuple[dict[str, bytes], dict[str, Stored]]:
    """What is kept of these Programs: of waiting ones that are still there packed, of active ones their records."""
    pipe = client.pipeline(transaction=False)
    if waiting:
        pipe.hmget(keys.place(rank)["waiters"], waiting)
    for each in active:
        pipe.hgetall(keys.record(each))
    replies = pipe.execute()
    packed = replies.pop(0) if waiting else []
    found = [stored_of(each, values) for each, values in zip(active, replies, strict=True)]
    return (
        {each: kept for each, kept in zip(waiting, packed, strict=True) if kept is not None},
        {stored.id: stored for stored in found if stored is not None},
    )


class _Parents:
    """Who waits for whom, over blocking links, as far up from the Programs of a snapshot as records say."""

    def __init__(
        self, client: Client, keys: ProgramKeys, waiters: Mapping[str, bytes], records: Mapping[str, Stored]
    ) -> None:
        self._links = {each: parent_of(packed) for each, packed in waiters.items()}
        self._links |= {each: _blocked_by(stored) for each, stored in records.items()}
        missing = self._missing(self._links)
        for _ in range(MAX_DEPTH):
            if not missing:
                break
            pipe = client.pipeline(transaction=False)
            for each in missing:
                pipe.hgetall(keys.record(each))
            level = [stored_of(each, values) for each, values in zip(missing, pipe.execute(), strict=True)]
            found = {stored.id: _blocked_by(stored) for stored in level if stored is not None}
            self._links |= found
            missing = self._missing(found)

    def _missing(self, children: Iterable[str]) -> list[str]:
        """Parents of these of whom nothing is known yet."""
        return list({self._links[each] for each in children} - {"", *self._links})

    def above(self, program: str) -> tuple[str, ...]:
        """Its ancestors, nearest first."""
        found: list[str] = []
        parent = self._links.get(program, "")
        while parent and parent != program and parent not in found and len(found) < MAX_DEPTH:
            found.append(parent)
            parent = self._links.get(parent, "")
        return tuple(found)


def _blocked_by(stored: Stored) -> str:
    """The parent that cannot go on before it ends, "" for none."""
    return stored.text("parent") if stored.number("blocks") else ""


def _observation(book: Mapping[str, str]) -> Observation | None:
    if "obs_began_ms" not in book:
        return None
    return Observation(
        began_ms=int(book["obs_began_ms"]),
        tokens=int(book["obs_tokens"]) if book["obs_tokens"] else None,
        changed_tokens=int(book.get("moved", 0)) - int(book["obs_moved"]),
        waiting=int(book["obs_waiting"]),
        running=int(book["obs_running"]),
    )


def _windows(samples: Sequence[Sequence[Any]]) -> Windows:
    requests, continuity, segments = samples
    return Windows(
        [RequestSample.unpacked(packed) for packed in requests],
        [ContinuitySample.unpacked(packed) for packed in continuity],
        [PauseSample.unpacked(packed) for packed in segments],
    )

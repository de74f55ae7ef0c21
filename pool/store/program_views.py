"""Snapshots of ranks for the rules: bounded, and of one version of the rank's book, which a plan made on it names.

What is read after the version may be newer than it; then the plan is refused, and a new snapshot is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Observation, Program, Rank, State
from pool.rules.programs.lineage import MAX_DEPTH
from pool.rules.programs.windows import ContinuitySample, PauseSample, RequestSample, Windows, means_of
from pool.store.connection import Client
from pool.store.program_keys import WINDOWS, ProgramKeys
from pool.store.program_records import Stored, stored_of

#: Waiting Programs that a snapshot shows: those that come first, and those that are forced first, of whom the order
#: knows nothing. Each costs the server about as much as a command of the plan. And active ones, of which sums are to be
#: exact.
MOST_IN_ORDER = 16
MOST_BY_FORCE = 8
MOST_ACTIVE = 1000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank at `now_ms`, the state server's time. `version`: of its book; `incarnation`: its process, "" while it is
    away; `fronts`: token of the request that each waiting Program waits with; `rank_set`: version of the set of ranks;
    `moved_tokens`: what transitions ever added to ledger and leaving KV; `is_whole`: nothing was left out; `windows`:
    what `rank.means` was made of; `told`: the source of capacity that logs last told, "" for none yet."""

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
    stored, rank_set, clock, by_force, by_order, waiting, active, *samples = pipe.execute()
    book = {name.decode(): value.decode() for name, value in stored.items()}
    now_ms = clock[0] * 1000 + clock[1] // 1000
    # Nobody holds a reservation who has more than half of the longest force wait before him.
    near_ms = now_ms + round(settings.force_resume_timeout_seconds * 500)
    holders = (program.decode() for program, force_ms in by_force if force_ms <= near_ms)
    wanted = dict.fromkeys([*holders, *(member[-32:].decode() for member in by_order)])
    records, fronts = _records(client, keys, [*wanted, *(p.decode() for p in active)], wanted)
    windows, seen = _windows(samples), _seen(records, rank)
    return Snapshot(
        rank=replace(
            _rank_of(rank, book, settings),
            means=means_of(windows, settings.stats_window_size),
            programs=tuple(each for each in seen if each.state is State.ACTIVE),
            waiting=tuple(each for each in seen if each.waiting is not None),
        ),
        now_ms=now_ms,
        version=int(book.get("version", 0)),
        incarnation=book.get("incarnation", ""),
        rank_set=int(rank_set or 0),
        moved_tokens=int(book.get("moved", 0)),
        fronts=fronts,
        is_whole=waiting <= MOST_IN_ORDER,
        windows=windows,
        told=book.get("told", ""),
    )


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


def _records(
    client: Client, keys: ProgramKeys, ids: Sequence[str], waiting: Iterable[str]
) -> tuple[dict[str, Stored], dict[str, str]]:
    """The records that are there, with the ancestors of blocking children; and fronts of the pools of `waiting`."""
    pipe = client.pipeline(transaction=False)
    for each in ids:
        pipe.hgetall(keys.record(each))
    for each in waiting:
        pipe.lindex(keys.pool(each), 0)
    replies = pipe.execute()
    found = zip(ids, replies, strict=False)
    records = {each: stored for each, values in found if (stored := stored_of(each, values)) is not None}
    tickets = zip(waiting, replies[len(ids) :], strict=True)
    fronts = {each: ticket.split(b":")[0].decode() for each, ticket in tickets if ticket is not None}
    missing = _parents(records, records.values())
    for _ in range(MAX_DEPTH):
        if not missing:
            break
        for each in missing:
            pipe.hgetall(keys.record(each))
        level = [stored_of(each, values) for each, values in zip(missing, pipe.execute(), strict=True)]
        records |= {stored.id: stored for stored in level if stored is not None}
        missing = _parents(records, [stored for stored in level if stored is not None])
    return records, fronts


def _parents(records: Mapping[str, Stored], children: Iterable[Stored]) -> list[str]:
    """Parents that wait for one of these and are not known yet."""
    return list({each.text("parent") for each in children if each.number("blocks")} - {"", *records})


def _seen(records: Mapping[str, Stored], rank: str) -> list[Program]:
    here = [stored for stored in records.values() if stored.text("rank") == rank]
    return [stored.program(_ancestors(stored, records)) for stored in here]


def _ancestors(stored: Stored, records: Mapping[str, Stored]) -> tuple[str, ...]:
    """Ancestors over blocking links, nearest first."""
    found: list[str] = []
    child: Stored | None = stored
    while child is not None and child.number("blocks") and len(found) < MAX_DEPTH:
        parent = child.text("parent")
        if not parent or parent in found or parent == stored.id:
            break
        found.append(parent)
        child = records.get(parent)
    return tuple(found)


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

"""What `/metrics` shows of Programs: figures that the state server keeps itself, and ranks at one instant.

The script that does something counts it, in the same step (lua/lib/figures.lua, lua/lib/book.lua), so nothing is
counted twice or lost with a process. A rank's histograms go with the rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Rank
from pool.store.connection import Client, state_errors
from pool.store.program_keys import ProgramKeys
from pool.store.program_views import outlines

#: Upper bounds of the histograms by unit; lua/lib/figures.lua has the same.
UPPER: Mapping[str, tuple[int, ...]] = {
    "ms": (0, 50, 100, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000, 300_000, 600_000),
    "tokens": (0, 100, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000),
}
#: The histograms, by the names under which they are stored.
FIGURES = (
    "queue_wait_ms", "request_interval_ms", "cache_miss_impact_ms", "armed_ttl_ms", "context_growth_tokens",
    "shared_prefix_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Distribution:
    """`counts`: values by bucket, not cumulative, one for each bound of the unit and one for what is above; `total`: of
    all values."""

    counts: tuple[int, ...]
    total: int


@dataclass(frozen=True, slots=True)
class RankFigures:
    """A rank. `waiting`: Programs that wait for it; `admission`: used, required and reserved tokens of the last
    admission there, None before the first; `figures` by name."""

    rank: Rank
    waiting: int
    is_up: bool
    admission: tuple[int, int, int] | None
    figures: Mapping[str, Distribution]


@dataclass(frozen=True, slots=True)
class ProgramSurvey:
    """A model's Programs at `at_ms` of the state server's clock. `transitions` by what happened and why, since the
    state began; `programs`: how many there are."""

    at_ms: int
    programs: int
    transitions: Mapping[tuple[str, str], int]
    ranks: Sequence[RankFigures]


def program_survey(client: Client, model: str, settings: ProgramSettings, shard: int = 0) -> ProgramSurvey:
    """Two round trips and one of outlines, whatever the number of Programs. Raises StateUnavailable."""
    keys = ProgramKeys(f"{model}:{shard}")
    with state_errors():
        pipe = client.pipeline(transaction=False)
        pipe.zrange(keys.members, 0, -1)
        pipe.hgetall(keys.placement)
        pipe.hvals(keys.owners)
        pipe.time()
        members, placement, owners, clock = pipe.execute()
        ranks = [rank.decode() for rank in members]
        for rank in ranks:
            pipe.hgetall(keys.place(rank)["figures"])
            pipe.hget(keys.place(rank)["book"], "admission")
        replies = pipe.execute()
        seen = outlines(client, keys, ranks, settings)
    return ProgramSurvey(
        at_ms=clock[0] * 1000 + clock[1] // 1000,
        programs=sum(map(int, owners)),
        transitions=_transitions(placement),
        ranks=[
            RankFigures(
                rank=outline.rank,
                waiting=outline.waiting,
                is_up=bool(outline.incarnation),
                admission=_admission(admission),
                figures={name: _distribution(name, stored) for name in FIGURES},
            )
            for outline, stored, admission in zip(seen, replies[::2], replies[1::2], strict=True)
        ],
    )


def _transitions(placement: Mapping[bytes, bytes]) -> dict[tuple[str, str], int]:
    """The fields WHAT:REASON; the others are no counters."""
    named = ((*name.decode().partition(":"), int(value)) for name, value in placement.items())
    return {(what, reason): count for what, colon, reason, count in named if colon}


def _admission(stored: bytes | None) -> tuple[int, int, int] | None:
    if stored is None:
        return None
    used, required, reserve = map(int, stored.split())
    return used, required, reserve


def _distribution(name: str, stored: Mapping[bytes, bytes]) -> Distribution:
    bounds = (*UPPER[name.rpartition("_")[2]], "inf")
    counts = tuple(int(stored.get(f"{name}:{bound}".encode(), 0)) for bound in bounds)
    return Distribution(counts, int(stored.get(f"{name}:sum".encode(), 0)))

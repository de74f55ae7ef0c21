"""How a rank stands, as its own process has to know it: cheap enough to be asked all the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pool.rules.programs.facts import PauseReason
from pool.store.connection import Client, state_errors
from pool.store.program_keys import ProgramKeys


@dataclass(frozen=True, slots=True)
class Standing:
    """`incarnation`: the process that has the rank, "" for none; `active`, `waiting`: how many Programs have a place
    there, and wait for one; `leaving`: tokens of those that left while its engine still held their KV; `sent`: jobs in
    its stream, those that run included."""

    incarnation: str
    active: int
    waiting: int
    leaving: Mapping[str, int]
    sent: int

    @property
    def is_busy(self) -> bool:
        """Whether any Program is there."""
        return bool(self.active or self.waiting or self.leaving)


def standing(client: Client, keys: ProgramKeys, rank: str) -> Standing:
    """Read it, in one round trip. Raises StateUnavailable."""
    place = keys.place(rank)
    pipe = client.pipeline(transaction=False)
    pipe.hget(place["book"], "incarnation")
    pipe.zcard(place["active"])
    pipe.zcard(place["waiting"])
    pipe.hgetall(place["leaving"])
    pipe.xlen(place["stream"])
    with state_errors():
        seat, active, waiting, leaving, sent = pipe.execute()
    return Standing(
        incarnation=(seat or b"").decode(),
        active=active,
        waiting=waiting,
        leaving={program.decode(): int(tokens) for program, tokens in leaving.items()},
        sent=sent,
    )


def lost_why(client: Client, keys: ProgramKeys, rank: str) -> PauseReason:
    """What Programs are paused for that had a place with the last process of a rank. Raises StateUnavailable."""
    with state_errors():
        why = client.hget(keys.place(rank)["book"], "why")
    return PauseReason.HEALTH_FAILOVER if why is None else PauseReason(why.decode())


class Stay(StrEnum):
    """How a Program stands with a process of a rank."""

    #: It has its place with this process.
    ACTIVE = "active"
    #: It is bound to the rank, without a place.
    PAUSED = "paused"
    #: It is gone, is elsewhere, or has its place with another process.
    AWAY = "away"


def stays(client: Client, keys: ProgramKeys, rank: str, incarnation: str, programs: Sequence[str]) -> dict[str, Stay]:
    """How these Programs stand with this process of the rank. Raises StateUnavailable."""
    if not programs:
        return {}
    pipe = client.pipeline(transaction=False)
    for program in programs:
        pipe.hmget(keys.record(program), "state", "rank", "seat")
    with state_errors():
        found = pipe.execute()
    known = {
        (b"active", rank.encode(), incarnation.encode()): Stay.ACTIVE,
        (b"paused", rank.encode(), None): Stay.PAUSED,
    }
    return {program: known.get(tuple(place), Stay.AWAY) for program, place in zip(programs, found, strict=True)}

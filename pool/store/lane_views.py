"""The lanes as an operator sees them: what each key has waiting and in flight; and a job's change of lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pool.errors import JobNotWaiting
from pool.rules.fairness import FIRST_GUESS_MS, LANES, Lane
from pool.store.connection import Client, state_errors
from pool.store.ids import JobRef
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys, keys_of
from pool.store.lane_positions import BAND
from pool.store.nodes import server_ms
from pool.store.running import run
from pool.store.scripts import script

#: Flows that are shown of a model at most, and jobs in flight that are looked at.
MOST_SHOWN = 1000


@dataclass(frozen=True, slots=True)
class Flow:
    """One fairness key in one lane. `key`: digits of a hash; `waiting`: jobs; `oldest_ms`: how long ago the one that
    came first was submitted, 0 without one; `in_flight`: choices of the key, in all lanes; `weight`: of its next job,
    None where nothing waits; `virtual_ms`: slot time it was given for weight 1, `guess_ms`: that a choice is taken to
    need."""

    lane: Lane
    key: str
    waiting: int
    oldest_ms: int
    in_flight: int
    weight: int | None
    virtual_ms: float
    guess_ms: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """A model's lanes. `owed_ms`: slot time by lane that a lower one is owed; `hidden`: flows that are not shown."""

    flows: tuple[Flow, ...]
    owed_ms: dict[Lane, float]
    hidden: int


def backlog(client: Client, model: str, shard: int = 0) -> Backlog:
    """The lanes of a model now, in the order in which they are served; flows beyond a thousand are counted only. Its
    parts are read one after the other. Raises StateUnavailable."""
    keys = ModelKeys(f"{model}:{shard}")
    lanes = keys.lanes
    with state_errors():
        found = client.zrange(lanes["flows"], 0, MOST_SHOWN - 1, withscores=True)
        pipe = client.pipeline(transaction=False)
        pipe.hgetall(lanes["fairness"])
        pipe.xrange(keys.queue, count=MOST_SHOWN)
        pipe.zcard(lanes["flows"])
        for name, _ in found:
            pipe.zlexcount(lanes["backlog"], b"[" + name + b":", b"(" + name + b";")
            pipe.zrangebylex(lanes["backlog"], b"[" + name + b":", b"(" + name + b";", 0, 1)
        facts, entries, total, *each = pipe.execute()
        at_ms = server_ms(client, keys.index)
        in_flight = _in_flight(client, keys, [fields.get(b"job", b"").decode() for _, fields in entries])
    numbers = {name.decode(): float(value) for name, value in facts.items()}
    flows = [
        _flow(name.decode(), score, waiting, first, numbers, in_flight, at_ms)
        for (name, score), waiting, first in zip(found, each[::2], each[1::2], strict=True)
    ]
    owed = {lane: numbers.get(f"owed:{place}", 0.0) for place, lane in enumerate(LANES)}
    return Backlog(tuple(flows), owed, total - len(found))


def _in_flight(client: Client, keys: ModelKeys, tokens: Sequence[str]) -> Counter[str]:
    """Choices by key of these jobs, which have had their turn."""
    pipe = client.pipeline(transaction=False)
    for token in tokens:
        pipe.hget(keys.job(token), "turn")
    turns = [turn.decode().split(":") for turn in pipe.execute() if turn]
    return Counter({key: sum(int(turn[4]) for turn in turns if turn[1] == key) for key in {turn[1] for turn in turns}})


def _flow(
    name: str,
    score: float,
    waiting: int,
    first: Sequence[bytes],
    numbers: Mapping[str, float],
    in_flight: Mapping[str, int],
    at_ms: int,
) -> Flow:
    place, key = name.split(":")
    turn = first[0].decode().split(":") if first else None
    return Flow(
        lane=LANES[int(place)],
        key=key,
        waiting=waiting,
        oldest_ms=max(at_ms - int(turn[2][1:]) // 1000, 0) if turn else 0,
        in_flight=in_flight.get(key, 0),
        weight=int(turn[5]) if turn else None,
        virtual_ms=round(score % BAND, 3),
        guess_ms=int(numbers.get(f"guess:{name}", FIRST_GUESS_MS)),
    )


def change_lane(client: Client, store: JobStore, ref: JobRef, lane: Lane) -> None:
    """Have a job that waits wait in another lane, behind those of its key that were submitted before it.

    Raises JobUnknown, JobNotWaiting and StateUnavailable.
    """
    keys = keys_of(ref)
    command = script("relane")(job=keys.job(ref.token), lanes=keys.lanes, lane=LANES.index(lane), name=lane)
    with state_errors():
        code, *detail = run(client, command)
    if code == b"gone":
        raise store.absence(ref)
    if code == b"program":
        raise JobNotWaiting("Its Program decides on this generation's turn; lanes do not.")
    if code == b"not-waiting":
        raise JobNotWaiting(f"This generation does not wait for its turn any more: {detail[0].decode()}.")

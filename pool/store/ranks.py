"""The rank registry (which worker processes serve a model) and the model card they publish.

A rank has a stable id (its Celery node name), a random incarnation (one life of the process) and a lease. The card is
what API nodes need to validate a request without the model's files: context length, KV bound, vocabulary.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pool.rules.model_states import LOADED, NOT_SERVING
from pool.store.connection import Client, state_errors
from pool.store.keys import ModelKeys
from pool.store.running import run
from pool.store.scripts import Command, Value, script


@dataclass(frozen=True, slots=True)
class Card:
    """A loaded model's facts. `context_length` and `max_positions` (prompt + output that fit one session's KV) are in
    tokens; `vocabulary` is an opaque blob, empty where a server elsewhere tokenizes: then it checks lengths, too, and
    they are 0 where they are not known. Equal `fingerprint` means equal output bits. `logprobs`, `seed`: whether its
    engine gives log-probabilities, and the same tokens for the same seed; `lacks`: other options that it has not;
    `backend`: what runs it, for messages."""

    context_length: int
    max_positions: int
    fingerprint: str
    vocabulary: bytes
    logprobs: bool = True
    seed: bool = True
    lacks: tuple[str, ...] = ()
    backend: str = ""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a rank is told with each heartbeat. `loaded`: its model is wanted; `change`: the number of that wish;
    `is_asked`: an admin has asked to load it, and no rank has done so yet; `drain_ms`: how long what runs may take,
    where it is to be unloaded. `ranks`: how many there are; `has_place`: it may load, there are not too many."""

    loaded: bool = True
    change: int = 0
    is_asked: bool = False
    drain_ms: int = 0
    ranks: int = 1
    has_place: bool = True


@dataclass(frozen=True, slots=True)
class Rank:
    """A live rank as listed; `facts` are what it last reported (JSON), in its present state."""

    id: str
    incarnation: str
    host: str
    pid: int
    facts: dict[str, Any]

    @property
    def state(self) -> str:
        """What it does with its model: loading, loaded, draining, unloaded or failed."""
        return str(self.facts.get("state", LOADED))

    @property
    def slots(self) -> int:
        """Generations it runs at once; 0 while it loads."""
        return int(self.facts.get("effective_target_inflight", 0))

    @property
    def tokens_per_second(self) -> float:
        """Tokens it generated, over the last seconds before its last heartbeat; 0 while it loads."""
        return float(self.facts.get("decode_tokens_per_sec", 0))


class RankRegistry:
    """Ranks and card of one model."""

    def __init__(self, client: Client, model: str, shard: int = 0) -> None:
        self._client = client
        self._keys = ModelKeys(f"{model}:{shard}")

    def beat(self, rank: str, incarnation: str, *, lease_ms: int, facts: Mapping[str, Any]) -> Wish | None:
        """Register or renew; what is wanted of it. None: another process lives under this rank id; choose another."""
        code, *detail = self._beat(rank, incarnation, lease_ms, facts, replace=False)
        if code != b"ok":
            host, pid = detail[0].decode(), int(detail[1])
            if host != socket.gethostname() or _is_alive(pid):
                return None
            # A crashed predecessor on this machine: its place need not wait for its lease.
            _, *detail = self._beat(rank, incarnation, lease_ms, facts, replace=True)
        wanted, change, done, drain_ms, ranks, has_place = detail
        return Wish(
            wanted != b"unloaded",
            change,
            is_asked=wanted == b"loaded" and change != done,
            drain_ms=drain_ms,
            ranks=ranks,
            has_place=bool(has_place),
        )

    def _beat(
        self, rank: str, incarnation: str, lease_ms: int, facts: Mapping[str, Any], *, replace: bool
    ) -> list[Any]:
        fields: list[Value] = ["host", socket.gethostname(), "pid", os.getpid()]
        who = {"incarnation": incarnation, "host": fields[1], "pid": fields[3], "facts": dict(facts)}
        command = script("heartbeat")(
            record=self._keys.rank(rank),
            ranks=self._keys.ranks,
            told=self._keys.told,
            rank=rank,
            incarnation=incarnation,
            replace=int(replace),
            model=self._keys.model,
            load=self._keys.load,
            places=self._keys.places,
            state=str(facts.get("state", LOADED)),
            most=int(facts.get("replica_max", 0)),
            lease=lease_ms,
            facts=json.dumps(who),
            fields=fields,
        )
        reply: list[Any] = run(self._client, command)
        return reply

    def retire(self, rank: str, incarnation: str) -> None:
        """Leave the registry at once; also removes the rank's consumer when nothing is pending there."""
        command = script("retire")(
            record=self._keys.rank(rank),
            ranks=self._keys.ranks,
            told=self._keys.told,
            places=self._keys.places,
            queue=self._keys.queue,
            hungry=self._keys.hungry,
            load=self._keys.load,
            rank=rank,
            incarnation=incarnation,
        )
        run(self._client, command)

    def live(self) -> list[Rank]:
        """Ranks that serve, or finish what they have begun: not those that have no model loaded."""
        return serving(self.present())

    def present(self) -> list[Rank]:
        """Ranks whose lease holds, in whichever state. One round trip."""
        with state_errors():
            return present_of(run(self._client, present_command(self._keys)))

    def publish(self, card: Card) -> None:
        """Store the model's card; the last worker to load it wins."""
        self._client.hset(
            self._keys.card,
            mapping={
                "context_length": card.context_length,
                "max_positions": card.max_positions,
                "fingerprint": card.fingerprint,
                "vocabulary": card.vocabulary,
                "logprobs": int(card.logprobs),
                "seed": int(card.seed),
                "lacks": " ".join(card.lacks),
                "backend": card.backend,
            },
        )

    def card_fingerprint(self) -> str | None:
        """The published fingerprint alone: a cheap way to see whether a cached card is current."""
        with state_errors():
            value = self._client.hget(self._keys.card, "fingerprint")
        return value.decode() if value else None

    def card(self) -> Card | None:
        """The published card, None before any worker has loaded the model."""
        with state_errors():
            stored = self._client.hgetall(self._keys.card)
        if not stored:
            return None
        return Card(
            int(stored[b"context_length"]),
            int(stored[b"max_positions"]),
            stored[b"fingerprint"].decode(),
            stored[b"vocabulary"],
            # A card without these is of a worker that knows no log-probabilities.
            logprobs=stored.get(b"logprobs") == b"1",
            seed=stored.get(b"seed", b"1") == b"1",
            lacks=tuple(stored.get(b"lacks", b"").decode().split()),
            backend=stored.get(b"backend", b"").decode(),
        )


def serving(ranks: Iterable[Rank]) -> list[Rank]:
    """Those of them that have the model loaded."""
    return [rank for rank in ranks if rank.state not in NOT_SERVING]


def present_command(keys: ModelKeys) -> Command:
    """What `present_of` reads the reply of."""
    return script("executors")(ranks=keys.ranks, told=keys.told, model=keys.model)


def present_of(reply: Sequence[Any]) -> list[Rank]:
    """The ranks of a reply, by id."""
    told = reply[1]
    return sorted((_rank(*told[at : at + 3]) for at in range(0, len(told), 3)), key=lambda rank: rank.id)


def _rank(rank: bytes, _lease_end: bytes, told: bytes) -> Rank:
    who = json.loads(told)
    return Rank(rank.decode(), who["incarnation"], who["host"], who["pid"], who["facts"])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

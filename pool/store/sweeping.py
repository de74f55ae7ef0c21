"""Expiry of leases, carried out by whichever node comes by: there is no leader and no process whose death stops it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pool.store import program_endings
from pool.store.connection import Client, state_errors
from pool.store.entries import drop, token_of
from pool.store.ids import MODEL_PATTERN
from pool.store.inputs import run_endings
from pool.store.jobs import JobStore
from pool.store.keys import GROUP, ModelKeys
from pool.store.lifecycle import Lifecycle
from pool.store.nodes import is_spread
from pool.store.program_endings import Terms, of_programs
from pool.store.rebuilding import rebuild
from pool.store.running import run, run_many
from pool.store.scripts import Command, script
from pool.store.totals import ADD_UP_FROM, add_up
from pool.store.unloading import Unloading

DEAD_LETTERS_KEPT = 10_000
#: Timers looked at in one sweep.
TIMERS = 100
#: Commands of a look at one model.
LOOKS = 5
#: Flows of a model (pool/rules/fairness.py) whose virtual time is remembered.
MOST_FLOWS = 1000


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep did; `held` means that nothing may expire yet because sweeps were interrupted."""

    held: bool = False
    requeued: int = 0
    poisoned: int = 0
    expired: int = 0


@dataclass(frozen=True, slots=True)
class Sight:
    """What a look at a model brought: the replies to its LOOKS commands."""

    model: str
    keys: ModelKeys
    replies: list[Any]


class Sweeper:
    """Takes jobs from ranks that stopped renewing."""

    def __init__(
        self, client: Client, store: JobStore, *, lease_ms: int, max_deliveries: int, result_ttl_ms: int
    ) -> None:
        self._client = client
        self._store = store
        self._lease_ms = lease_ms
        self._max_deliveries = max_deliveries
        self._result_ttl_ms = result_ttl_ms
        self.terms = Terms(max_deliveries, result_ttl_ms, DEAD_LETTERS_KEPT, lease_ms)
        #: Whether a model's server may be away while others are there.
        self.is_spread = is_spread(client)
        self._looks_of: dict[str, list[Command]] = {}

    def sweep(self, model: str) -> Swept:
        """One bounded sweep (at most 100 leases and 100 unbegun entries). Call it at least twice a lease.

        Every take-back checks again inside its own script, so two sweepers at once do no harm.
        """
        (sight,) = self.look([model])
        return self.act(sight)

    def look(self, models: Sequence[str]) -> list[Sight]:
        """What there is to do for each of these models, in one trip: every process asks a few times a second for all of
        them, for ever."""
        with state_errors():
            replies = run_many(self._client, [look for model in models for look in self._looks(model)])
        return [
            Sight(model, ModelKeys(f"{model}:0"), replies[LOOKS * at : LOOKS * (at + 1)])
            for at, model in enumerate(models)
        ]

    def unloading(self, model: str) -> Unloading:
        """What is to be done while the model is being unloaded."""
        return Unloading(Lifecycle(self._client, model), self._store, result_ttl_ms=self._result_ttl_ms)

    def _looks(self, model: str) -> list[Command]:
        """Always the same for a model, so they are made once."""
        if model not in self._looks_of:
            self._looks_of[model] = self._new_looks(model)
        return self._looks_of[model]

    def _new_looks(self, model: str) -> list[Command]:
        assert MODEL_PATTERN.fullmatch(model), "model names come from the catalogue"
        keys = ModelKeys(f"{model}:0")
        sweep = script("sweep")(
            sweep=keys.sweep,
            leases=keys.leases,
            queue=keys.queue,
            index=keys.index,
            backlog=keys.lanes["backlog"],
            model=keys.model,
            lease=self._lease_ms,
        )
        timers: Command = ["ZRANGE", keys.timers, 0, TIMERS - 1, "WITHSCORES"]
        return [sweep, ["TIME"], timers, ["LLEN", keys.tally], ["ZCARD", keys.lanes["flows"]]]

    def act(self, sight: Sight) -> Swept:
        """Do what was seen."""
        keys = sight.keys
        (code, unloads, *found), clock, timers, tallied, flows = sight.replies
        if unloads:
            self.unloading(sight.model).go_on()
        with state_errors():
            if tallied >= ADD_UP_FROM:
                add_up(self._client, keys)
            if flows > MOST_FLOWS:
                run(self._client, script("forget")(lanes=keys.lanes, most=MOST_FLOWS))
            due = _due(clock, timers)
            if code == b"hold":
                return Swept(held=True, expired=self._expire(keys, due))
            expired, unbegun, missing = found
            requeued, poisoned = self._take_back(keys, [token.decode() for token in expired])
            requeued += self._requeue_unbegun(keys, unbegun)
            requeued += rebuild(self._client, keys) if missing else 0
            return Swept(requeued=requeued, poisoned=poisoned, expired=self._expire(keys, due))

    def _take_back(self, keys: ModelKeys, tokens: list[str]) -> tuple[int, int]:
        def take_back(token: str, blocks: Sequence[str]) -> Command:
            return script("take_back")(
                **keys.ending(token, blocks),
                lanes=keys.lanes,
                sweep=keys.sweep,
                dead=keys.dead,
                token=token,
                cap=self._max_deliveries,
                ttl=self._result_ttl_ms,
                keep=DEAD_LETTERS_KEPT,
            )

        def take_back_of(at: int, program: str) -> list[Any]:
            return program_endings.take_back(self._client, keys, tokens[at], program, self.terms)

        outcomes = {b"requeued": 0, b"poison": 0}
        replies = of_programs(run_endings(self._client, tokens, take_back), take_back_of)
        for token, reply in zip(tokens, replies, strict=True):
            if reply[0] in outcomes:
                outcomes[reply[0]] += 1
                self._store.notify(token, watch=reply[1].decode(), rank=reply[2].decode())
        return outcomes[b"requeued"], outcomes[b"poison"]

    def _expire(self, keys: ModelKeys, timers: list[list[str]]) -> int:
        """Carry out timers that are due; each is removed by the script that does what it stands for."""

        def expire(timer: list[str], blocks: Sequence[str]) -> Command:
            kind, token = timer
            return script("expire")(
                **keys.ending(token, blocks),
                lanes=keys.lanes,
                sweep=keys.sweep,
                kind=kind,
                token=token,
                ttl=self._result_ttl_ms,
                lease=self._lease_ms,
            )

        def expire_of(at: int, program: str) -> list[Any]:
            terms = {"result_ttl_ms": self._result_ttl_ms, "lease_ms": self._lease_ms}
            return program_endings.expire(self._client, keys, timers[at], program, **terms)

        expired = 0
        replies = of_programs(run_endings(self._client, timers, expire), expire_of)
        for (_, token), reply in zip(timers, replies, strict=True):
            if reply[0] in (b"failed", b"cancelled"):
                expired += 1
                self._store.notify(token, watch=reply[1].decode(), rank=reply[2].decode())
        return expired

    def _requeue_unbegun(self, keys: ModelKeys, entries: list[bytes]) -> int:
        """Entries of dead readers. One that was deleted from the stream no longer tells its job: the index does."""
        commands: list[Command] = []
        lost: list[bytes] = []
        nameless: list[bytes] = []
        for entry in entries:
            found = self._client.xrange(keys.queue, entry, entry)
            token = token_of(found[0][1]) if found else None
            if token is None:
                (nameless if found else lost).append(entry)
                continue
            commands.append(
                script("requeue_unbegun")(
                    job=keys.job(token),
                    queue=keys.queue,
                    leases=keys.leases,
                    timers=keys.timers,
                    tally=keys.tally,
                    token=token,
                    entry=entry,
                    idle=self._lease_ms,
                    nonce="",
                )
            )
        requeued: int = sum(reply[0] == b"requeued" for reply in run_many(self._client, commands))
        drop(self._client, keys, nameless)
        if lost:
            # In this order: cut short in between, the next sweep finds them again.
            requeued += rebuild(self._client, keys)
            self._client.xack(keys.queue, GROUP, *lost)
        return requeued


def _due(clock: list[bytes], timers: list[bytes]) -> list[list[str]]:
    """[kind, token] of each timer that is due; `timers` as ZRANGE gives them, with their times."""
    at_ms = int(clock[0]) * 1000 + int(clock[1]) // 1000
    pairs = zip(timers[::2], timers[1::2], strict=True)
    return [timer.decode().split(":", 1) for timer, due_ms in pairs if float(due_ms) <= at_ms]

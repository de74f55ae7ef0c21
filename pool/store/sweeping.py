"""Expiry of leases, carried out by whichever node comes by: there is no leader and no process whose death stops it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pool.store.connection import Client, state_errors
from pool.store.ids import MODEL_PATTERN
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.scripts import run, run_many, script

DEAD_LETTERS_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep did; `held` means that nothing may expire yet because sweeps were interrupted."""

    held: bool = False
    requeued: int = 0
    poisoned: int = 0
    expired: int = 0


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

    def sweep(self, model: str, shard: int = 0) -> Swept:
        """One bounded sweep (at most 100 leases and 100 unbegun entries). Call it at least twice a lease.

        Every take-back checks again inside its own script, so two sweepers at once do no harm.
        """
        assert MODEL_PATTERN.fullmatch(model), "model names come from the catalogue"
        keys = ModelKeys(f"{model}:{shard}")
        command = script("sweep")(sweep=keys.sweep, leases=keys.leases, queue=keys.queue, lease=self._lease_ms)
        with state_errors():
            code, *found = run(self._client, command)
            if code == b"hold":
                return Swept(held=True, expired=self._expire(keys))
            expired, unbegun = found
            requeued, poisoned = self._take_back(keys, [token.decode() for token in expired])
            requeued += self._requeue_unbegun(keys, unbegun)
            return Swept(requeued=requeued, poisoned=poisoned, expired=self._expire(keys))

    def _take_back(self, keys: ModelKeys, tokens: list[str]) -> tuple[int, int]:
        commands = [
            script("take_back")(
                **keys.ending(token),
                sweep=keys.sweep,
                dead=keys.dead,
                token=token,
                cap=self._max_deliveries,
                ttl=self._result_ttl_ms,
                keep=DEAD_LETTERS_KEPT,
            )
            for token in tokens
        ]
        outcomes = {b"requeued": 0, b"poison": 0}
        for token, reply in zip(tokens, run_many(self._client, commands) if commands else [], strict=True):
            if reply[0] in outcomes:
                outcomes[reply[0]] += 1
                self._store.notify(token, watch=reply[1].decode(), rank=reply[2].decode())
        return outcomes[b"requeued"], outcomes[b"poison"]

    def _expire(self, keys: ModelKeys) -> int:
        """Carry out timers that are due, at most 100; each is removed by the script that does what it stands for."""
        seconds, micros = self._client.time()
        due = self._client.zrange(keys.timers, "-inf", seconds * 1000 + micros // 1000, byscore=True, offset=0, num=100)
        timers = [timer.decode().split(":", 1) for timer in due]
        commands = [
            script("expire")(**keys.ending(token), kind=kind, token=token, ttl=self._result_ttl_ms)
            for kind, token in timers
        ]
        expired = 0
        for (_, token), reply in zip(timers, run_many(self._client, commands) if commands else [], strict=True):
            if reply[0] in (b"failed", b"cancelled"):
                expired += 1
                self._store.notify(token, watch=reply[1].decode(), rank=reply[2].decode())
        return expired

    def _requeue_unbegun(self, keys: ModelKeys, entries: list[bytes]) -> int:
        """Entries of dead readers; an entry whose message was deleted from the stream is only acknowledged."""
        commands: list[Any] = []
        for entry in entries:
            found = self._client.xrange(keys.queue, entry, entry)
            if not found:
                self._client.xack(keys.queue, "workers", entry)
                continue
            token = found[0][1][b"job"].decode()
            commands.append(
                script("requeue_unbegun")(
                    job=keys.job(token),
                    queue=keys.queue,
                    leases=keys.leases,
                    token=token,
                    entry=entry,
                    idle=self._lease_ms,
                )
            )
        return sum(reply[0] == b"requeued" for reply in run_many(self._client, commands)) if commands else 0

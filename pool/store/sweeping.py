"""Expiry of leases, carried out by whichever node comes by: there is no leader and no process whose death stops it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pool.store.connection import Client
from pool.store.ids import MODEL_PATTERN
from pool.store.jobs import JobStore, state_errors
from pool.store.keys import ModelKeys
from pool.store.scripts import run, run_many, script


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep did; `held` means that nothing may expire yet because sweeps were interrupted."""

    held: bool = False
    requeued: int = 0
    poisoned: int = 0


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
                return Swept(held=True)
            expired, unbegun = found
            requeued, poisoned = self._take_back(keys, [token.decode() for token in expired])
            return Swept(requeued=requeued + self._requeue_unbegun(keys, unbegun), poisoned=poisoned)

    def _take_back(self, keys: ModelKeys, tokens: list[str]) -> tuple[int, int]:
        commands = [
            script("take_back")(
                job=keys.job(token),
                log=keys.log(token),
                queue=keys.queue,
                index=keys.index,
                leases=keys.leases,
                outbox=keys.outbox,
                sweep=keys.sweep,
                token=token,
                cap=self._max_deliveries,
                ttl=self._result_ttl_ms,
            )
            for token in tokens
        ]
        outcomes = {b"requeued": 0, b"poison": 0}
        for token, reply in zip(tokens, run_many(self._client, commands) if commands else [], strict=True):
            if reply[0] in outcomes:
                outcomes[reply[0]] += 1
                self._store.notify(token, watch=reply[1].decode(), rank=reply[2].decode())
        return outcomes[b"requeued"], outcomes[b"poison"]

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

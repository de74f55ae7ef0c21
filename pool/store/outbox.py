"""Ended jobs whose Celery result is still to be written.

The result backend may be another server, so a result cannot be part of the script that ends a job. That script puts the
job here instead, and whoever has written the result takes it out: written at least once, never forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator

from pool.store.connection import Client, state_errors
from pool.store.ids import JobRef
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.records import JobRecord

BATCH = 100


class Outbox:
    """The outbox of one model."""

    def __init__(self, client: Client, store: JobStore, model: str, shard: int = 0) -> None:
        self._client = client
        self._store = store
        self._model = model
        self._shard = shard
        self._keys = ModelKeys(f"{model}:{shard}")

    def pending(self) -> Iterator[JobRecord]:
        """At most 100 ended jobs, oldest first. Entries whose record has expired are dropped."""
        with state_errors():
            tokens = [token.decode() for token in self._client.zrange(self._keys.outbox, 0, BATCH - 1)]
        refs = [JobRef("gen", self._model, self._shard, token) for token in tokens]
        views = self._store.views([(ref, 0) for ref in refs]) if refs else []
        for ref, view in zip(refs, views, strict=True):
            if view is None:
                self.written(ref.token)
            else:
                yield view.record

    def written(self, token: str) -> None:
        """Its result is stored: forget it."""
        with state_errors():
            self._client.zrem(self._keys.outbox, token)

"""Ended jobs whose Celery result is still to be written, and deleted ones whose result is still to be forgotten.

The result backend may be another server, so a result cannot be part of the script that ends or deletes a job. That
script notes it here instead, and whoever has done it takes the note out: done at least once, never forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pool.store.connection import Client, state_errors
from pool.store.ids import JobRef
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.records import JobRecord
from pool.store.running import run_many

BATCH = 100

_ERASED = "erased:"


@dataclass(frozen=True, slots=True)
class Erased:
    """A deleted job, by the id under which Celery knows it."""

    task_id: str


def filled(client: Client, models: Sequence[str]) -> list[str]:
    """The models whose outbox holds something; one trip, for every worker asks a few times a second for ever."""
    with state_errors():
        found = run_many(client, [["EXISTS", ModelKeys(f"{model}:0").outbox] for model in models])
    return [model for model, there in zip(models, found, strict=True) if there]


class Outbox:
    """The outbox of one model."""

    def __init__(self, client: Client, store: JobStore, model: str, shard: int = 0) -> None:
        self._client = client
        self._store = store
        self._model = model
        self._shard = shard
        self._keys = ModelKeys(f"{model}:{shard}")

    def pending(self) -> Iterator[JobRecord | Erased]:
        """At most 100 ended or deleted jobs, oldest first. Entries whose record has expired are dropped."""
        with state_errors():
            members = [member.decode() for member in self._client.zrange(self._keys.outbox, 0, BATCH - 1)]
        refs = [JobRef("gen", self._model, self._shard, member) for member in members if not member.startswith(_ERASED)]
        views = self._store.views([(ref, 0) for ref in refs]) if refs else []
        for ref, view in zip(refs, views, strict=True):
            if view is None:
                self.written(ref)
            else:
                yield view.record
        yield from (Erased(member.removeprefix(_ERASED)) for member in members if member.startswith(_ERASED))

    def written(self, ref: JobRef) -> bool:
        """Its result is stored: take out its note. False when the job was deleted before that, so that the result must
        be forgotten again."""
        pipe = self._client.pipeline(transaction=False)
        pipe.zrem(self._keys.outbox, ref.token)
        pipe.get(self._keys.tombstone(ref.token))
        with state_errors():
            _, remembered = pipe.execute()
        return bool(remembered != b"erased")

    def forgotten(self, job: Erased) -> None:
        """Its result is gone: take out its note."""
        with state_errors():
            self._client.zrem(self._keys.outbox, f"{_ERASED}{job.task_id}")

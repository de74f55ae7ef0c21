"""Ended jobs as their owners see them: what is still known of the request, enough to ask for the same again as a new
job; and their removal before their time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from pool.errors import JobNotCancellable
from pool.store.connection import Client, state_errors
from pool.store.ids import JobRef
from pool.store.inputs import read_input
from pool.store.jobs import JobStore
from pool.store.keys import keys_of
from pool.store.running import run
from pool.store.scripts import Command, script


@dataclass(frozen=True, slots=True)
class StoredJob:
    """What the record still knows of the request: what a further job of the same kind needs.

    `options` and `params`: JSON as in NewJob; `input`: JSON of the prompt, None when it was not kept.
    """

    door: str
    tenant: str
    lane: str
    fairness: str
    n: int
    seed: int
    options: str
    params: str
    input: str | None
    celery: bool
    run_timeout_ms: int
    tombstone_ms: int


_FIELDS = (
    "kind", "tenant", "lane", "fairness", "n", "seed", "options", "params", "celery", "run_timeout_ms", "tombstone_ms",
)  # fmt: skip


def stored_job(client: Client, ref: JobRef) -> StoredJob | None:
    """The request of an ended job; None when its record is gone. Raises StateUnavailable, and GenerationFailed when its
    input is damaged."""
    with state_errors():
        values = client.hmget(keys_of(ref).job(ref.token), _FIELDS)
    stored = {name: value.decode() for name, value in zip(_FIELDS, values, strict=True) if value is not None}
    if len(stored) < len(_FIELDS):
        return None
    return StoredJob(
        door=stored["kind"],
        tenant=stored["tenant"],
        lane=stored["lane"],
        fairness=stored["fairness"],
        n=int(stored["n"]),
        seed=int(stored["seed"]),
        options=stored["options"],
        params=stored["params"],
        input=read_input(client, ref),
        celery=stored["celery"] == "1",
        run_timeout_ms=int(stored["run_timeout_ms"]),
        tombstone_ms=int(stored["tombstone_ms"]),
    )


def erase(client: Client, store: JobStore, ref: JobRef) -> None:
    """Remove a job's record, log and input, and in time its Celery result; one that has not ended is cancelled first.
    Repeated, it finds nothing.

    Raises JobUnknown and StateUnavailable.
    """
    with state_errors():
        code, *rest = run(client, _erase_command(ref))
        if code == b"live":
            with suppress(JobNotCancellable):
                store.cancel(ref)
            code, *rest = run(client, _erase_command(ref))
        if code == b"blocks":
            code, *_ = run(client, _erase_command(ref, rest[0].decode().split()))
    if code == b"gone":
        raise store.absence(ref)


def _erase_command(ref: JobRef, blocks: Sequence[str] = ()) -> Command:
    keys = keys_of(ref)
    return script("erase")(
        job=keys.job(ref.token),
        log=keys.log(ref.token),
        outbox=keys.outbox,
        tombstone=keys.tombstone(ref.token),
        blocks=[keys.input(block) for block in blocks],
    )

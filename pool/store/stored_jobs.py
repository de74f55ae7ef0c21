"""What the store still knows of an ended job's request: enough to ask for the same again, as a new job."""

from __future__ import annotations

from dataclasses import dataclass

from pool.store.connection import Client, state_errors
from pool.store.ids import JobRef
from pool.store.inputs import read_input
from pool.store.keys import keys_of


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

"""What every verb that accepts a job is given, by the names that lua/lib/accept.lua knows."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from pool.store.flows import flow_of
from pool.store.inputs import StoredInput
from pool.store.keys import keys_of
from pool.store.records import NewJob
from pool.store.scripts import Command, Value, script

#: How late a submit that got no answer, or one that goes with a refused one, may still arrive.
LATE_MS = 600_000

Accepted = dict[str, Value | Sequence[Value]]


class Way(Protocol):
    """How a job comes in."""

    def command(self, job: NewJob, accepted: Accepted) -> Command:
        """The verb; `accepted`: what `accepting` gives."""
        ...

    def leads_on(self, code: bytes, detail: Sequence[bytes]) -> bool:
        """Whether the job, which was not accepted with this reply, is to be offered again at once."""
        ...


class PlainWay:
    """Into its lane."""

    def command(self, job: NewJob, accepted: Accepted) -> Command:
        """submit."""
        keys = keys_of(job.ref)
        return script("submit")(queue=keys.queue, hungry=keys.hungry, lanes=keys.lanes, **accepted)

    def leads_on(self, code: bytes, detail: Sequence[bytes]) -> bool:  # noqa: ARG002 - the same for all replies
        """Never."""
        return False


def accepting(
    job: NewJob, stored: StoredInput, *, sent: Container[int], not_after_ms: int, cap: int, claimed: bool
) -> Accepted:
    """`sent`: positions of the blocks whose content is sent along; `not_after_ms`: the last moment, by the server's
    clock; `cap`: choices the model may hold; `claimed`: whether an Idempotency-Key stands for it."""
    keys = keys_of(job.ref)
    return {
        "job": keys.job(job.ref.token),
        "index": keys.index,
        "timers": keys.timers,
        "tombstone": keys.tombstone(job.ref.token),
        "tenants": keys.tenants,
        "model": keys.model,
        "blocks": [keys.input(block.id) for block in stored.blocks],
        "token": job.ref.token,
        "not_after": not_after_ms,
        "cap": cap,
        "tenant": job.tenant,
        "own_cap": job.tenant_cap,
        "claimed": int(claimed),
        "remember": LATE_MS,
        "n": job.n,
        "queue_timeout": job.queue_timeout_ms,
        "deadline": job.deadline_ms,
        "reader": job.reader_ms,
        "data": [block.packed() if at in sent else b"" for at, block in enumerate(stored.blocks)],
        "flow": flow_of(job.lane, job.tenant, job.fairness),
        "terms": f"{job.n}:{job.weight}:{job.inflight_cap}" + (f":{job.session}" if job.session else ""),
        "fields": job.fields() + stored.fields,
    }

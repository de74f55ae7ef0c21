"""Asks for what ended jobs asked for, again. An engine that declares it gives the same bytes: that is invariant I2, and
the only way to audit it is to run some jobs a second time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

from pydantic import ValidationError

from pool.errors import GenpoolError, InvalidRequest, JobUnknown, StateUnavailable
from pool.store.audit import Violation
from pool.store.connection import Client, state_errors
from pool.store.ids import JobRef, new_ref
from pool.store.keys import ModelKeys
from pool.store.records import JobRecord
from pool.store.stored_jobs import StoredJob, stored_job
from tasks.config import Settings
from tasks.payloads import PROMPT, GenerationOptions, GenerationRequest
from tasks.services import Services, open_services

POLL_S = 0.2
BATCH = 200


def request_of(model: str, job: StoredJob) -> GenerationRequest:
    """The request again, with the seed that was drawn for it; checked against the model of today like any other.

    Raises InvalidRequest when its input was not kept or cannot be read.
    """
    if job.input is None:
        raise InvalidRequest("Its input was not kept (store: false), so it cannot be submitted again.")
    try:
        options = GenerationOptions.model_validate_json(job.options)
        return GenerationRequest(
            model=model,
            prompt=PROMPT.validate_json(job.input),
            n=job.n,
            sampling=options.sampling.model_copy(update={"seed": job.seed}),
            max_tokens=options.max_tokens,
        )
    except ValidationError:
        raise InvalidRequest("Its stored request is not one of this version of genpool.") from None


@dataclass(frozen=True, slots=True)
class Reruns:
    """`compared` jobs ran again to their end, `not_run` did not; `differing`: of those compared, the ones that gave
    another text (I2)."""

    compared: int
    not_run: int
    differing: tuple[Violation, ...]


def audit_texts(settings: Settings, count: int) -> Reruns:
    """Run up to `count` ended jobs of each model again and compare their texts.

    Only jobs that completed on an engine which declares the same bytes, with the weights that are loaded now, and whose
    input was kept, can be compared. They wait in the queue like any other, and a second run that is refused, or ends
    without its text, tells nothing. Raises StateUnavailable.
    """
    found: list[list[Violation] | None] = []
    with closing(open_services(settings, max_connections=1)) as services:
        for model in services.submitter.models():
            candidates = list(_comparable(services.client, model))
            chosen = random.sample(candidates, min(count, len(candidates)))
            again = [(ref, _submit(services, ref)) for ref in chosen]
            found += [None if new is None else _differences(services, ref, new) for ref, new in again]
    compared = [violations for violations in found if violations is not None]
    return Reruns(len(compared), len(found) - len(compared), tuple(chain.from_iterable(compared)))


def _comparable(client: Client, model: str) -> Iterator[JobRef]:
    keys = ModelKeys(f"{model}:0")
    with state_errors():
        loaded = client.hget(keys.card, "fingerprint")
        for key in client.scan_iter(match=keys.job("*"), count=BATCH):
            engine, door, text = client.hmget(key, "engine", "kind", "outputs")
            if text is not None and engine is not None and engine == loaded:
                yield new_ref(door.decode(), model, token=key.decode().rpartition(":")[2])


def _submit(services: Services, ref: JobRef) -> JobRef | None:
    """None: this one cannot be run again now (its input was not kept, it expired meanwhile, the queue is full)."""
    try:
        job = stored_job(services.client, ref)
        if job is None:
            return None
        return services.submitter.submit(
            request_of(ref.model, job), door="celery", background=True, store=False, tenant=job.tenant
        )
    except StateUnavailable:
        raise
    except GenpoolError:
        return None


def _differences(services: Services, ref: JobRef, new: JobRef) -> list[Violation] | None:
    """Whether the second run gave the same; None: one of both has expired, or the second ended without its text."""
    try:
        again = _ended(services, new)
        first = services.store.read(ref)
    except JobUnknown:
        return None
    if not again.outputs:
        return None
    if first.outputs == again.outputs:
        return []
    return [Violation("I2", ref.token, f"run again with the same seed, it gave another text (job {again.id})")]


def _ended(services: Services, ref: JobRef) -> JobRecord:
    while not (record := services.store.read(ref)).terminal:
        time.sleep(POLL_S)
    return record

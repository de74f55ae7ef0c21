"""Asks for what ended jobs asked for, again. An engine that declares it gives the same bytes: that is invariant I2, and
the only way to audit it is to run some jobs a second time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing

from pydantic import ValidationError

from pool.errors import GenpoolError, InvalidRequest
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


def audit_texts(settings: Settings, count: int) -> tuple[int, list[Violation]]:
    """Run up to `count` ended jobs of each model again and compare their texts; how many were compared, and those that
    differ (I2).

    Only jobs that completed on an engine which declares the same bytes, with the weights that are loaded now, and whose
    input was kept, can be compared. They wait in the queue like any other. Raises StateUnavailable.
    """
    compared = 0
    violations: list[Violation] = []
    with closing(open_services(settings, max_connections=1)) as services:
        for model in services.submitter.models():
            candidates = list(_comparable(services.client, model))
            chosen = random.sample(candidates, min(count, len(candidates)))
            again = {ref: new for ref in chosen if (new := _submit(services, ref)) is not None}
            for ref, new in again.items():
                compared += 1
                violations += _differences(services, ref, _ended(services, new))
    return compared, violations


def _comparable(client: Client, model: str) -> Iterator[JobRef]:
    keys = ModelKeys(f"{model}:0")
    with state_errors():
        loaded = client.hget(keys.card, "fingerprint")
        for key in client.scan_iter(match=keys.job("*"), count=BATCH):
            engine, door, text = client.hmget(key, "engine", "kind", "outputs")
            if text is not None and engine is not None and engine == loaded:
                yield new_ref(door.decode(), model, token=key.decode().rpartition(":")[2])


def _submit(services: Services, ref: JobRef) -> JobRef | None:
    """None: this one cannot be asked for again (its input was not kept, or it expired meanwhile)."""
    try:
        job = stored_job(services.client, ref)
        if job is None:
            return None
        return services.submitter.submit(
            request_of(ref.model, job), door="celery", background=True, store=False, tenant=job.tenant
        )
    except InvalidRequest:
        return None


def _ended(services: Services, ref: JobRef) -> JobRecord:
    while not (record := services.store.read(ref)).terminal:
        time.sleep(POLL_S)
    return record


def _differences(services: Services, ref: JobRef, again: JobRecord) -> Iterator[Violation]:
    try:
        first = services.store.read(ref)
    except GenpoolError:
        return  # it expired while we ran it again
    if first.outputs != again.outputs:
        how = f"ended {again.state}" if again.state != first.state else "gave another text"
        yield Violation("I2", ref.token, f"run again with the same seed, it {how} (job {again.id})")

"""Celery results of generations: what `AsyncResult(id).get()` returns, written with Celery's own backend, and forgotten
with a job that is deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from celery import Celery
from celery.exceptions import TaskRevokedError

from pool.errors import GenerationFailed
from pool.rules import jobs
from pool.store.outbox import Erased, Outbox, filled
from pool.store.records import JobRecord
from tasks.services import Services


def result_of(record: JobRecord) -> dict[str, Any]:
    """A completed or incomplete job as JSON: id, model, status, outputs and usage (tokens)."""
    return {
        "id": record.id,
        "model": record.model,
        "status": record.state,
        "outputs": [
            {"index": index, "text": output.text, "finish_reason": output.finish_reason}
            for index, output in enumerate(record.outputs)
        ],
        "usage": {
            "input_tokens": record.prompt_tokens or 0,
            "cached_tokens": record.cached_tokens or 0,
            "output_tokens": record.output_tokens or 0,
        },
    }


def store_result(app: Celery, record: JobRecord) -> None:
    """Write the Celery result of an ended job under the id that Celery knows it by. Idempotent."""
    backend = app.backend
    if record.state in (jobs.COMPLETED, jobs.INCOMPLETE):
        backend.store_result(record.task_id, result_of(record), "SUCCESS")
    elif record.state == jobs.CANCELLED:
        backend.store_result(record.task_id, TaskRevokedError("cancelled"), "REVOKED")
    else:
        code = record.error_code or GenerationFailed.code
        backend.store_result(record.task_id, GenerationFailed(f"{code}: {record.error_message}"), "FAILURE")


def outbox_chore(app: Celery, services: Services, models: Sequence[str]) -> Callable[[], None]:
    """A maintenance chore that empties the models' outboxes; `models` may grow."""

    def chore() -> None:
        for model in filled(services.client, models):
            outbox = Outbox(services.client, services.store, model)
            for job in outbox.pending():
                if isinstance(job, Erased):
                    app.backend.forget(job.task_id)
                    outbox.forgotten(job)
                    continue
                store_result(app, job)
                if not outbox.written(job.ref):
                    app.backend.forget(job.task_id)

    return chore

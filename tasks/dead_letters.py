"""What an operator does with dead letters: look at them, try a job again, remove them.

Trying again is done in an order that a crash cannot hurt: the new job is submitted first, under a token that the letter
determines, and then the letter is removed. Cut short in between, the letter is still there, and the next retry finds
the job that was submitted instead of starting another. The new job has the queue timeout of today and no deadline:
the old one counted from the first submit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

from pool.errors import GenpoolError, JobExpired, JobUnknown, QueueFull, StateUnavailable, UnknownModel
from pool.store.dead_letters import DeadLetter, DeadLetters
from pool.store.ids import new_ref, parse_ref
from pool.store.stored_jobs import stored_job
from tasks.config import Settings
from tasks.rerun import request_of
from tasks.services import Services, open_services

#: What became of one id: its letter was dealt with (the new job's id, or "" when it was dropped), or why it was not.
Outcome = tuple[str, str | GenpoolError]


def listed(settings: Settings, model: str | None = None) -> list[DeadLetter]:
    """Dead letters of all configured models, or of one. Raises UnknownModel, StateUnavailable."""
    with closing(open_services(settings, max_connections=1)) as services:
        return [letter for name in _models(settings, model) for letter in DeadLetters(services.client, name)]


def retry(settings: Settings, jobs: Sequence[str], model: str | None = None) -> Iterator[Outcome]:
    """Submit these jobs again (all of `model` when none is named), one after the other.

    A job that cannot be submitted again is an outcome, and the next one is tried; QueueFull and StateUnavailable hold
    for all that follow, so they are raised.
    """
    with closing(open_services(settings, max_connections=1)) as services:
        for name, found in _selected(services, jobs, model):
            if isinstance(found, GenpoolError):
                yield name, found
                continue
            try:
                yield name, _retry(services, found)
            except (QueueFull, StateUnavailable):
                raise
            except GenpoolError as error:
                yield name, error


def drop(settings: Settings, jobs: Sequence[str], model: str | None = None) -> Iterator[Outcome]:
    """Remove the letters of these jobs; when none is named, those of `model`, or all."""
    with closing(open_services(settings, max_connections=1)) as services:
        for name, found in _selected(services, jobs, model):
            if not isinstance(found, GenpoolError):
                DeadLetters(services.client, found.ref.model).drop([found])
            yield name, found if isinstance(found, GenpoolError) else ""


def _retry(services: Services, letter: DeadLetter) -> str:
    job = stored_job(services.client, letter.ref)
    if job is None:
        raise JobExpired("Its record has expired, so there is nothing to submit again. Its dead letter can be dropped.")
    request = request_of(letter.ref.model, job)
    new = str(new_ref(job.door, letter.ref.model, token=letter.retry_token))
    # Expired: it was submitted before, and its record is gone again; only the letter is left to remove.
    with suppress(JobExpired):
        services.submitter.submit(
            request,
            door=job.door,
            token=letter.retry_token,
            background=True,
            params=job.params,
            tenant=job.tenant,
            lane=job.lane,
            fairness=job.fairness,
            celery=job.celery,
            run_timeout_ms=job.run_timeout_ms,
            tombstone_ms=job.tombstone_ms,
        )
    DeadLetters(services.client, letter.ref.model).drop([letter])
    return new


def _selected(
    services: Services, jobs: Sequence[str], model: str | None
) -> Iterator[tuple[str, DeadLetter | JobUnknown]]:
    """The letters asked for, read before the first of them is touched."""
    models = _models(services.settings, model)
    if not jobs:
        letters = [letter for name in models for letter in DeadLetters(services.client, name)]
        yield from ((str(letter.ref), letter) for letter in letters)
        return
    wanted = {job: _key(job) for job in jobs}
    asked_models = {model for model, _, _ in wanted.values()} & set(models)
    keys = set(wanted.values())
    found = {
        key: letter
        for name in sorted(asked_models)
        for letter in DeadLetters(services.client, name)
        if (key := (letter.ref.model, letter.ref.shard, letter.ref.token)) in keys
    }
    for job, key in wanted.items():
        yield job, found.get(key) or JobUnknown("No dead letter has this id.")


def _key(job: str) -> tuple[str, int, str]:
    """Model, shard and token of an id from outside; empty ones when genpool cannot have issued it."""
    try:
        ref = parse_ref(job)
    except JobUnknown:
        return "", 0, ""
    return ref.model, ref.shard, ref.token


def _models(settings: Settings, model: str | None) -> list[str]:
    """Configured models, disabled ones too: their letters stay."""
    if model is not None and model not in settings.models:
        raise UnknownModel(f"No model is named {model}. Known: {', '.join(settings.models) or 'none'}.", param="model")
    return list(settings.models) if model is None else [model]


def as_json(letters: Sequence[DeadLetter]) -> str:
    """Dead letters for programs; times in milliseconds since 1970."""
    rows = [
        {
            "model": letter.ref.model,
            "job": str(letter.ref),
            "code": letter.code,
            "losses": letter.losses,
            "rank": letter.rank,
            "at_ms": letter.at_ms,
            "record_exists": letter.record_exists,
        }
        for letter in letters
    ]
    return json.dumps(rows, indent=2)

"""From a validated request to a stored job with a waiter; shared by both dialects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from flask import Request, request

from pool.errors import GenpoolError, InvalidRequest, StateUnavailable
from pool.rules.fairness import LANES
from pool.rules.programs.claims import Claim
from pool.rules.programs.session_headers import session_of_headers
from pool.store.ids import JobRef, parse_ref
from pool.store.jobs import View
from pool.store.keys import END_ONLY
from pool.store.ranks import RankRegistry
from pool.store.records import NewJob
from tasks.payloads import GenerationRequest
from tasks.program_intake import Entrance
from webapp.auth import Caller, current_caller
from webapp.errors import KeyNotAllowed, NoWorker
from webapp.node import Node
from webapp.waits import Waiter

MAX_KEY_CHARS = 256
#: A key outlives its job's id by this much: after an outage, or waiting again, a job ends later than its limits say.
KEY_SLACK_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A caller's Idempotency-Key with the hash of the body it came with."""

    value: str
    body_hash: str


@dataclass(frozen=True, slots=True)
class Order:
    """A request and how its job is to be kept. `params`: what answers echo; `names`: what this door calls the request's
    own fields, for errors that the model's limits cause; `timeouts` (ms): the job's own time limits; `claim`: the
    Program it belongs to."""

    door: str
    request: GenerationRequest
    params: dict[str, Any]
    background: bool = False
    store: bool = True
    names: Mapping[str, str] = field(default_factory=dict)
    timeouts: Mapping[str, int] = field(default_factory=dict)
    key: IdempotencyKey | None = None
    claim: Claim | None = None

    @property
    def cancels(self) -> bool:
        """Whether a client that goes away ends the job at once. Not with a key: a resend may find it, and without one
        it is cancelled when its reader's grace has passed."""
        return not self.background and self.key is None


def idempotency_key(request: Request, body: Mapping[str, Any]) -> IdempotencyKey | None:
    """The request's key, None without one; `body` is its parsed JSON. Raises InvalidRequest for a key that is too long
    or not printable ASCII."""
    value = request.headers.get("Idempotency-Key")
    if value is None:
        return None
    if not 1 <= len(value) <= MAX_KEY_CHARS or not value.isascii() or not value.isprintable():
        raise InvalidRequest(
            f"Idempotency-Key: between 1 and {MAX_KEY_CHARS} printable ASCII characters.", param="Idempotency-Key"
        )
    canonical = json.dumps([request.path, body], sort_keys=True, separators=(",", ":"))
    return IdempotencyKey(value, hashlib.sha256(canonical.encode()).hexdigest())


#: A job to store, and how it comes in where it is a Program's.
Coming = tuple[NewJob, Entrance | None]


def submit_and_wait(node: Node, order: Order, *, follows: bool) -> tuple[Waiter, View]:
    """Store a job with a waiter registered first; the view shows it right after, and the waiter goes on from there.
    `follows`: it shall hear of each token as it comes, not only of the end.

    Raises what `Submitter.prepare` and `Node.submit` raise; then nothing stays enqueued.
    """
    watch = node.waits.node_id if follows else node.waits.node_id + END_ONLY
    job, entrance = _prepare(node, order, watch=watch, reader_ms=0 if order.background else node.waits.hold_ms)
    waiter = node.waits.open(job.ref)
    try:
        view = _store(node, job, entrance, order.key)
    except GenpoolError:
        waiter.close()
        raise
    waiter.arm()
    waiter.saw(view)
    return waiter, view


def submit_unwatched(node: Node, order: Order) -> View:
    """Store a job that nobody here waits for. Raises as `submit_and_wait` does."""
    job, entrance = _prepare(node, order, watch="", reader_ms=0)
    return _store(node, job, entrance, order.key)


def _prepare(node: Node, order: Order, *, watch: str, reader_ms: int) -> Coming:
    job, entrance = _build(node, order, watch=watch, reader_ms=reader_ms)
    if order.key is None:
        _check_worker(node, job)
        return job, entrance
    result_ttl_ms = node.settings.state.result_ttl_seconds * 1000
    ttl_ms = job.queue_timeout_ms + job.run_timeout_ms + result_ttl_ms + job.tombstone_ms + KEY_SLACK_MS
    bound = node.store.claim(job.tenant, order.key.value, job.ref, body_hash=order.key.body_hash, ttl_ms=ttl_ms)
    if bound is not None:
        return replace(job, ref=parse_ref(bound), task_id=bound), entrance
    try:
        _check_worker(node, job)
    except NoWorker:
        node.store.release(job, order.key.value)
        raise
    return job, entrance


def _check_worker(node: Node, job: NewJob) -> None:
    """Raise NoWorker where a job shall not wait for a worker that is not there."""
    if not node.settings.limits.fail_fast_without_workers:
        return
    if not RankRegistry(node.services.client, job.ref.model).live():
        raise NoWorker(f"{job.ref.model} has no worker at the moment.")


def _build(node: Node, order: Order, *, watch: str, reader_ms: int) -> Coming:
    caller = current_caller()
    check_turn(order.request, caller)
    try:
        job = node.services.submitter.prepare(
            order.request,
            door=order.door,
            session=_session(node, order),
            tenant=caller.tenant,
            tenant_cap=caller.pending,
            **caller.share(),
            params=json.dumps(order.params, ensure_ascii=False, separators=(",", ":")),
            background=order.background,
            store=order.store,
            watch=watch,
            reader_ms=reader_ms,
            **order.timeouts,
        )
        return (job, None) if order.claim is None else node.intake().prepare(job, order.claim, caller.limits)
    except InvalidRequest as error:
        error.param = order.names.get(error.param or "", error.param)
        raise


def _session(node: Node, order: Order) -> str:
    """The session that the request's headers name, "" for none: of one without a Program, where replicas go by it.
    Raises InvalidRequest that names the header."""
    if order.claim is not None or not node.services.submitter.goes_by_session(order.request.model):
        return ""
    return session_of_headers(request.headers) or ""


def check_turn(request: GenerationRequest, caller: Caller) -> None:
    """Raises KeyNotAllowed for a lane or a fairness key that the caller's key does not allow."""
    highest = caller.limits.highest_lane
    if highest is not None and LANES.index(request.lane) < LANES.index(highest):
        raise KeyNotAllowed(f"This API key may use lane {highest} and lower ones, not {request.lane}.", param="lane")
    if request.fairness_key and not caller.limits.fairness_keys and not caller.sees_all:
        raise KeyNotAllowed("This API key may not name fairness keys.", param="fairness_key")


def _store(node: Node, job: NewJob, entrance: Entrance | None, key: IdempotencyKey | None) -> View:
    node.submit(job, entrance=entrance, key=None if key is None else key.value)
    with _nothing_left_behind(node, job.ref, keyed=key is not None):
        if key is not None and job.watch:
            # The job may be an earlier request's, whose reader is gone: this node is one now, and must hear of it.
            node.store.watch(job.ref, job.watch, hold_ms=node.waits.hold_ms)
        return node.store.view(job.ref)


@contextmanager
def _nothing_left_behind(node: Node, ref: JobRef, *, keyed: bool) -> Iterator[None]:
    """The answer will be a 503, after which clients resend: the job must not stay, unless the resend will find it."""
    try:
        yield
    except StateUnavailable:
        if not keyed:
            node.waits.abandon_later(ref)
        raise

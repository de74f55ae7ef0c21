"""From a validated request to a stored job with a waiter; shared by both dialects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pool.errors import GenpoolError, InvalidRequest, StateUnavailable
from pool.store.ids import JobRef
from pool.store.jobs import View
from pool.store.records import NewJob
from tasks.payloads import GenerationRequest
from webapp.node import Node
from webapp.waits import Waiter


@dataclass(frozen=True, slots=True)
class Order:
    """A request and how its job is to be kept. `params`: what answers echo; `names`: what this door calls the request's
    own fields, for errors that the model's limits cause."""

    door: str
    request: GenerationRequest
    params: dict[str, Any]
    background: bool = False
    store: bool = True
    names: Mapping[str, str] = field(default_factory=dict)


def submit_and_wait(node: Node, order: Order) -> tuple[Waiter, View]:
    """Store a job with a waiter registered first; the view shows it right after, and the waiter goes on from there.

    Raises what `Submitter.prepare` and `Node.submit` raise; then nothing stays enqueued.
    """
    job = _prepare(node, order, watch=node.waits.node_id)
    waiter = node.waits.open(job.ref)
    try:
        view = _store(node, job)
    except GenpoolError:
        waiter.close()
        raise
    waiter.arm()
    waiter.saw(view)
    return waiter, view


def submit_unwatched(node: Node, order: Order) -> View:
    """Store a job that nobody here waits for. Raises as `submit_and_wait` does."""
    return _store(node, _prepare(node, order, watch=""))


def _prepare(node: Node, order: Order, *, watch: str) -> NewJob:
    try:
        return node.services.submitter.prepare(
            order.request,
            door=order.door,
            params=json.dumps(order.params, ensure_ascii=False, separators=(",", ":")),
            background=order.background,
            store=order.store,
            watch=watch,
        )
    except InvalidRequest as error:
        error.param = order.names.get(error.param or "", error.param)
        raise


def _store(node: Node, job: NewJob) -> View:
    node.submit(job)
    with _nothing_left_behind(node, job.ref):
        return node.store.view(job.ref)


@contextmanager
def _nothing_left_behind(node: Node, ref: JobRef) -> Iterator[None]:
    """The answer will be a 503, after which clients resend: the job must not stay."""
    try:
        yield
    except StateUnavailable:
        node.waits.abandon(ref)
        raise

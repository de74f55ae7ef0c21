"""Waiting for a job's end on behalf of one synchronous request."""

from __future__ import annotations

import socket
import time

from pool.errors import StateUnavailable
from pool.store.ids import JobRef
from pool.store.jobs import View
from pool.store.log import LogEntry
from pool.store.records import JobRecord
from webapp.errors import ClientGone, StillRunning
from webapp.node import Node
from webapp.sockets import client_gone
from webapp.submitting import Order, submit_and_wait
from webapp.waits import Waiter

#: How often a wait looks at its client's connection and at whether the process is to end.
TICK_S = 1.0
#: A stopping process answers its synchronous requests after this long; see `webapp.gunicorn_conf`.
STOP_GRACE_S = 2.0


def generate(node: Node, order: Order, sock: socket.socket | None) -> tuple[JobRecord, tuple[LogEntry, ...]]:
    """Store a job and wait for its end, in one of the node's places; the terminal record and the whole log.

    Raises TooManyWaiting, and what `submit_and_wait` and `wait_for_end` raise.
    """
    with node.places.held():
        waiter, view = submit_and_wait(node, order, follows=False)
        try:
            return wait_for_end(node, waiter, view, sock, cancels=order.cancels)
        finally:
            waiter.close()


def wait_for_end(
    node: Node, waiter: Waiter, first: View, sock: socket.socket | None, *, cancels: bool
) -> tuple[JobRecord, tuple[LogEntry, ...]]:
    """The terminal record and the whole log, of which `first` is what was already read.

    Raises StillRunning (the job goes on), ClientGone, JobUnknown and JobExpired. `cancels`: a client that goes away
    ends the job.
    """
    deadline_s = time.monotonic() + node.settings.server.sync_wait_seconds
    look_s = time.monotonic() + TICK_S
    record, entries = first.record, list(first.entries)
    while not record.terminal:
        now_s = time.monotonic()
        if now_s >= deadline_s:
            last = _last_look(node, waiter.ref)
            if last is not None and last.record.terminal:
                return last.record, tuple(last.entries)
            node.waits.unwatch(waiter)
            node.waits.let_go(waiter.ref)
            raise _still_running(node, last.record if last is not None else record)
        if now_s >= look_s:
            look_s = now_s + TICK_S
            if client_gone(sock):
                if cancels:
                    node.waits.abandon(waiter.ref)
                else:
                    node.waits.unwatch(waiter)
                raise ClientGone("The client closed the connection.")
            if node.stopping():
                deadline_s = min(deadline_s, now_s + STOP_GRACE_S)
        view = waiter.next(min(look_s, deadline_s) - now_s)
        if view is not None:
            record = view.record
            entries.extend(view.entries)
    return record, tuple(entries)


def _last_look(node: Node, ref: JobRef) -> View | None:
    """The job as it is now: who waits for an end hears of nothing else, so what it knows may be old. None while the
    state server does not tell."""
    try:
        return node.store.view(ref)
    except StateUnavailable:
        return None


def _still_running(node: Node, record: JobRecord) -> StillRunning:
    job, state = record.id, record.state
    if node.stopping():
        message = f"This node is shutting down. The generation goes on; read it at /v1/responses/{job}."
        return StillRunning(message, job=job, state=state, code="node_stopping", status=503)
    seconds = node.settings.server.sync_wait_seconds
    message = f"The generation has not ended within {seconds:g} s. It goes on; read it at /v1/responses/{job}."
    return StillRunning(message, job=job, state=state, code="sync_wait_exceeded", status=504)

"""Waiting for a job's end on behalf of one synchronous request."""

from __future__ import annotations

import socket
import time

from pool.errors import JobErased, StateUnavailable
from pool.rules import jobs
from pool.store import lane_positions
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
PATH = "/v1/responses/"


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

    Raises StillRunning (the job goes on), ClientGone, JobUnknown and JobExpired; a job that is deleted meanwhile ends
    as a cancelled one. `cancels`: a client that goes away ends the job.
    """
    deadline_s = time.monotonic() + node.settings.server.sync_wait_seconds
    look_s = time.monotonic() + TICK_S
    record, entries = first.record, list(first.entries)
    while not record.terminal:
        now_s = time.monotonic()
        if now_s >= deadline_s:
            # First: a last look may take its time while the state server is away, and the job must go on meanwhile.
            node.waits.unwatch(waiter)
            node.waits.let_go(waiter.ref)
            last = _last_look(node, record)
            if last is not None and last.record.terminal:
                return last.record, tuple(last.entries)
            if last is None:
                raise _still_running(node, record, None)
            raise _still_running(node, last.record, _ahead(node, last.record))
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
        try:
            view = waiter.next(min(look_s, deadline_s) - now_s)
        except JobErased:
            return record.deleted(entries[-1].next_seq if entries else 0), tuple(entries)
        if view is not None:
            record = view.record
            entries.extend(view.entries)
    return record, tuple(entries)


def _last_look(node: Node, seen: JobRecord) -> View | None:
    """The job as it is now: who waits for an end hears of nothing else, so what it knows may be old. None while the
    state server does not tell."""
    try:
        return node.store.view(seen.ref)
    except JobErased:
        return View(seen.deleted(), (), 0)
    except StateUnavailable:
        return None


def _still_running(node: Node, record: JobRecord, ahead: int | None) -> StillRunning:
    job = record.id
    seconds = node.settings.server.sync_wait_seconds
    if node.stopping():
        code, message = "node_stopping", f"This node is shutting down. The generation goes on; read it at {PATH}{job}."
    else:
        code = "sync_wait_exceeded"
        message = f"The generation has not ended within {seconds:g} s. It goes on; read it at {PATH}{job}."
    return StillRunning(message, job=job, state=record.state, code=code, ahead=ahead)


def _ahead(node: Node, record: JobRecord) -> int | None:
    """How many wait before a queued job; None for others, and while the state server does not tell."""
    if record.state != jobs.QUEUED:
        return None
    try:
        return lane_positions.ahead(node.services.client, record.ref)
    except StateUnavailable:
        return None

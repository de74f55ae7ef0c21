"""Timers of jobs: queue and run timeouts, deadlines, readers that went away."""

from __future__ import annotations

import pytest

from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Write
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from tests.builders import LEASE_MS, completed, entry, new_job, sweeper, swept_steadily

KEYS = ModelKeys("tiny:0")


def due(client: Client, kind: str, token: str) -> None:
    """As if this timer's time had come."""
    assert client.zadd(KEYS.timers, {f"{kind}:{token}": 1}, xx=True, ch=True) == 1


def kinds(client: Client) -> set[str]:
    """The kinds of timers that are set."""
    return {timer.decode().split(":")[0] for timer in client.zrange(KEYS.timers, 0, -1)}


def test_a_job_that_nobody_begins_fails_after_its_queue_timeout(store: JobStore, client: Client) -> None:
    """By name, without an attempt, and nothing of it stays queued."""
    job = new_job()
    store.submit(job)
    assert sweeper(client).sweep("tiny").expired == 0
    due(client, "queue", job.ref.token)
    assert sweeper(client).sweep("tiny").expired == 1
    record = store.read(job.ref)
    assert (record.state, record.error_code, record.attempt) == ("failed", "queue_timeout", 0)
    assert client.xlen(KEYS.queue) == 0
    assert client.exists(KEYS.timers, KEYS.index) == 0


def test_beginning_ends_the_queue_timeout_for_good(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """A job that was begun and handed back is not failed for the time it waits again; its run timeout goes on."""
    job = new_job()
    store.submit(job)
    assert kinds(client) == {"queue"}
    (handout,) = rank_a.take(1, 10).handouts
    assert kinds(client) == {"run"}
    first = client.zscore(KEYS.timers, f"run:{job.ref.token}")
    rank_a.hand_back([handout.lease])
    (again,) = rank_a.take(1, 10).handouts
    assert kinds(client) == {"run"}
    assert client.zscore(KEYS.timers, f"run:{job.ref.token}") == first
    rank_a.write([Write(again.lease, 0, (), completed("x"))])
    assert client.exists(KEYS.timers) == 0


@pytest.mark.parametrize(("kind", "code"), [("run", "run_timeout"), ("deadline", "deadline_exceeded")])
def test_a_running_job_past_its_time_fails_and_keeps_its_text(
    store: JobStore, client: Client, rank_a: Delivery, kind: str, code: str
) -> None:
    """What was shown stays readable, and the worker's late completion loses."""
    job = new_job(deadline_ms=60_000)
    store.submit(job)
    (handout,) = rank_a.take(1, 10).handouts
    rank_a.write([Write(handout.lease, 0, (entry(0, 5, text="so far"),))])
    due(client, kind, job.ref.token)
    assert sweeper(client).sweep("tiny").expired == 1
    assert rank_a.write([Write(handout.lease, 1, (), completed("so far and on"))])[0].code == "stale"
    view = store.view(job.ref)
    assert (view.record.state, view.record.error_code) == ("failed", code)
    assert [each.text for each in view.entries] == ["so far"]
    assert client.exists(KEYS.timers, KEYS.leases) == 0


def test_a_deadline_counts_in_the_queue_too(store: JobStore, client: Client) -> None:
    """Queued past its deadline: the deadline's code, not the queue's."""
    job = new_job(deadline_ms=60_000)
    store.submit(job)
    due(client, "deadline", job.ref.token)
    sweeper(client).sweep("tiny")
    assert store.read(job.ref).error_code == "deadline_exceeded"


def test_a_job_without_its_reader_is_cancelled(store: JobStore, client: Client) -> None:
    """A reader that renews keeps it, one that goes lets it be cancelled."""
    kept, left = new_job(reader_ms=50_000), new_job(reader_ms=50_000)
    for job in (kept, left):
        store.submit(job)
        due(client, "reader", job.ref.token)
    store.read_on([kept.ref], 50_000)
    swept_steadily(client)
    assert sweeper(client).sweep("tiny").expired == 1
    assert store.read(left.ref).state == "cancelled"
    assert store.read(kept.ref).state == "queued"
    store.cancel(kept.ref)


def test_a_reader_that_had_no_server_to_tell_is_not_gone(store: JobStore, client: Client) -> None:
    """After a gap in the sweeps, as a stall or a restart of the server leaves it, no reader's time is up for a lease;
    other timers keep their time."""
    job, late = new_job(reader_ms=50_000), new_job()
    for each, kind in ((job, "reader"), (late, "queue")):
        store.submit(each)
        due(client, kind, each.ref.token)
    swept_steadily(client, ago_ms=LEASE_MS)
    assert [sweeper(client).sweep("tiny").expired for _ in range(2)] == [1, 0]
    assert store.read(late.ref).error_code == "queue_timeout"
    assert store.read(job.ref).state == "queued"
    store.read_on([job.ref], 50_000)
    swept_steadily(client)
    assert sweeper(client).sweep("tiny").expired == 0
    store.cancel(job.ref)


def test_a_reader_may_leave_without_ending_the_job(store: JobStore, client: Client) -> None:
    """A sync wait that ran out lets the job go on; renewing afterwards, or for a background job, sets no timer."""
    job, background = new_job(reader_ms=50_000), new_job()
    for each in (job, background):
        store.submit(each)
    store.read_on([job.ref], 0)
    store.read_on([job.ref, background.ref], 50_000)
    assert kinds(client) == {"queue"}
    for each in (job, background):
        store.cancel(each.ref)


def test_a_timer_is_carried_out_once(store: JobStore, client: Client) -> None:
    """Two sweeps at once, or a timer of a job that has just ended: the second finds nothing to do."""
    job = new_job()
    store.submit(job)
    due(client, "queue", job.ref.token)
    assert [sweeper(client).sweep("tiny").expired for _ in range(2)] == [1, 0]
    client.zadd(KEYS.timers, {f"run:{job.ref.token}": 1})
    assert sweeper(client).sweep("tiny").expired == 0
    assert client.exists(KEYS.timers) == 0

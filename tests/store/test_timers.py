"""Timers of jobs: queue and run timeouts, deadlines, readers that went away."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Entry, Handout, Write
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.nodes import server_ms
from pool.store.sweeping import TIMERS
from tests.builders import LEASE_MS, completed, entry, job_store, new_job, sweeper, swept_steadily
from tests.waiting import wait_until

KEYS = ModelKeys("tiny:0")


def due(client: Client, kind: str, token: str) -> None:
    """As if this timer's time had come."""
    assert client.zadd(KEYS.timers, {f"{kind}:{token}": 1}, xx=True, ch=True) == 1


def clock_ms(client: Client) -> int:
    """The server's."""
    return server_ms(client, KEYS.timers)


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
    assert client.zcard(KEYS.lanes["backlog"]) == 0
    assert client.exists(KEYS.timers, KEYS.index) == 0


def hand_back(_client: Client, rank: Delivery, handout: Handout) -> None:
    """Its worker leaves."""
    assert rank.hand_back([handout.lease]) == 1


def give_back(client: Client, rank: Delivery, handout: Handout) -> None:
    """Its worker leaves without ever having got the answer to its begin."""
    lease = handout.lease
    rank.give_back([Entry(client.hget(KEYS.job(lease.token), "entry").decode(), lease.token, lease.nonce)])


def lose(client: Client, _rank: Delivery, handout: Handout) -> None:
    """Its worker dies, and the sweep takes it back."""
    client.zadd(KEYS.leases, {handout.lease.token: 1})
    swept_steadily(client)
    assert sweeper(client).sweep("tiny").requeued == 1


def lose_stream_and_lease(client: Client, rank: Delivery, handout: Handout) -> None:
    """Stream and lease are lost together."""
    client.delete(KEYS.queue)
    client.zrem(KEYS.leases, handout.lease.token)
    rank.heal()


WAYS_BACK = [hand_back, give_back, lose, lose_stream_and_lease]


@pytest.mark.parametrize("way_back", WAYS_BACK)
def test_the_run_timer_pauses_while_a_job_waits_again(
    store: JobStore, client: Client, rank_a: Delivery, way_back: Callable[[Client, Delivery, Handout], None]
) -> None:
    """Deploys and dead workers cost no time limit: what is left of it counts from the next begin on. Meanwhile the
    queue timeout counts anew, so that a job nobody begins any more ends. A deadline goes on."""
    job = new_job(queue_timeout_ms=50_000, deadline_ms=900_000)
    store.submit(job)
    run, queue, record = f"run:{job.ref.token}", f"queue:{job.ref.token}", KEYS.job(job.ref.token)
    assert kinds(client) == {"queue", "deadline"}
    deadline_ms = client.zscore(KEYS.timers, f"deadline:{job.ref.token}")
    (handout,) = rank_a.take(1, 10).handouts
    assert kinds(client) == {"run", "deadline"}
    # On no trial, whatever happened to its worker.
    assert rank_a.write([Write(handout.lease, 0, (entry(0, 5),))])[0].code == "ok"
    begun_ms = clock_ms(client)
    client.zadd(KEYS.timers, {run: begun_ms + 40_000})
    way_back(client, rank_a, handout)
    assert kinds(client) == {"queue", "deadline"}
    left_ms = int(client.hget(record, "run_left_ms"))
    assert begun_ms + 40_000 - clock_ms(client) <= left_ms <= 40_000
    assert begun_ms + 50_000 <= client.zscore(KEYS.timers, queue) <= clock_ms(client) + 50_000
    before_ms = clock_ms(client)
    (again,) = rank_a.take(1, 10).handouts
    assert kinds(client) == {"run", "deadline"}
    assert before_ms + left_ms <= client.zscore(KEYS.timers, run) <= clock_ms(client) + left_ms
    assert client.hget(record, "run_left_ms") is None
    assert client.zscore(KEYS.timers, f"deadline:{job.ref.token}") == deadline_ms
    assert rank_a.write([Write(again.lease, again.logged, (), completed("x"))])[0].code == "ok"
    assert client.exists(KEYS.timers) == 0


def test_a_job_waits_again_for_what_is_left_of_its_run_time(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """When that is more than the queue timeout. If nobody begins it by then, it fails by name."""
    job = new_job(queue_timeout_ms=5_000, run_timeout_ms=900_000)
    store.submit(job)
    (handout,) = rank_a.take(1, 10).handouts
    before_ms = clock_ms(client)
    hand_back(client, rank_a, handout)
    left_ms = int(client.hget(KEYS.job(job.ref.token), "run_left_ms"))
    assert client.zscore(KEYS.timers, f"queue:{job.ref.token}") >= before_ms + left_ms
    due(client, "queue", job.ref.token)
    swept_steadily(client)
    assert sweeper(client).sweep("tiny").expired == 1
    assert (store.read(job.ref).state, store.read(job.ref).error_code) == ("failed", "queue_timeout")


def test_a_repeated_begin_does_not_set_the_run_timer_anew(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """Neither the first one nor one after a hand-back."""
    job = new_job()
    store.submit(job)
    for _ in range(2):
        entries = rank_a.read(1, 10)
        (handout,) = [found for found in rank_a.begin(entries) if isinstance(found, Handout)]
        client.zadd(KEYS.timers, {f"run:{job.ref.token}": 4_000_000_000_000})
        assert list(rank_a.begin(entries)) == [handout]
        assert client.zscore(KEYS.timers, f"run:{job.ref.token}") == 4_000_000_000_000
        hand_back(client, rank_a, handout)
    store.cancel(job.ref)


def test_a_run_time_that_is_over_does_not_pause(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """Handed back after its time, before any sweep: it fails all the same."""
    job = new_job()
    store.submit(job)
    (handout,) = rank_a.take(1, 10).handouts
    due(client, "run", job.ref.token)
    hand_back(client, rank_a, handout)
    swept_steadily(client)
    assert sweeper(client).sweep("tiny").expired == 1
    assert store.read(job.ref).error_code == "run_timeout"


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
    """After a gap in the sweeps, as a stall or a restart of the server leaves it, no reader's time is up for a lease; a
    deadline is a point in time."""
    job, late = new_job(reader_ms=50_000), new_job(deadline_ms=60_000)
    for each, kind in ((job, "reader"), (late, "deadline")):
        store.submit(each)
        due(client, kind, each.ref.token)
    swept_steadily(client, ago_ms=LEASE_MS)
    assert [sweeper(client).sweep("tiny").expired for _ in range(2)] == [1, 0]
    assert store.read(late.ref).error_code == "deadline_exceeded"
    assert store.read(job.ref).state == "queued"
    store.read_on([job.ref], 50_000)
    swept_steadily(client)
    assert sweeper(client).sweep("tiny").expired == 0
    store.cancel(job.ref)


def test_what_timed_out_while_the_server_was_away_has_a_lease_more(
    store: JobStore, client: Client, rank_a: Delivery
) -> None:
    """A worker may begin the queued job, and end the one it runs: its result is perhaps there already. Afterwards their
    time is up. One whose time comes later, in the same lease, gets no more."""
    waiting, running, later = (new_job() for _ in range(3))
    store.submit(running)
    (handout,) = rank_a.take(1, 10).handouts
    for job in (waiting, later):
        store.submit(job)
    for kind, job in (("queue", waiting), ("run", running)):
        due(client, kind, job.ref.token)
    swept_steadily(client, ago_ms=60_000)
    assert [sweeper(client).sweep("tiny").expired for _ in range(2)] == [0, 0]
    client.zadd(KEYS.timers, {f"queue:{later.ref.token}": int(client.hget(KEYS.sweep, "back_ms")) + 1})
    wait_until(lambda: sweeper(client).sweep("tiny").expired == 1, description="the later one to fail")
    assert store.read(later.ref).error_code == "queue_timeout"
    assert rank_a.write([Write(handout.lease, 0, (), completed("x"))])[0].code == "ok"
    assert store.read(waiting.ref).state == "queued"
    swept_steadily(client)
    due(client, "queue", waiting.ref.token)
    assert sweeper(client).sweep("tiny").expired == 1


def test_readers_that_may_not_go_yet_hold_up_nobody(client: Client) -> None:
    """More timers than one sweep looks at are due and may not be carried out for a lease: they leave its window to the
    deadline behind them."""
    store = job_store(client, cap=TIMERS + 1)
    patient = [new_job(reader_ms=50_000) for _ in range(TIMERS)]
    late = new_job(deadline_ms=60_000)
    for job in (*patient, late):
        store.submit(job)
    client.zadd(KEYS.timers, {f"reader:{job.ref.token}": 1 for job in patient})
    client.zadd(KEYS.timers, {f"deadline:{late.ref.token}": 2})
    swept_steadily(client, ago_ms=LEASE_MS)
    assert [sweeper(client).sweep("tiny").expired for _ in range(2)] == [0, 1]
    assert store.read(late.ref).error_code == "deadline_exceeded"
    for job in patient:
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

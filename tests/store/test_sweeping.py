"""Expiry of leases: only by sweep, never after a gap, poison at the cap."""

from __future__ import annotations

import pytest

from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Handout, Taken, Write
from pool.store.ids import JobRef
from pool.store.jobs import JobStore
from pool.store.keys import GROUP, ModelKeys
from pool.store.sweeping import Swept
from tests.builders import LEASE_MS, completed, entry, new_job, sweeper

KEYS = ModelKeys("tiny:0")


def steady(client: Client) -> None:
    """As if sweeps had run without a gap: the last one just now, and no hold."""
    seconds, micros = client.time()
    client.hset(KEYS.sweep, mapping={"last_ms": seconds * 1000 + micros // 1000, "hold_until_ms": 0})


def expire(client: Client, *handouts: Handout) -> None:
    """As if these leases had run out."""
    for handout in handouts:
        client.zadd(KEYS.leases, {handout.lease.token: 1})


@pytest.fixture
def running(store: JobStore, rank_a: Delivery) -> Handout:
    """A job begun by rank a."""
    store.submit(new_job())
    (handout,) = rank_a.take(1, 10).handouts
    return handout


def take_alone(rank: Delivery) -> Handout:
    """Begin the one job that waits to run alone."""
    (waiting,) = rank.take(1, 100).alone
    handout = rank.begin_alone(waiting)
    assert handout is not None
    return handout


def finish(rank: Delivery, handout: Handout) -> None:
    """End a job."""
    assert rank.write([Write(handout.lease, handout.logged, (), completed("x"))])[0].code == "ok"


def test_an_expired_lease_goes_to_another_rank(
    client: Client, running: Handout, rank_b: Delivery, rank_a: Delivery
) -> None:
    """The job is queued again with attempt 2 to come; its first worker is refused."""
    steady(client)
    expire(client, running)
    assert sweeper(client).sweep("tiny") == Swept(requeued=1)
    (taken,) = rank_b.take(1, 100).handouts
    assert taken.lease.attempt == 2
    assert rank_a.write([Write(running.lease, 0, (), completed("x"))])[0].code == "stale"
    finish(rank_b, taken)


def test_a_live_lease_is_left_alone(client: Client, running: Handout, rank_a: Delivery) -> None:
    """Nothing happens to a renewed job, however old it is."""
    steady(client)
    rank_a.renew([running.lease])
    assert sweeper(client).sweep("tiny") == Swept()
    finish(rank_a, running)


@pytest.mark.parametrize("gap_ms", [LEASE_MS // 2 + 100, 60_000, -5_000])
def test_after_a_gap_nothing_expires_for_a_full_lease(
    client: Client, running: Handout, rank_a: Delivery, gap_ms: int
) -> None:
    """A server that was away, or a clock that jumped, must not look like the death of every worker."""
    seconds, _ = client.time()
    client.hset(KEYS.sweep, mapping={"last_ms": seconds * 1000 - gap_ms, "hold_until_ms": 0})
    expire(client, running)
    sweeping = sweeper(client)
    assert sweeping.sweep("tiny").held
    assert sweeping.sweep("tiny").held
    hold_until_ms = int(client.hget(KEYS.sweep, "hold_until_ms"))
    assert hold_until_ms >= seconds * 1000 + LEASE_MS
    finish(rank_a, running)


def test_the_first_sweep_ever_only_holds(client: Client, running: Handout, rank_a: Delivery) -> None:
    """Without a known last sweep there is no telling how long leases could not be renewed."""
    expire(client, running)
    assert sweeper(client).sweep("tiny").held
    finish(rank_a, running)


def test_a_job_that_keeps_losing_its_worker_is_poison(
    client: Client, store: JobStore, rank_a: Delivery, running: Handout
) -> None:
    """At the cap it fails by name; until then it is queued again."""
    sweeping = sweeper(client, max_deliveries=3)
    handout = running
    for attempt in (1, 2):
        steady(client)
        expire(client, handout)
        assert sweeping.sweep("tiny") == Swept(requeued=1)
        # Its last try is alone; before that, one loss proves nothing.
        handout = take_alone(rank_a) if attempt == 2 else rank_a.take(1, 100).handouts[0]
        assert handout.lease.attempt == attempt + 1
    expire(client, handout)
    steady(client)
    assert sweeping.sweep("tiny") == Swept(poisoned=1)
    assert rank_a.take(1, 10) == Taken()
    record = store.read(JobRef("resp", "tiny", 0, handout.lease.token))
    assert (record.state, record.error_code, record.attempt) == ("failed", "poison", 3)
    ((_, letter),) = client.xrange(KEYS.dead)
    assert letter == {b"job": handout.lease.token.encode(), b"code": b"poison", b"losses": b"3", b"rank": b"rank-a"}
    client.delete(KEYS.dead)


def test_mates_of_a_crash_are_not_blamed(client: Client, store: JobStore, rank_a: Delivery) -> None:
    """Of two jobs that lost their worker together, three times in company never makes either poison: each must then run
    alone, and the one that shows a token is cleared."""
    jobs = [new_job(), new_job()]
    for job in jobs:
        store.submit(job)
    held = rank_a.take(2, 10).handouts
    sweeping = sweeper(client, max_deliveries=1 + 1)
    steady(client)
    expire(client, *held)
    assert sweeping.sweep("tiny") == Swept(requeued=2)
    taken = rank_a.take(2, 10)
    assert taken.handouts == []
    assert len(taken.alone) == 2
    good = rank_a.begin_alone(taken.alone[0])
    assert good is not None
    assert good.alone
    rank_a.write([Write(good.lease, 0, (entry(0, 5),))])
    steady(client)
    expire(client, good)
    assert sweeping.sweep("tiny") == Swept(requeued=1)
    bad = rank_a.begin_alone(taken.alone[1])
    assert bad is not None
    steady(client)
    expire(client, bad)
    assert sweeping.sweep("tiny") == Swept(poisoned=1)
    finish(rank_a, take_alone(rank_a))
    client.delete(KEYS.dead)


def test_progress_does_not_excuse_for_ever(client: Client, rank_a: Delivery, running: Handout) -> None:
    """A job that shows a token and then kills its worker, again and again, is poison after ten times the cap."""
    sweeping = sweeper(client, max_deliveries=1 + 1)
    handout = running
    for logged in range(19):
        rank_a.write([Write(handout.lease, logged, (entry(logged, 5),))])
        steady(client)
        expire(client, handout)
        assert sweeping.sweep("tiny") == Swept(requeued=1)
        handout = take_alone(rank_a)
    steady(client)
    expire(client, handout)
    assert sweeping.sweep("tiny") == Swept(poisoned=1)
    client.delete(KEYS.dead)


def test_progress_clears_the_crash_count(client: Client, rank_a: Delivery, running: Handout) -> None:
    """An attempt that logged a token was no poison attempt."""
    client.hset(KEYS.job(running.lease.token), "crashes", 2)
    rank_a.write([Write(running.lease, 0, (entry(0, 5),))])
    assert client.hget(KEYS.job(running.lease.token), "crashes") == b"0"
    finish_at = Write(running.lease, 1, (), completed("x"))
    assert rank_a.write([finish_at])[0].code == "ok"


def test_a_hand_back_costs_no_delivery(client: Client, rank_a: Delivery, running: Handout) -> None:
    """Deploys poison nobody: ten hand-backs leave the crash count at zero."""
    handout = running
    for _ in range(10):
        assert rank_a.hand_back([handout.lease]) == 1
        (handout,) = rank_a.take(1, 100).handouts
    assert client.hget(KEYS.job(handout.lease.token), "crashes") is None
    assert handout.lease.attempt == 11
    finish(rank_a, handout)


def test_an_entry_that_was_read_but_never_begun_goes_back(client: Client, store: JobStore, rank_b: Delivery) -> None:
    """A worker that died between reading and beginning loses nothing and costs nothing."""
    job = new_job()
    store.submit(job)
    client.xreadgroup(GROUP, "rank-dead", {KEYS.queue: ">"}, count=1)
    (pending,) = client.xpending_range(KEYS.queue, GROUP, "-", "+", 1)
    client.xclaim(KEYS.queue, GROUP, "rank-dead", 0, [pending["message_id"]], idle=LEASE_MS + 1, justid=True)
    steady(client)
    assert sweeper(client).sweep("tiny") == Swept(requeued=1)
    (handout,) = rank_b.take(1, 100).handouts
    assert handout.lease.attempt == 1
    finish(rank_b, handout)


def test_a_deleted_entry_does_not_stay_pending(client: Client, store: JobStore, rank_a: Delivery) -> None:
    """An entry whose message is gone is acknowledged, so that no sweep sees it for ever."""
    job = new_job()
    store.submit(job)
    client.xreadgroup(GROUP, "rank-dead", {KEYS.queue: ">"}, count=1)
    (pending,) = client.xpending_range(KEYS.queue, GROUP, "-", "+", 1)
    client.xclaim(KEYS.queue, GROUP, "rank-dead", 0, [pending["message_id"]], idle=LEASE_MS + 1, justid=True)
    client.xdel(KEYS.queue, pending["message_id"])
    steady(client)
    sweeper(client).sweep("tiny")
    assert rank_a.take(1, 10).handouts == []
    assert client.xpending(KEYS.queue, GROUP)["pending"] == 0
    store.cancel(job.ref)

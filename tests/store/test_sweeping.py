"""Expiry of leases: only by sweep, never after a gap, poison at the cap."""

from __future__ import annotations

import pytest
import redis

from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Handout, Taken, Write
from pool.store.ids import JobRef
from pool.store.jobs import JobStore
from pool.store.keys import GROUP, ModelKeys
from pool.store.nodes import server_ms
from pool.store.sweeping import Swept
from pool.store.trials import ALL_ALONE, AMONG_OTHERS, AMONG_PROVEN, keep, survived
from tests.builders import LEASE_MS, as_if_ranks_waited, completed, entry, entry_of, new_job, sweeper
from tests.waiting import wait_until

KEYS = ModelKeys("tiny:0")


def steady(client: Client) -> None:
    """As if sweeps had run without a gap: the last one just now, and no hold."""
    client.hset(KEYS.sweep, mapping={"last_ms": server_ms(client, KEYS.sweep), "hold_until_ms": 0})


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
    assert isinstance(handout, Handout)
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
    taken = take_alone(rank_b)
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
    at_ms = server_ms(client, KEYS.sweep)
    client.hset(KEYS.sweep, mapping={"last_ms": at_ms - gap_ms, "hold_until_ms": 0})
    expire(client, running)
    sweeping = sweeper(client)
    assert sweeping.sweep("tiny").held
    assert sweeping.sweep("tiny").held
    hold_until_ms = int(client.hget(KEYS.sweep, "hold_until_ms"))
    assert hold_until_ms >= at_ms + LEASE_MS
    finish(rank_a, running)


def test_a_clock_that_went_back_does_not_lengthen_leases(client: Client, running: Handout, rank_a: Delivery) -> None:
    """Leases that lie ahead by the step end a lease from now, as after any gap; without a step they are nobody's to
    cut: a worker may have longer ones."""
    ahead_ms = server_ms(client, KEYS.sweep) + 3_600_000
    client.zadd(KEYS.leases, {running.lease.token: ahead_ms})
    steady(client)
    assert not sweeper(client).sweep("tiny").held
    assert client.zscore(KEYS.leases, running.lease.token) == ahead_ms
    client.hset(KEYS.sweep, "last_ms", ahead_ms)
    assert sweeper(client).sweep("tiny").held
    assert client.zscore(KEYS.leases, running.lease.token) <= int(client.hget(KEYS.sweep, "last_ms")) + LEASE_MS
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
        handout = take_alone(rank_a)
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
    """Two jobs lose their worker together, before either shows a token: each must then run alone, and the one that
    shows a token is cleared."""
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
    assert isinstance(good, Handout)
    assert good.alone
    rank_a.write([Write(good.lease, 0, (entry(0, 5),))])
    steady(client)
    expire(client, good)
    assert sweeping.sweep("tiny") == Swept(requeued=1)
    bad = rank_a.begin_alone(taken.alone[1])
    assert isinstance(bad, Handout)
    steady(client)
    expire(client, bad)
    assert sweeping.sweep("tiny") == Swept(poisoned=1)
    finish(rank_a, rank_a.take(1, 100).handouts[0])
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
        (handout,) = rank_a.take(1, 100).handouts
    steady(client)
    expire(client, handout)
    assert sweeping.sweep("tiny") == Swept(poisoned=1)
    client.delete(KEYS.dead)


def lose(client: Client, *handouts: Handout, max_deliveries: int = 3) -> None:
    """Their leases run out, and a sweep gives them back to the queue."""
    lose_token(client, *(handout.lease.token for handout in handouts), max_deliveries=max_deliveries)


def lose_token(client: Client, *tokens: str, max_deliveries: int = 3) -> None:
    """The same, by token."""
    steady(client)
    client.zadd(KEYS.leases, dict.fromkeys(tokens, 1))
    assert sweeper(client, max_deliveries=max_deliveries).sweep("tiny") == Swept(requeued=len(tokens))


def test_progress_clears_the_crash_count(client: Client, rank_a: Delivery, running: Handout) -> None:
    """An attempt that logged a token was no poison attempt, and clears the one before it."""
    lose(client, running)
    handout = take_alone(rank_a)
    assert (handout.alone, client.hget(KEYS.job(handout.lease.token), "crashes")) == (True, b"1")
    rank_a.write([Write(handout.lease, 0, (entry(0, 5),))])
    lose(client, handout)
    assert client.hget(KEYS.job(handout.lease.token), "crashes") == b"0"
    (handout,) = rank_a.take(1, 100).handouts
    assert not handout.alone
    finish_at = Write(handout.lease, 1, (), completed("x"))
    assert rank_a.write([finish_at])[0].code == "ok"


def test_a_job_on_trial_begins_by_itself(client: Client, rank_a: Delivery, running: Handout) -> None:
    """Lost once without a token, it begins beside jobs that have shown tokens, but not among others; lost again, only
    where nothing else runs."""
    lose(client, running)
    (waiting,) = rank_a.take(1, 100).alone
    assert rank_a.begin_alone(waiting, AMONG_OTHERS) == waiting
    handout = rank_a.begin_alone(waiting, AMONG_PROVEN)
    assert isinstance(handout, Handout)
    lose(client, handout)
    (waiting,) = rank_a.take(1, 100).alone
    assert rank_a.begin_alone(waiting, AMONG_PROVEN) == waiting
    handout = rank_a.begin_alone(waiting, ALL_ALONE)
    assert isinstance(handout, Handout)
    finish(rank_a, handout)


def test_a_rank_that_lives_takes_the_blame_back(client: Client, rank_a: Delivery, running: Handout) -> None:
    """It was stopped or cut off, and says so when it comes back: that loss counts no more, once; nor may a job that has
    ended, or an attempt that was never blamed, be forgiven."""
    lose(client, running)
    first = take_alone(rank_a)
    lose(client, first)
    job = KEYS.job(running.lease.token)
    assert client.hmget(job, "crashes", "suspect") == [b"2", b"1"]
    for _ in range(2):
        survived(client, KEYS, [running.lease])
        assert client.hmget(job, "crashes", "suspect") == [b"1", b"0"]
    handout = take_alone(rank_a)
    survived(client, KEYS, [handout.lease])
    assert client.hget(job, "crashes") == b"1"
    finish(rank_a, handout)
    survived(client, KEYS, [first.lease])
    assert client.hget(job, "crashes") == b"1"


def test_an_attempt_that_its_rank_never_heard_of_is_forgiven_by_its_entry(
    client: Client, store: JobStore, rank_a: Delivery
) -> None:
    """The reply to its begin was lost, so the rank knows no attempt number. Its blame goes; that of others stays."""
    job = new_job()
    store.submit(job)
    (unanswered,) = rank_a.read(1, 100)
    assert len(list(rank_a.begin([unanswered]))) == 1
    lose_token(client, unanswered.token)
    assert rank_a.begin_alone(unanswered) is None
    heard = take_alone(rank_a)
    lose(client, heard)
    key = KEYS.job(unanswered.token)
    assert client.hmget(key, "crashes", "suspect") == [b"2", b"1"]
    survived(client, KEYS, [unanswered])
    assert client.hmget(key, "crashes", "suspect", "blamed") == [b"1", b"0", f"{heard.lease.nonce} ".encode()]
    finish(rank_a, take_alone(rank_a))


def test_a_trial_that_began_is_given_again_to_whoever_asks_with_its_nonce(
    client: Client, rank_a: Delivery, running: Handout
) -> None:
    """Its begin was not answered. It began where nothing else ran; that other jobs begin there now does not undo it."""
    lose(client, running)
    (waiting,) = rank_a.take(1, 100).alone
    first = rank_a.begin_alone(waiting, ALL_ALONE)
    again = rank_a.begin_alone(waiting, AMONG_OTHERS)
    assert isinstance(first, Handout)
    assert isinstance(again, Handout)
    assert (again.lease, again.alone) == (first.lease, True)
    finish(rank_a, again)


def test_a_waiting_entry_is_kept(client: Client, rank_a: Delivery, rank_b: Delivery, running: Handout) -> None:
    """A job on trial waits for its rank longer than a lease: the sweep leaves it there as long as the rank says so."""
    lose(client, running)
    (waiting,) = rank_a.take(1, 100).alone
    client.xclaim(KEYS.queue, "workers", "rank-a", 0, [waiting.id], idle=2 * LEASE_MS, justid=True)
    assert keep(client, KEYS, "rank-a", [waiting]) == [waiting]
    steady(client)
    assert sweeper(client).sweep("tiny") == Swept()
    assert keep(client, KEYS, "rank-b", [waiting]) == []
    client.xclaim(KEYS.queue, "workers", "rank-a", 0, [waiting.id], idle=2 * LEASE_MS, justid=True)
    steady(client)
    assert sweeper(client).sweep("tiny") == Swept(requeued=1)
    assert keep(client, KEYS, "rank-a", [waiting]) == []
    finish(rank_b, take_alone(rank_b))


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
    as_if_ranks_waited(client)
    store.submit(job)
    client.xreadgroup(GROUP, "rank-dead", {KEYS.queue: ">"}, count=1)
    (pending,) = client.xpending_range(KEYS.queue, GROUP, "-", "+", 1)
    client.xclaim(KEYS.queue, GROUP, "rank-dead", 0, [pending["message_id"]], idle=LEASE_MS + 1, justid=True)
    steady(client)
    assert sweeper(client).sweep("tiny") == Swept(requeued=1)
    (handout,) = rank_b.take(1, 100).handouts
    assert handout.lease.attempt == 1
    finish(rank_b, handout)


def test_a_job_whose_pending_entry_was_deleted_gets_another(client: Client, store: JobStore, rank_a: Delivery) -> None:
    """The entry is acknowledged, so that no sweep sees it for ever; its job is found in the index."""
    job = new_job()
    as_if_ranks_waited(client)
    store.submit(job)
    client.xreadgroup(GROUP, "rank-dead", {KEYS.queue: ">"}, count=1)
    (pending,) = client.xpending_range(KEYS.queue, GROUP, "-", "+", 1)
    client.xclaim(KEYS.queue, GROUP, "rank-dead", 0, [pending["message_id"]], idle=LEASE_MS + 1, justid=True)
    client.xdel(KEYS.queue, pending["message_id"])
    steady(client)
    assert sweeper(client).sweep("tiny") == Swept(requeued=1)
    assert client.xpending(KEYS.queue, GROUP)["pending"] == 0
    (handout,) = rank_a.take(2, 10).handouts
    assert (handout.lease.token, handout.lease.attempt) == (job.ref.token, 1)
    finish(rank_a, handout)


def test_an_entry_is_acknowledged_after_its_job_has_another(
    client: Client, store: JobStore, rank_a: Delivery, without_index: Client
) -> None:
    """A sweep that is cut short in between leaves the deleted entry for the next one to find."""
    store.submit(new_job())
    (read,) = rank_a.read(1, 10)
    client.xclaim(KEYS.queue, GROUP, "rank-dead", 0, [read.id], idle=LEASE_MS + 1, justid=True)
    client.xdel(KEYS.queue, read.id)
    for sweep, expected in ((sweeper(without_index), None), (sweeper(client), Swept(requeued=1))):
        steady(client)
        # As if missing entries had just been looked for: this one is found by its pending entry.
        client.hset(KEYS.sweep, "rebuilt_ms", int(client.hget(KEYS.sweep, "last_ms")))
        if expected is None:
            with pytest.raises(redis.exceptions.NoPermissionError):
                sweep.sweep("tiny")
        else:
            assert sweep.sweep("tiny") == expected
    assert client.xpending(KEYS.queue, GROUP)["pending"] == 0
    finish(rank_a, rank_a.take(2, 10).handouts[0])


def test_an_entry_deleted_before_anybody_read_it_is_missed(client: Client, store: JobStore, rank_a: Delivery) -> None:
    """The index holds a job more than the stream: the job gets its entry back. A job of several choices is one job, and
    a running one whose entry is gone is looked for once in four leases, not in every sweep."""
    running, *jobs = [new_job(n=3) for _ in range(3)]
    store.submit(running)
    (handout,) = rank_a.take(1, 10).handouts
    as_if_ranks_waited(client)
    for job in jobs:
        store.submit(job)
    steady(client)
    assert sweeper(client).sweep("tiny") == Swept()
    assert client.hget(KEYS.sweep, "rebuilt_ms") is None
    client.xdel(KEYS.queue, entry_of(client, jobs[0]))
    assert sweeper(client).sweep("tiny") == Swept(requeued=1)
    assert {taken.lease.token for taken in rank_a.take(5, 10).handouts} == {job.ref.token for job in jobs}
    client.xdel(KEYS.queue, client.hget(KEYS.job(handout.lease.token), "entry"))
    looked_ms = client.hget(KEYS.sweep, "rebuilt_ms")
    assert sweeper(client).sweep("tiny") == Swept()
    assert client.hget(KEYS.sweep, "rebuilt_ms") == looked_ms
    for job in (running, *jobs):
        store.cancel(job.ref)


def test_consumers_of_dead_ranks_go_unless_something_is_pending_there(
    client: Client, store: JobStore, rank_a: Delivery
) -> None:
    """A consumer that has not read for two leases is removed; one with a pending entry stays, or that would be lost."""
    store.submit(new_job())
    (held,) = rank_a.take(1, 10).handouts
    client.xreadgroup(GROUP, "rank-dead", {KEYS.queue: ">"}, count=1)

    def consumers() -> set[bytes]:
        steady(client)
        sweeper(client, lease_ms=20).sweep("tiny")
        return {consumer["name"] for consumer in client.xinfo_consumers(KEYS.queue, GROUP)}

    wait_until(lambda: consumers() == {b"rank-a"}, description="the dead rank's consumer to go")
    finish(rank_a, held)

"""What is remembered, for how long, and what survives the loss of parts of it: tombstones, keys, rebuilds, memory."""

from __future__ import annotations

import pytest
import redis

from pool.errors import JobExpired, JobUnknown, KeyConflict, StateUnavailable
from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Write
from pool.store.ids import new_ref
from pool.store.jobs import JobStore
from pool.store.keys import GROUP, ModelKeys, idempotency_key
from pool.store.nodes import node_of
from pool.store.rebuilding import heal, rebuild
from tests import builders
from tests.builders import completed, new_job

KEYS = ModelKeys("tiny:0")


def end(rank: Delivery, count: int) -> None:
    """Run that many queued jobs to their end."""
    for handout in rank.take(count, 100).handouts:
        assert rank.write([Write(handout.lease, handout.logged, (), completed("x"))])[0].code == "ok"


def test_an_expired_job_is_remembered_as_such(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """After its TTL a job is expired, not unknown, until the tombstone has passed too; it cannot be submitted again."""
    job = new_job(tombstone_ms=5000)
    store.submit(job)
    end(rank_a, 1)
    assert client.pttl(KEYS.tombstone(job.ref.token)) > client.pttl(KEYS.job(job.ref.token))
    client.delete(KEYS.job(job.ref.token), KEYS.log(job.ref.token))
    for call in (store.read, store.view, store.cancel):
        with pytest.raises(JobExpired):
            call(job.ref)
    with pytest.raises(JobExpired):
        store.submit(job)
    client.delete(KEYS.tombstone(job.ref.token))
    with pytest.raises(JobUnknown) as unknown:
        store.read(job.ref)
    assert not isinstance(unknown.value, JobExpired)


def test_an_idempotency_key_stands_for_one_job(store: JobStore, client: Client) -> None:
    """The first claim binds it; the same body finds the same job, another body is a conflict; tenants do not meet."""
    ref = new_ref("responses", "tiny")
    claim = {"body_hash": "b1", "ttl_ms": 60_000}
    assert store.claim("alice", "k", ref, **claim) is None
    assert store.claim("alice", "k", new_ref("responses", "tiny"), **claim) == str(ref)
    with pytest.raises(KeyConflict):
        store.claim("alice", "k", ref, **claim | {"body_hash": "b2"})
    assert store.claim("bob", "k", new_ref("chat", "tiny"), **claim) is None
    assert 0 < client.pttl(idempotency_key("alice", "k")) <= 60_000


def test_a_key_that_is_used_lives_on(store: JobStore, client: Client) -> None:
    """Its job may end later than its limits say: each resend gives the key its whole life again, and none shortens it;
    a refused one changes nothing."""
    ref = new_ref("responses", "tiny")
    store.claim("alice", "k", ref, body_hash="b1", ttl_ms=60_000)
    key = idempotency_key("alice", "k")
    client.pexpire(key, 1000)
    with pytest.raises(KeyConflict):
        store.claim("alice", "k", ref, body_hash="b2", ttl_ms=60_000)
    assert client.pttl(key) <= 1000
    store.claim("alice", "k", ref, body_hash="b1", ttl_ms=60_000)
    renewed_ms = client.pexpiretime(key)
    assert client.pttl(key) > 1000
    store.claim("alice", "k", ref, body_hash="b1", ttl_ms=5000)
    assert client.pexpiretime(key) == renewed_ms


def test_hostile_keys_become_hashes() -> None:
    """Whatever a caller sends, the key has one shape, and tenant and key cannot be confused."""
    names = {
        idempotency_key(tenant, key) for tenant, key in [("a", "b:c"), ("a:b", "c"), ("", "*"), ("\ud800", "{x}\n")]
    }
    assert len(names) == 4
    assert all(name.removeprefix("gp:idempotency:").isalnum() for name in names)


@pytest.mark.parametrize("loss", ["group", "stream"])
def test_a_lost_group_or_stream_is_rebuilt_from_the_index(
    store: JobStore, client: Client, rank_a: Delivery, rank_b: Delivery, loss: str
) -> None:
    """Queued jobs run once more available, a running one goes on undisturbed, finished ones stay finished."""
    done, running, *queued = [new_job() for _ in range(5)]
    store.submit(done)
    end(rank_a, 1)
    store.submit(running)
    (handout,) = rank_a.take(1, 10).handouts
    builders.as_if_ranks_waited(client)
    for job in queued:
        store.submit(job)
    if loss == "group":
        client.xgroup_destroy(KEYS.queue, GROUP)
    else:
        client.delete(KEYS.queue)
    assert rank_b.take(10, 10).handouts == []
    taken = [each for _ in range(3) for each in rank_b.take(10, 10).handouts]
    assert {each.lease.token for each in taken} == {job.ref.token for job in queued}
    assert all(each.lease.attempt == 1 for each in taken)
    for each in taken:
        assert rank_b.write([Write(each.lease, 0, (), completed("x"))])[0].code == "ok"
    assert rank_a.renew([handout.lease])[0].code == "ok"
    assert rank_a.write([Write(handout.lease, 0, (), completed("x"))])[0].code == "ok"
    assert client.xlen(KEYS.queue) == 0
    assert client.xpending(KEYS.queue, GROUP)["pending"] == 0
    assert store.read(done.ref).attempt == 1


def test_a_stream_lost_while_nobody_reads_is_found_by_the_next_worker(
    store: JobStore, client: Client, redis_url: str
) -> None:
    """The worker that starts afterwards gets what was queued."""
    jobs = [new_job(), new_job(n=2)]
    builders.as_if_ranks_waited(client)
    for job in jobs:
        store.submit(job)
    client.delete(KEYS.queue)
    late = builders.delivery(redis_url, "rank-late")
    assert {handout.lease.token for handout in late.take(10, 10).handouts} == {job.ref.token for job in jobs}
    for job in jobs:
        store.cancel(job.ref)
    for each in (late.reader, late.writer):
        each.connection_pool.disconnect()


def test_a_rebuild_that_is_cut_short_is_taken_up_again(
    store: JobStore, client: Client, rank_a: Delivery, without_index: Client
) -> None:
    """Whoever finds the stream gone fails before a single entry is back: the next one finds it gone, too."""
    job = new_job()
    builders.as_if_ranks_waited(client)
    store.submit(job)
    client.delete(KEYS.queue)
    with pytest.raises(redis.exceptions.NoPermissionError):
        heal(without_index, KEYS)
    assert rank_a.take(10, 10).handouts == []
    assert len(rank_a.take(10, 10).handouts) == 1
    store.cancel(job.ref)


def test_a_running_job_without_an_entry_is_the_sweeps(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """Its worker may live, though its lease has run out while the server was away: a rebuild leaves it alone."""
    job = new_job()
    store.submit(job)
    (handout,) = rank_a.take(1, 10).handouts
    client.delete(KEYS.queue)
    client.zadd(KEYS.leases, {job.ref.token: 1})
    assert rebuild(client, KEYS) == 0
    assert rank_a.write([Write(handout.lease, 0, (), completed("x"))])[0].code == "ok"


def test_a_rebuild_of_a_sound_stream_changes_nothing(store: JobStore, client: Client) -> None:
    """It may run at any time, and twice."""
    jobs = [new_job(n=2) for _ in range(3)]
    builders.as_if_ranks_waited(client)
    for job in jobs:
        store.submit(job)
    assert rebuild(client, KEYS) == 0
    client.delete(KEYS.queue)
    assert rebuild(client, KEYS) == 3
    assert rebuild(client, KEYS) == 0
    assert (client.xlen(KEYS.queue), client.zcard(KEYS.lanes["backlog"])) == (0, 3), "none had begun: they wait again"
    for job in jobs:
        store.cancel(job.ref)


def test_a_new_stream_may_use_an_id_again(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """After the loss of a stream, and of time, another job's entry has the id that a job's own had: both get one."""
    jobs = [new_job() for _ in range(2)]
    for job in jobs:
        store.submit(job)
    assert len(rank_a.take(2, 10).handouts) == 2
    client.delete(KEYS.queue, KEYS.leases)
    assert rebuild(client, KEYS) == 2
    entry = client.hget(KEYS.job(jobs[0].ref.token), "entry")
    client.xdel(KEYS.queue, client.hget(KEYS.job(jobs[1].ref.token), "entry"))
    client.hset(KEYS.job(jobs[1].ref.token), "entry", entry)
    assert rebuild(client, KEYS) == 1
    taken = [handout for _ in range(2) for handout in rank_a.take(5, 10).handouts]
    assert {handout.lease.token for handout in taken} == {job.ref.token for job in jobs}
    for job in jobs:
        store.cancel(job.ref)


def test_choices_count_one_by_one(client: Client) -> None:
    """A job of n choices takes n places of the bound, and gives them all back."""
    store = builders.job_store(client, cap=5)
    jobs = [new_job(n=3), new_job(n=2)]
    for job in jobs:
        store.submit(job)
    with pytest.raises(Exception, match="holds 5 generations"):
        store.submit(new_job())
    store.cancel(jobs[0].ref)
    assert client.zcard(KEYS.index) == 2
    store.cancel(jobs[1].ref)
    assert client.exists(KEYS.index) == 0


def test_a_nearly_full_server_takes_no_new_jobs_and_lets_old_ones_end(client: Client, rank_a: Delivery) -> None:
    """Above 85 % of maxmemory a submit is refused, nothing written; what runs can complete even at the limit."""
    store = builders.job_store(client)
    job = new_job()
    store.submit(job)
    (handout,) = rank_a.take(1, 10).handouts
    used = node_of(client, KEYS.queue).info("memory")["used_memory"]
    client.config_set("maxmemory", int(used * 1.05))
    try:
        fresh = builders.job_store(client)
        refused = new_job()
        with pytest.raises(StateUnavailable, match="of its memory") as refusal:
            fresh.submit(refused)
        assert refusal.value.code == "state_memory_full"
        fresh.submit(job)  # this one is there already
        assert not client.exists(KEYS.job(refused.ref.token))
        client.config_set("maxmemory", 1024)
        assert rank_a.renew([handout.lease])[0].code == "ok"
        assert rank_a.write([Write(handout.lease, 0, (), completed("x" * 2000))])[0].code == "ok"
    finally:
        client.config_set("maxmemory", 0)
    assert store.read(job.ref).state == "completed"

"""What a tenant may hold at once: counted with the jobs, in the state, and given back by every kind of ending."""

from __future__ import annotations

import pytest

from pool.errors import InvalidRequest, JobExpired, JobUnknown, QueueFull
from pool.store.audit import Audit
from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Write
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.records import NewJob
from tests.builders import completed, entry, job_store, new_job, sweeper, swept_steadily
from tests.waiting import wait_until

KEYS = ModelKeys("tiny:0")


def job(tenant: str, cap: int = 2, **fields: object) -> NewJob:
    """A job that counts for its tenant."""
    return new_job(tenant=tenant, tenant_cap=cap, **fields)


def refused(store: JobStore, new: NewJob) -> str:
    """Why a job is refused."""
    with pytest.raises(QueueFull) as full:
        store.submit(new)
    assert 1 <= full.value.retry_after_s <= 120
    return f"{full.value.code}: {full.value.message}"


def test_a_tenant_holds_no_more_than_its_limit(store: JobStore, client: Client) -> None:
    """Choices count, other tenants do not, a name that begins like another neither; the refused leave nothing."""
    store.submit(job("a", n=2))
    before = sorted(client.scan_iter())
    why = refused(store, job("a"))
    assert why.startswith("fairness_key_queue_full") and "holds 2 generations" in why and "limit of 2" in why
    assert sorted(client.scan_iter()) == before
    store.submit(job("ab", n=2))
    store.submit(job("b"))
    store.submit(job("b"))
    assert refused(store, job("b"))
    store.submit(new_job(tenant="a"))  # not counted: from another door
    store.submit(job("a", cap=3))  # another key of the tenant, with a limit of its own
    assert Audit(client, "tiny").run() == []
    client.flushall()


def test_what_no_wait_makes_room_for_is_a_wrong_request(client: Client) -> None:
    """More choices than the tenant, or the model, may ever hold: `n` is named with the limit, whoever holds what now;
    nothing is left."""
    store = job_store(client, cap=3)
    store.submit(job("b", n=2))
    for new, limit in ((job("a", cap=1, n=2), 1), (job("a", cap=9, n=4), 3), (job("a", cap=1, n=3), 1)):
        before = sorted(client.scan_iter())
        with pytest.raises(InvalidRequest, match=rf"n={new.n} .* {limit}, queued") as wrong:
            store.submit(new)
        assert wrong.value.param == "n"
        assert sorted(client.scan_iter()) == before
    assert "n=" not in refused(store, job("a", n=2))
    client.flushall()


def test_the_same_job_again_counts_once(store: JobStore, client: Client) -> None:
    """A submit that is repeated because its reply was lost is no second job."""
    held = job("a", cap=1)
    store.submit(held)
    store.submit(held)
    store.cancel(held.ref)
    store.submit(job("a", cap=1))
    client.flushall()


def test_the_model_s_limit_comes_first(client: Client) -> None:
    """A full model says so, whoever asks."""
    store = job_store(client, cap=1)
    store.submit(new_job())
    assert refused(store, job("a", cap=1)).startswith("executor_queue_full")
    client.flushall()


def test_every_ending_gives_back(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """Completed, cancelled, timed out: the set is empty, and so gone."""
    ended = [job("a", cap=9, n=2), job("a", cap=9), job("a", cap=9, queue_timeout_ms=1)]
    store.submit(ended[0])
    (handout,) = rank_a.take(2, 10).handouts
    rank_a.write([Write(handout.lease, 0, (entry(0, 5, 6, text="ab"),), completed("ab", ""))])
    store.submit(ended[1])
    store.cancel(ended[1].ref)
    store.submit(ended[2])
    assert client.zcard(KEYS.tenants) == 1
    swept_steadily(client)
    wait_until(lambda: sweeper(client).sweep("tiny").expired, description="the last one's time to be over")
    assert not client.exists(KEYS.tenants)
    assert Audit(client, "tiny").run() == []


def test_a_job_that_was_wiped_does_not_count_for_ever(store: JobStore, client: Client) -> None:
    """Its record and its place in the index are gone without an ending: the limit is found again when it matters."""
    wiped, kept = job("a"), job("a")
    store.submit(wiped)
    store.submit(kept)
    client.delete(KEYS.job(wiped.ref.token))
    client.zrem(KEYS.index, wiped.ref.token)
    assert ("I7", wiped.ref.token) in {(found.invariant, found.subject) for found in Audit(client, "tiny").run()}
    store.submit(job("a"))
    assert refused(store, job("a"))
    assert client.zlexcount(KEYS.tenants, "-", "+") == 2
    client.flushall()


def test_an_expired_id_remembers_whose_it_was(store: JobStore, client: Client) -> None:
    """So that to anybody else it can be as unknown as one that never was."""
    own = job("a")
    store.submit(own)
    store.cancel(own.ref)
    client.delete(KEYS.job(own.ref.token))
    with pytest.raises(JobExpired) as expired:
        store.read(own.ref)
    assert expired.value.tenant == "a"
    unanswered = new_job()
    store.void(unanswered.ref)
    with pytest.raises(JobUnknown) as unknown:
        store.read(unanswered.ref)
    assert isinstance(unknown.value, JobExpired) and unknown.value.tenant is None

"""Idempotency keys of submits that were refused: nothing was accepted under them, so they are free again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool.errors import QueueFull
from pool.store.connection import Client
from pool.store.ids import new_ref
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys, idempotency_key
from tests import builders
from tests.builders import new_job

KEYS = ModelKeys("tiny:0")
CLAIM = {"body_hash": "b1", "ttl_ms": 60_000}
OTHER = {"body_hash": "b2", "ttl_ms": 60_000}


@pytest.fixture
def full_store(client: Client) -> Iterator[JobStore]:
    """A store whose only place is taken, until the fixture's job is cancelled or ends."""
    store = builders.job_store(client, cap=1)
    job = new_job()
    store.submit(job)
    yield store
    for token in client.zrange(KEYS.index, 0, -1):
        store.cancel(new_ref("responses", "tiny", token=token.decode()))


def make_room(store: JobStore, client: Client) -> None:
    """End what holds the only place."""
    (token,) = client.zrange(KEYS.index, 0, -1)
    store.cancel(new_ref("responses", "tiny", token=token.decode()))


def test_a_refused_submit_frees_its_key(full_store: JobStore, client: Client) -> None:
    """Nothing was accepted: another body may come under the key."""
    job = new_job()
    full_store.claim(job.tenant, "k", job.ref, **CLAIM)
    with pytest.raises(QueueFull):
        full_store.submit(job, key="k")
    assert not client.exists(idempotency_key(job.tenant, "k"))
    assert full_store.claim(job.tenant, "k", new_ref("responses", "tiny"), **OTHER) is None


def test_a_freed_key_never_had_a_job(full_store: JobStore, client: Client) -> None:
    """Two resends share the claim, one is refused and frees it: the other, later, is refused as well although there is
    room by now, for its job would be under no key. It takes nothing from the job that has the key meanwhile."""
    job, next_job = new_job(), new_job()
    for _ in range(2):
        full_store.claim(job.tenant, "k", job.ref, **CLAIM)
    with pytest.raises(QueueFull):
        full_store.submit(job, key="k")
    make_room(full_store, client)
    full_store.claim(job.tenant, "k", next_job.ref, **CLAIM)
    full_store.submit(next_job, key="k")
    with pytest.raises(QueueFull) as refusal:
        full_store.submit(job, key="k")
    assert refusal.value.retry_after_s == 1
    assert full_store.claim(job.tenant, "k", job.ref, **CLAIM) == str(next_job.ref)
    assert not client.exists(KEYS.job(job.ref.token))


def test_a_crash_between_refusal_and_release_heals(full_store: JobStore, client: Client) -> None:
    """The claim was left behind: the first resend finds the refusal and frees the key, the next is a new job."""
    job, again = new_job(), new_job()
    full_store.claim(job.tenant, "k", job.ref, **CLAIM)
    with pytest.raises(QueueFull):
        full_store.submit(job, key="k")
    full_store.claim(job.tenant, "k", job.ref, **CLAIM)
    make_room(full_store, client)
    with pytest.raises(QueueFull):
        full_store.submit(job, key="k")
    assert full_store.claim(job.tenant, "k", again.ref, **CLAIM) is None
    full_store.submit(again, key="k")
    assert full_store.read(again.ref).state == "queued"


def test_without_a_key_a_refused_id_may_be_tried_again(full_store: JobStore, client: Client) -> None:
    """As a message in the broker's list is, under the id that it came with."""
    job = new_job()
    with pytest.raises(QueueFull):
        full_store.submit(job)
    make_room(full_store, client)
    full_store.submit(job)
    assert full_store.read(job.ref).state == "queued"

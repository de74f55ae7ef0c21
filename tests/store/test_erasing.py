"""Deleting a job before its time: what goes with it, and what others still need."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pool.errors import JobExpired, JobUnknown
from pool.store.audit import Audit
from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Handout, Write
from pool.store.inputs import BLOCK_BYTES, blocks_of, read_input
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.outbox import Erased, Outbox
from pool.store.records import JobRecord, NewJob
from pool.store.stored_jobs import erase
from tests.builders import LINGER_MS, RESULT_TTL_MS, completed, new_job

KEYS = ModelKeys("tiny:0")
TEXT = "".join(random.Random(5).choices("abcdefgh ", k=4 * BLOCK_BYTES))


def begin(store: JobStore, rank: Delivery, job: NewJob) -> Handout:
    """The job runs."""
    store.submit(job)
    (handout,) = rank.take(1, 100).handouts
    return handout


def complete(rank: Delivery, handout: Handout) -> None:
    """It ends well."""
    assert rank.write([Write(handout.lease, 0, (), completed("x"))])[0].code == "ok"


def ended(store: JobStore, rank: Delivery, **fields: Any) -> NewJob:
    """A job that has run and ended."""
    job = new_job(**fields)
    complete(rank, begin(store, rank, job))
    return job


def blocks(client: Client) -> set[str]:
    """All that are stored."""
    return {key.decode().rpartition(":")[2] for key in client.scan_iter(match=KEYS.input("*"), count=1000)}


def ids_of(text: str) -> set[str]:
    """The blocks of an input."""
    return {block.id for block in blocks_of("default", text.encode())}


def test_a_large_input_goes_at_once(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """Nothing of the prompt is left on the server; what is left says that the id is used up."""
    job = ended(store, rank_a, input=TEXT)
    assert blocks(client) == ids_of(TEXT)
    erase(client, store, job.ref)
    assert blocks(client) == set()
    assert list(client.scan_iter(match=f"*{job.ref.token}*")) == [KEYS.tombstone(job.ref.token).encode()]
    with pytest.raises(JobUnknown) as unknown:
        store.read(job.ref)
    assert not isinstance(unknown.value, JobExpired)
    with pytest.raises(JobUnknown):
        erase(client, store, job.ref)
    with pytest.raises(JobExpired):
        store.submit(job)


def test_blocks_that_others_keep_stay_until_the_last_of_them_is_deleted(
    store: JobStore, rank_a: Delivery, client: Client
) -> None:
    """Two turns of one conversation share their beginning; each deletion takes what only that turn kept."""
    short, long = TEXT[: 2 * BLOCK_BYTES], TEXT
    first = ended(store, rank_a, input=short)
    second = ended(store, rank_a, input=long)
    third = ended(store, rank_a, input=long)
    erase(client, store, second.ref)
    assert blocks(client) == ids_of(long)
    erase(client, store, third.ref)
    assert blocks(client) == ids_of(short)
    assert read_input(client, first.ref) == short
    assert Audit(client, "tiny").run() == []
    erase(client, store, first.ref)
    assert blocks(client) == set()


def test_blocks_that_an_unended_job_holds_stay_until_its_end(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """Deleted meanwhile, the record that kept them leaves nothing to keep them for."""
    kept = ended(store, rank_a, input=TEXT)
    handout = begin(store, rank_a, new_job(input=TEXT, prompt=b"", store=False))
    erase(client, store, kept.ref)
    assert blocks(client) == ids_of(TEXT)
    assert Audit(client, "tiny").run() == []
    complete(rank_a, handout)
    assert blocks(client) == set()


def test_blocks_stay_no_longer_than_what_is_left_needs_them(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """The record that would have kept them longest is deleted: they go with the others, of which one that has expired
    is none."""
    first = ended(store, rank_a, input=TEXT)
    second = ended(store, rank_a, input=TEXT)
    block = KEYS.input(next(iter(ids_of(TEXT))))
    (counted,) = client.hget(block, "kept").decode().split()
    end_ms, _, count = counted.partition(":")
    assert count == "2"
    sooner_ms = int(end_ms) - RESULT_TTL_MS
    for each in ids_of(TEXT):
        client.hset(KEYS.input(each), "kept", f"1000:1 {sooner_ms}:1 {end_ms}:1")
    client.hset(KEYS.job(first.ref.token), "kept_ms", sooner_ms)
    erase(client, store, second.ref)
    assert client.hget(block, "kept") == f"{sooner_ms}:1".encode()
    assert client.pexpiretime(block) == sooner_ms
    erase(client, store, first.ref)
    assert blocks(client) == set()


def test_many_records_of_a_block_have_few_ends(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """Ends are multiples of a power of two that is at most a 16th of the time, and later than the record's."""
    for _ in range(20):
        ended(store, rank_a, input=TEXT)
    block = KEYS.input(next(iter(ids_of(TEXT))))
    until_ms = int(client.hget(block, "until_ms"))
    counts = dict(pair.split(":") for pair in client.hget(block, "kept").decode().split())
    assert sum(map(int, counts.values())) == 20
    step_ms = 4096
    assert step_ms <= (RESULT_TTL_MS + LINGER_MS) / 16
    assert all(int(end_ms) % step_ms == 0 for end_ms in counts)
    assert 0 <= max(map(int, counts)) - until_ms < step_ms


def test_a_celery_result_is_noted_to_be_forgotten(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """Under Celery's own id; whoever wrote the result just after the deletion hears that it must go again."""
    outbox = Outbox(client, store, "tiny")
    job = ended(store, rank_a, celery=True, task_id="a task: of Celery's")
    ended(store, rank_a)
    (waiting,) = outbox.pending()
    assert isinstance(waiting, JobRecord)
    erase(client, store, job.ref)
    assert not outbox.written(waiting.ref)
    assert list(outbox.pending()) == [Erased("a task: of Celery's")]
    outbox.forgotten(Erased("a task: of Celery's"))
    assert client.exists(KEYS.outbox) == 0
    another = ended(store, rank_a, celery=True)
    assert outbox.written(another.ref)
    assert client.exists(KEYS.outbox) == 0

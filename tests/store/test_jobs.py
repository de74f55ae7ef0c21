"""The callers' side of the store: submit, read, view, cancel, watch."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from pool.errors import JobExpired, JobNotCancellable, JobUnknown, QueueFull, StateUnavailable
from pool.store.audit import Audit
from pool.store.connection import Client, connect
from pool.store.delivery import Delivery
from pool.store.handouts import Write
from pool.store.ids import new_ref, parse_ref
from pool.store.jobs import JobStore
from pool.store.keys import keys_of, node_channel
from tests import builders
from tests.builders import completed, entry, new_job


def test_a_submitted_job_is_queued_and_readable(store: JobStore, client: Client) -> None:
    """The record carries what was submitted, has no TTL, and one stream entry names it."""
    job = new_job(params='{"a": 1}', n=2)
    store.submit(job)
    record = store.read(job.ref)
    assert (record.state, record.n, record.seed, record.params) == ("queued", 2, 7, {"a": 1})
    assert record.created_ms > 0
    assert record.started_ms is None
    assert client.ttl(keys_of(job.ref).job(job.ref.token)) == -1
    assert client.zcard(keys_of(job.ref).lanes["backlog"]) == 1
    store.cancel(job.ref)


def test_submitting_the_same_id_again_changes_nothing(store: JobStore, client: Client) -> None:
    """A resend inside a client library cannot enqueue twice."""
    job = new_job()
    store.submit(job)
    store.submit(job)
    assert client.zcard(keys_of(job.ref).lanes["backlog"]) == 1
    store.cancel(job.ref)


def test_the_bound_is_exact_under_parallel_submits(client: Client) -> None:
    """Of 20 parallel submits to a queue of 5, exactly 5 are accepted, and the rest leave no key."""
    store = builders.job_store(client, cap=5)
    jobs = [new_job() for _ in range(20)]
    refused: list[str] = []

    def submit(index: int) -> None:
        try:
            store.submit(jobs[index])
        except QueueFull as error:
            assert error.retry_after_s >= 1
            refused.append(jobs[index].ref.token)

    threads = [threading.Thread(target=submit, args=(index,)) for index in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 15
    keys = keys_of(jobs[0].ref)
    assert client.zcard(keys.lanes["backlog"]) == 5
    assert not any(client.exists(keys.job(token)) for token in refused)
    for job in jobs:
        if job.ref.token not in refused:
            store.cancel(job.ref)


def test_unknown_ids_are_unknown_everywhere(store: JobStore) -> None:
    """Never issued: read, view, cancel and watch all say so; unwatch does not mind."""
    ref = new_ref("responses", "tiny")
    for call in (store.read, store.view, store.cancel, lambda ref: store.watch(ref, "n")):
        with pytest.raises(JobUnknown):
            call(ref)
    store.unwatch(ref, "n")


@pytest.mark.parametrize(
    "text",
    ["", "resp_", "resp_tiny.0_XYZ", "resp_tiny.0_" + "a" * 31, "x_tiny.0_" + "a" * 32, "resp_ti*ny.0_" + "a" * 32,
     "resp_tiny.0_" + "a" * 32 + "\n", "resp_{tiny}.0_" + "a" * 32, "resp_tiny.99999_" + "a" * 32,
     "resp_tiny.00_" + "a" * 32, "resp_tiny.01_" + "a" * 32, "resp_tiny.\u0660_" + "a" * 32,
     "resp_tiny.0_" + "\u0660" * 32],
)  # fmt: skip
def test_ids_that_we_cannot_have_issued_are_unknown(text: str) -> None:
    """Callers' ids pass one strict pattern before anything is built from them."""
    with pytest.raises(JobUnknown):
        parse_ref(text)


def test_a_job_is_known_by_its_own_kind_alone(store: JobStore) -> None:
    """Reads and a cancel by another: unknown, and nothing happens."""
    job = new_job()
    store.submit(job)
    for kind in ("chatcmpl", "cmpl", "gen"):
        for call in (store.read, store.view, store.cancel):
            with pytest.raises(JobUnknown):
                call(replace(job.ref, kind=kind))
    assert store.read(job.ref).state == "queued"
    store.cancel(job.ref)


def test_an_id_finds_its_model_again() -> None:
    """Parsing is the inverse of printing, for names with dots and dashes too."""
    ref = new_ref("chat", "smollm2-135m.v1-instruct")
    assert parse_ref(str(ref)) == ref
    assert ref.tag == "smollm2-135m.v1-instruct:0"


def test_a_cancelled_queued_job_is_never_handed_out(store: JobStore, rank_a: Delivery) -> None:
    """Cancel is durable: a worker that comes later finds nothing. Repeating it is no error."""
    job = new_job()
    store.submit(job)
    assert store.cancel(job.ref).state == "cancelled"
    assert store.cancel(job.ref).state == "cancelled"
    assert rank_a.take(5, 10).handouts == []


def test_a_cancelled_running_job_refuses_its_worker(store: JobStore, rank_a: Delivery) -> None:
    """A late append or completion loses, and the text shown so far stays readable."""
    job = new_job()
    store.submit(job)
    (handout,) = rank_a.take(5, 10).handouts
    assert rank_a.write([Write(handout.lease, 0, (entry(0, 11, text="so far"),))])[0].code == "ok"
    store.cancel(job.ref)
    late = Write(handout.lease, 1, (entry(1, 12),), completed("so far!"))
    answer = rank_a.write([late])[0]
    assert (answer.code, answer.detail) == ("stale", "cancelled")
    view = store.view(job.ref)
    assert view.record.state == "cancelled"
    assert [each.text for each in view.entries] == ["so far"]


def test_a_finished_job_cannot_be_cancelled(store: JobStore, rank_a: Delivery) -> None:
    """It keeps its state and its text."""
    job = new_job()
    store.submit(job)
    (handout,) = rank_a.take(1, 10).handouts
    rank_a.write([Write(handout.lease, 0, (entry(0, 11),), completed("x"))])
    with pytest.raises(JobNotCancellable, match="completed"):
        store.cancel(job.ref)
    assert store.read(job.ref).state == "completed"


def test_the_end_comes_with_everything_and_starts_the_ttl(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """One write: state, text, usage, ack, delete, TTL of record and log. A log without its record is no leak."""
    job = new_job()
    store.submit(job)
    (handout,) = rank_a.take(1, 10).handouts
    rank_a.write([Write(handout.lease, 0, (entry(0, 11, text="hi"),), completed("hi"))])
    record = store.read(job.ref)
    assert (record.state, record.outputs[0].text, record.output_tokens, record.prompt_tokens) == (
        "completed",
        "hi",
        1,
        3,
    )
    assert record.finished_ms is not None
    keys = keys_of(job.ref)
    assert client.xlen(keys.queue) == 0
    assert client.xpending(keys.queue, "workers")["pending"] == 0
    assert 0 < client.pttl(keys.job(job.ref.token)) <= builders.RESULT_TTL_MS
    # Longer than the record: whoever has read that one finds its log whole.
    record_ms = client.pexpiretime(keys.job(job.ref.token))
    assert client.pexpiretime(keys.log(job.ref.token)) == record_ms + builders.LINGER_MS
    client.delete(keys.job(job.ref.token))
    assert Audit(client, "tiny").run() == []
    assert client.exists(keys.index, keys.leases) == 0


def test_watchers_are_told_of_a_cancel(store: JobStore, redis_url: str) -> None:
    """Each watching node gets the job's token; a node that left does not."""
    job = new_job(watch="node-1")
    store.submit(job)
    store.watch(job.ref, "node-2")
    store.watch(job.ref, "node-3")
    store.watch(job.ref, "node-3")
    store.unwatch(job.ref, "node-3")
    listener = connect(redis_url)
    pubsub = listener.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(*(node_channel(f"node-{number}") for number in (1, 2, 3)))
    for _ in range(3):
        pubsub.get_message(timeout=1)
    store.cancel(job.ref)
    heard = set()
    while (message := pubsub.get_message(timeout=0.3)) is not None:
        assert message["data"].decode() == job.ref.token
        heard.add(message["channel"].decode())
    assert heard == {node_channel("node-1"), node_channel("node-2")}
    pubsub.close()
    listener.connection_pool.disconnect()


def test_many_views_come_in_one_call(store: JobStore) -> None:
    """In order, each from its own cursor, None for a job that is not there."""
    jobs = [new_job(), new_job()]
    for job in jobs:
        store.submit(job)
    views = store.views([(jobs[1].ref, 0), (new_ref("chat", "tiny"), 0), (jobs[0].ref, 0)])
    assert [view and view.record.ref for view in views] == [jobs[1].ref, None, jobs[0].ref]
    for job in jobs:
        store.cancel(job.ref)


def test_a_state_server_that_is_away_is_unavailable() -> None:
    """Connection errors surface as StateUnavailable, not as the client library's own."""
    away = builders.job_store(connect("redis://127.0.0.1:1/0", max_connections=1))
    with pytest.raises(StateUnavailable):
        away.submit(new_job())
    with pytest.raises(StateUnavailable):
        away.ping()


def test_a_voided_submit_has_no_effect_however_late_it_comes(store: JobStore, client: Client) -> None:
    """Arrived before: cancelled. Arriving after: refused, nothing stored. Repeating it changes nothing."""
    early, late = new_job(), new_job()
    store.submit(early)
    for job in (early, late, late):
        store.void(job.ref)
    assert store.read(early.ref).state == "cancelled"
    with pytest.raises(JobExpired):
        store.submit(late)
    keys = keys_of(late.ref)
    assert not client.exists(keys.job(late.ref.token))
    assert client.zcard(keys.index) == client.zcard(keys.lanes["backlog"]) == 0
    assert client.ttl(keys.tombstone(late.ref.token)) > 0


def test_voiding_leaves_an_ended_job_alone(store: JobStore, rank_a: Delivery) -> None:
    """Its state, its text and its tombstone stay."""
    job = new_job()
    store.submit(job)
    (handout,) = rank_a.take(1, 100).handouts
    rank_a.write([Write(handout.lease, 0, (entry(0, 1),), completed("x"))])
    store.void(job.ref)
    assert (store.read(job.ref).state, store.read(job.ref).outputs[0].text) == ("completed", "x")

"""Waiting: lost hints, cut connections, a state server that goes away. Never a hang, never a connection a waiter."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from flask import Flask
from werkzeug.test import TestResponse

from pool.errors import JobExpired, JobUnknown
from pool.rules import jobs
from pool.store.connection import Client
from pool.store.handouts import Write
from pool.store.ids import JobRef, new_ref, parse_ref
from pool.store.jobs import JobStore, View
from pool.store.keys import node_channel
from pool.store.log import LogEntry, pack
from pool.store.server import StateServer
from tests.builders import new_job
from tests.waiting import wait_until
from tests.webapp.api_process import ApiProcess
from tests.webapp.playing_worker import MODEL, PlayingWorker, Turn
from webapp.node import CONNECTIONS, Node
from webapp.waits import Waiter, Waits

BODY = {"model": MODEL, "input": "hi"}


@pytest.fixture
def own_state(tmp_path: Path) -> Iterator[StateServer]:
    """A state server that the test may stop and start."""
    with StateServer(tmp_path / "own-state") as server:
        yield server


@pytest.fixture
def own_worker(own_state: StateServer) -> Iterator[PlayingWorker]:
    """A worker on it."""
    worker = PlayingWorker(own_state.url)
    worker.register()
    yield worker
    worker.close()


def node_of(app: Flask) -> Node:
    """What an application holds."""
    node: Node = app.extensions["genpool"]
    return node


def post_in_thread(pool: ThreadPoolExecutor, app: Flask) -> Callable[[], tuple[int, str]]:
    """A synchronous request under way; calling the result waits for (status, text)."""
    answer = pool.submit(lambda: app.test_client().post("/v1/responses", json=BODY))

    def result() -> tuple[int, str]:
        response = answer.result(timeout=20)
        body = response.get_json()
        return response.status_code, body["output"][0]["content"][0]["text"] if "output" in body else str(body)

    return result


def test_a_lost_hint_costs_seconds_at_most(app: Flask, worker: PlayingWorker) -> None:
    """The slow poll finds an end that nobody told of."""
    with ThreadPoolExecutor() as pool:
        result = post_in_thread(pool, app)
        worker.hints = False
        turn = worker.take()
        worker.say(turn, "found")
        worker.finish(turn)
        assert result() == (200, "found")


@pytest.mark.parametrize("kind", ["pubsub", "normal"])
def test_cut_connections_are_made_again(app: Flask, worker: PlayingWorker, client: Client, kind: str) -> None:
    """Killing all connections of a kind in the middle of a wait loses nothing."""
    with ThreadPoolExecutor() as pool:
        result = post_in_thread(pool, app)
        turn = worker.take()
        wait_until(lambda: client.pubsub_channels("gp:node:*"), description="the subscription")
        worker.client.connection_pool.disconnect()
        client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        worker.delivery.writer.connection_pool.disconnect()
        worker.say(turn, "still ")
        worker.say(turn, "here")
        worker.finish(turn)
        assert result() == (200, "still here")
    wait_until(lambda: len(node_of(app).waits) == 0, description="no waiter to be left")


def test_a_state_server_that_restarts_answers_its_waiters(
    make_app: Callable[..., Flask], own_state: StateServer, own_worker: PlayingWorker
) -> None:
    """A wait outlives a restart of the state server."""
    app = make_app(own_state.url)
    with ThreadPoolExecutor() as pool:
        result = post_in_thread(pool, app)
        turn = own_worker.take()
        own_worker.say(turn, "before ")
        own_state.stop()
        own_worker.client.connection_pool.disconnect()
        own_worker.delivery.writer.connection_pool.disconnect()
        own_state.start()
        own_worker.say(turn, "after")
        own_worker.finish(turn)
        assert result() == (200, "before after")


def test_without_a_state_server_nothing_is_accepted_and_nothing_hangs(
    make_app: Callable[..., Flask], tmp_path: Path
) -> None:
    """A 503 that may be sent again; polls say the same."""
    http = make_app(f"unix://{tmp_path}/nobody.sock").test_client()
    for answer in (
        http.post("/v1/responses", json=BODY),
        http.post("/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "x"}]}),
        http.get(f"/v1/responses/resp_{MODEL}.0_{'0' * 32}"),
        http.post(f"/v1/responses/resp_{MODEL}.0_{'0' * 32}/cancel"),
    ):
        assert (answer.status_code, answer.get_json()["error"]["code"]) == (503, "state_unavailable")
        assert answer.headers["retry-after"] == "1"
    ready = http.get("/readyz")
    assert ready.status_code == 503
    assert ready.get_json()["missing"] == ["state server (The state server cannot be reached)"]


def test_a_state_server_that_lacks_replicas_refuses_and_goes_on(
    app: Flask, worker: PlayingWorker, client: Client
) -> None:
    """`min-replicas-to-write` is not met: submits and cancels are 503s that may be sent again, the node is not ready,
    and who waits is answered when writes pass again."""
    http = app.test_client()
    job = http.post("/v1/responses", json={**BODY, "background": True}).get_json()["id"]
    with ThreadPoolExecutor() as pool:
        result = post_in_thread(pool, app)
        wait_until(lambda: worker.held == 2, description="both jobs to be queued")
        client.config_set("min-replicas-to-write", 1)
        try:
            for answer in (
                http.post("/v1/responses", json=BODY),
                http.post("/v1/responses", json=BODY, headers={"Idempotency-Key": "one"}),
                http.post(f"/v1/responses/{job}/cancel"),
            ):
                assert (answer.status_code, answer.get_json()["error"]["code"]) == (503, "state_unavailable")
                assert answer.headers["x-should-retry"] == "true"
            assert "takes no writes" in http.get("/readyz").get_json()["missing"][0]
            assert http.get(f"/v1/responses/{job}").status_code == 200
        finally:
            client.config_set("min-replicas-to-write", 0)
        with worker.answering("x"):
            assert result() == (200, "x")
    assert http.get("/readyz").status_code == 200
    wait_until(lambda: worker.held == 0, description="no job to be left")


def test_an_abandoned_job_is_cancelled_when_the_state_server_is_back(
    make_app: Callable[..., Flask], own_state: StateServer, own_worker: PlayingWorker
) -> None:
    """A job that nobody will read does not stay, even when it cannot be cancelled right away."""
    app = make_app(own_state.url)
    answer = app.test_client().post("/v1/responses", json={**BODY, "background": True})
    ref = parse_ref(answer.get_json()["id"])
    own_state.stop()
    node = node_of(app)
    node.waits.abandon(ref)
    own_state.start()
    wait_until(lambda: node.store.read(ref).state == jobs.CANCELLED, description="the job to be cancelled")
    assert own_worker.held == 0


def test_a_job_that_disappears_ends_its_waits(app: Flask, worker: PlayingWorker, client: Client) -> None:
    """A record that is gone is said, in a wait and in a stream."""
    node = node_of(app)
    http = app.test_client()
    ref = parse_ref(http.post("/v1/responses", json={**BODY, "background": True}).get_json()["id"])
    stream = http.get(f"/v1/responses/{ref}?stream=true", buffered=False)
    waiter = node.waits.follow(ref, 0)
    client.delete(worker.keys.job(ref.token))
    with pytest.raises(JobUnknown):
        while waiter.next(10) is not None:
            pass
    waiter.close()
    events = stream.get_data(as_text=True).strip().split("\n\n")
    *_, before, last = (event for event in events if event.startswith("event: "))
    assert last.startswith("event: error\n") and '"code":"not_found"' in last
    number = re.compile(r'"sequence_number":(\d+)')
    assert number.findall(last) == number.findall(before), "whoever continues after the error must miss no event"
    with pytest.raises(JobUnknown):
        node.waits.follow(ref, 0)
    stream.close()
    assert len(node.waits) == 0


def test_a_job_that_expires_while_it_is_waited_for_has_expired(
    app: Flask, worker: PlayingWorker, client: Client
) -> None:
    """Its waiter missed the end for longer than the result was kept: gone, not unknown."""
    node = node_of(app)
    ref = parse_ref(app.test_client().post("/v1/responses", json={**BODY, "background": True}).get_json()["id"])
    waiter = node.waits.follow(ref, 0)
    worker.hints = False
    worker.finish(worker.take())
    client.delete(worker.keys.job(ref.token))
    with pytest.raises(JobExpired):
        while waiter.next(10) is not None:
            pass
    waiter.close()


def reader_due_ms(client: Client, worker: PlayingWorker, ref: JobRef) -> float:
    """When the job is cancelled for want of a reader, in the state server's ms from now."""
    seconds, micros = client.time()
    due_ms = client.zscore(worker.keys.timers, f"reader:{ref.token}")
    assert due_ms is not None
    return float(due_ms) - seconds * 1000 - micros / 1000


def test_a_new_reader_counts_at_once(make_app: Callable[..., Flask], worker: PlayingWorker, client: Client) -> None:
    """A job whose reader is gone is about to be cancelled: whoever asks for it now, with the same key or by its id, is
    its reader from the first moment on. The time set covers the grace and the way to the next periodic turn."""
    grace_s = 60
    app = make_app(orphan_grace_seconds=grace_s)
    node, http = node_of(app), app.test_client()

    def ask() -> TestResponse:
        headers = {"Idempotency-Key": "one"}
        return http.post("/v1/responses", json={**BODY, "stream": True}, headers=headers, buffered=False)

    def about_to_be_cancelled() -> None:
        assert client.zadd(worker.keys.timers, {f"reader:{ref.token}": 1}, xx=True, ch=True) == 1

    streams = [ask()]
    (token,) = client.zrange(worker.keys.index, 0, -1)
    ref = new_ref("responses", MODEL, token=token.decode())
    wait_until(lambda: node.waits._next_hold_s > 0, description="the periodic turn, the next is 20 s away")
    about_to_be_cancelled()
    streams.append(ask())
    assert reader_due_ms(client, worker, ref) > grace_s * 1000 * 5 / 4
    about_to_be_cancelled()
    node.waits.follow(ref, 0).close()
    assert reader_due_ms(client, worker, ref) > grace_s * 1000 * 5 / 4
    for each in streams:
        each.close()


def test_many_waiters_share_few_connections(own_state: StateServer, own_worker: PlayingWorker, tmp_path: Path) -> None:
    """However many requests wait, a process keeps to its handful of connections. The state server is the test's own:
    on the shared one other nodes open and close connections as they please."""

    def connections() -> int:
        return len(own_worker.client.client_list())

    streams = 16
    before = connections()
    opened = threading.Barrier(streams + 1)
    body = {**BODY, "stream": True}
    node = ApiProcess(own_state.url, tmp_path / "own-node").start()

    def stream() -> str:
        with httpx.stream("POST", f"{node.base_url}/v1/responses", json=body, timeout=20) as answer:
            lines = answer.iter_lines()
            next(lines)
            opened.wait(timeout=20)
            return list(lines)[-2]

    try:
        with ThreadPoolExecutor(streams) as pool:
            answers = [pool.submit(stream) for _ in range(streams)]
            opened.wait(timeout=20)
            held, opened_by_node = own_worker.held, connections() - before
            with own_worker.answering("x"):
                assert all("response.completed" in answer.result(timeout=20) for answer in answers)
        assert held == streams
        assert 0 < opened_by_node <= CONNECTIONS
    finally:
        node.stop()


def test_every_reader_of_one_job_hears_everything(app: Flask, worker: PlayingWorker) -> None:
    """Several waiters of one process on one job, from different places in its log."""
    http = app.test_client()
    job = http.post("/v1/responses", json={**BODY, "background": True}).get_json()["id"]
    turn = worker.take()
    worker.say(turn, "one ")
    node = node_of(app)
    early, late = node.waits.follow(parse_ref(job), 0), node.waits.follow(parse_ref(job), 1)
    worker.say(turn, "two")
    worker.finish(turn)

    def heard(waiter: Waiter) -> str:
        text = ""
        while True:
            view = waiter.next(10)
            assert view is not None
            text += "".join(entry.text for entry in view.entries)
            if view.record.terminal:
                return text

    assert heard(early) == "one two"
    assert heard(late) == "two"
    early.close()
    late.close()


class CountedReads(JobStore):
    """A store that counts the jobs that are looked at."""

    def __init__(self, client: Client) -> None:
        super().__init__(client, result_ttl_ms=60_000, pending_per_model=5)
        self.count = 0

    def views(self, wanted: Sequence[tuple[JobRef, int]]) -> list[View | None]:
        """As the store's own."""
        self.count += len(wanted)
        return super().views(wanted)


@contextmanager
def followed(client: Client, worker: PlayingWorker) -> Iterator[tuple[CountedReads, Turn, Waiter]]:
    """A running job whose first token its waiter has heard."""
    store = CountedReads(client)
    waits = Waits(store, client, grace_ms=30_000)
    job = new_job(model=MODEL, watch=waits.node_id)
    waiter = waits.open(job.ref)
    try:
        store.submit(job)
        waiter.arm()
        turn = worker.take()
        worker.say(turn, "0 ")
        assert text_until(waiter, "0 ") == "0 "
        yield store, turn, waiter
        worker.finish(turn)
    finally:
        waiter.close()
        waits.close()


def text_until(waiter: Waiter, end: str) -> str:
    """What is heard up to this."""
    text = ""
    while not text.endswith(end):
        view = waiter.next(10)
        assert view is not None, f"no more than {text!r}"
        text += "".join(entry.text for entry in view.entries)
    return text


def test_tokens_that_come_with_hints_are_not_read(client: Client, worker: PlayingWorker) -> None:
    """A stream costs reads at its beginning and its end, not for each token."""
    words = [f"{number} " for number in range(1, 40)]
    with followed(client, worker) as (store, turn, waiter):
        before = store.count
        for word in words:
            worker.say(turn, word)
        assert text_until(waiter, words[-1]) == "".join(words)
        # The slow poll may look as well.
        assert store.count - before <= len(words) // 4


def test_a_hint_that_was_lost_is_made_up_for_by_the_next(client: Client, worker: PlayingWorker) -> None:
    """Entries before those that came are missing: the log has them, and nothing comes twice or out of order."""
    with followed(client, worker) as (store, turn, waiter):
        key = worker.keys.job(turn.handout.lease.token)
        watch = client.hget(key, "watch")
        before = store.count
        client.hset(key, "watch", "")
        worker.say(turn, "1 ", "2 ")
        client.hset(key, "watch", watch)
        worker.say(turn, "3 ", "4 ")
        assert text_until(waiter, "4 ") == "1 2 3 4 "
        assert store.count > before


def test_hints_that_come_late_are_not_heard_again(client: Client, worker: PlayingWorker) -> None:
    """A waiter may have read more than the hints that still come."""
    with followed(client, worker) as (_, turn, waiter):
        worker.say(turn, "1 ", "2 ")
        assert text_until(waiter, "2 ") == "1 2 "
        for entries in ((0, 1), (2,), (0,), (2, 3)):
            # Entry 3 is new, and comes again when it is stored.
            blobs = [pack(LogEntry(seq, 0, (7,), f"{seq} ")) for seq in entries]
            sizes = " ".join(str(len(blob)) for blob in blobs)
            head = f"{turn.handout.lease.token} {entries[0]} {sizes}\n".encode()
            client.publish(node_channel(waiter._waits.node_id), head + b"".join(blobs))
        assert text_until(waiter, "3 ") == "3 "
        worker.say(turn, "3 ", "4 ")
        assert text_until(waiter, "4 ") == "4 "


class SlowReplies(JobStore):
    """A store whose reads come in, but are looked at only when the test says so."""

    def __init__(self, client: Client) -> None:
        super().__init__(client, result_ttl_ms=60_000, pending_per_model=5)
        self.read = threading.Event()
        self.go_on = threading.Event()

    def views(self, wanted: Sequence[tuple[JobRef, int]]) -> list[View | None]:
        """As the store's own."""
        found = super().views(wanted)
        if wanted:
            self.read.set()
            assert self.go_on.wait(10)
        return found


def test_a_job_stored_after_the_reader_looked_for_it_is_not_gone(client: Client, worker: PlayingWorker) -> None:
    """The reader looks for all waiters when it subscribes, also for those whose jobs are only being submitted."""
    store = SlowReplies(client)
    waits = Waits(store, client, grace_ms=30_000)
    job = new_job(model=MODEL, watch=waits.node_id)
    waiter = waits.open(job.ref)
    try:
        assert store.read.wait(10)
        store.submit(job)
        waiter.arm()
        store.go_on.set()
        worker.finish(worker.take())
        view = waiter.next(10)
        while view is not None and not view.record.terminal:
            view = waiter.next(10)
        assert view is not None and view.record.state == jobs.COMPLETED
    finally:
        waiter.close()
        waits.close()


def test_what_a_caller_read_itself_does_not_come_again(app: Flask, worker: PlayingWorker) -> None:
    """A job may have said something, or ended, before its submitter first looks: the waiter goes on from there."""
    node = node_of(app)
    ref = parse_ref(app.test_client().post("/v1/responses", json={**BODY, "background": True}).get_json()["id"])
    turn = worker.take()
    worker.say(turn, "one ", "two ")
    waiter = node.waits.open(ref)
    waiter.arm()
    waiter.saw(node.store.view(ref))
    node.store.watch(ref, node.waits.node_id)
    worker.say(turn, "three")
    worker.finish(turn)
    view = waiter.next(10)
    while view is not None and not view.entries:
        view = waiter.next(10)
    assert view is not None and [entry.text for entry in view.entries] == ["three"]
    waiter.close()


def test_a_late_write_after_a_cancel_loses(app: Flask, worker: PlayingWorker) -> None:
    """What a worker still sends for a cancelled job is refused and shown to nobody."""
    http = app.test_client()
    job = http.post("/v1/responses", json={**BODY, "background": True}).get_json()["id"]
    turn = worker.take()
    http.post(f"/v1/responses/{job}/cancel")
    late = Write(turn.handout.lease, 0, (LogEntry(seq=0, choice=0, token_ids=(7,), text="late"),))
    assert worker.delivery.write([late])[0].code == "stale"
    answer = http.get(f"/v1/responses/{job}").get_json()
    assert (answer["status"], answer["output"]) == ("cancelled", [])

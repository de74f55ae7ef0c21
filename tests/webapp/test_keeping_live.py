"""Idempotency keys, readers that die, time limits and expired results, over HTTP."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from pool.store.connection import Client
from pool.store.ids import parse_ref
from tests.waiting import wait_until
from tests.webapp.api_process import ApiProcess
from tests.webapp.playing_worker import PlayingWorker

MODEL = "tiny"
BODY = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}


@pytest.fixture
def short_node(redis_url: str, tmp_path: Path) -> Iterator[ApiProcess]:
    """A node whose readers have one second of grace."""
    node = ApiProcess(redis_url, tmp_path / "short", SERVER__ORPHAN_GRACE_SECONDS="1").start()
    yield node
    node.stop(signal.SIGKILL)


def post(node: ApiProcess, key: str | None = None, **fields: object) -> httpx.Response:
    """POST /v1/responses."""
    headers = {} if key is None else {"Idempotency-Key": key}
    return httpx.post(f"{node.base_url}/v1/responses", json=BODY | fields, headers=headers, timeout=30)


def test_twenty_submits_with_one_key_are_one_job(node: ApiProcess, worker: PlayingWorker) -> None:
    """In parallel, through the same node: one id in all answers, one entry in the queue; another body is a 409 that
    must not be sent again."""
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: post(node, "key-1", background=True), range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert worker.held == 1
    other = post(node, "key-1", background=True, max_output_tokens=5)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert other.headers["x-should-retry"] == "false"
    assert worker.held == 1


@pytest.mark.parametrize("key", ["", "k" * 257, "tab\tin it"])
def test_odd_keys_are_refused(node: ApiProcess, worker: PlayingWorker, key: str) -> None:
    """Named, and nothing is stored."""
    answer = post(node, key, background=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert worker.held == 0


def test_a_full_queue_leaves_the_key_free(narrow_node: ApiProcess, worker: PlayingWorker) -> None:
    """Nothing was accepted under it, so another body is no conflict."""
    assert post(narrow_node, background=True).status_code == 200
    for tokens in (4, 5):
        refused = post(narrow_node, "key-3", background=True, max_output_tokens=tokens)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "executor_queue_full")
        assert refused.headers["x-should-retry"] == "true"
    assert worker.held == 1


def test_a_keyed_queue_timeout_is_not_worth_a_resend(node: ApiProcess, worker: PlayingWorker) -> None:
    """The resend would find the same failed job, and does; nothing is queued. `Retry-After` is for a new request, under
    a key of its own."""
    first, again = (post(node, "key-4", queue_timeout_seconds=0.3) for _ in range(2))
    for answer in (first, again):
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_timeout")
        assert answer.headers["retry-after"].isdecimal()
        assert answer.headers["x-should-retry"] == "false"
    assert first.json()["id"] == again.json()["id"]
    assert worker.held == 0


def test_a_keyed_request_finds_its_finished_answer(node: ApiProcess, worker: PlayingWorker) -> None:
    """A resend after the end gets the same answer, without another run."""
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(post, node, "key-2")
        turn = worker.take()
        worker.say(turn, "once")
        worker.finish(turn)
        first = pending.result().json()
    again = post(node, "key-2").json()
    assert again == first
    assert worker.held == 0


def test_a_job_whose_node_died_is_cancelled_after_its_grace(short_node: ApiProcess, worker: PlayingWorker) -> None:
    """Nobody reads a plain stream any more once its node was killed; some node's maintenance cancels its job."""
    with httpx.stream(
        "POST", f"{short_node.base_url}/v1/responses", json=BODY | {"stream": True}, timeout=30
    ) as answer:
        next(answer.iter_lines())
        turn = worker.take()
        assert worker.held == 1
        short_node.stop(signal.SIGKILL)
    short_node.start()
    wait_until(lambda: worker.held == 0, description="the orphan to be cancelled")
    assert worker.client.hget(worker.keys.job(turn.handout.lease.token), "state") == b"cancelled"


def test_a_waiting_reader_keeps_its_job(short_node: ApiProcess, worker: PlayingWorker) -> None:
    """A sync wait that lasts three graces is not taken for an orphan."""
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(post, short_node)
        turn = worker.take()
        with pytest.raises(TimeoutError):
            pending.result(timeout=3)
        worker.say(turn, "late")
        worker.finish(turn)
        assert pending.result().status_code == 200


def test_time_limits_of_a_request(node: ApiProcess, worker: PlayingWorker) -> None:
    """Queue timeout: 429 that may be sent again; deadline: 504 that may not; out of range: 400 by name."""
    late = post(node, queue_timeout_seconds=0.3)
    assert (late.status_code, late.json()["error"]["code"]) == (429, "queue_timeout")
    assert (late.headers["x-should-retry"], late.headers["retry-after"]) == ("true", "5")
    past = post(node, deadline_seconds=0.3)
    assert (past.status_code, past.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert past.headers["x-should-retry"] == "false"
    for field, value in (("deadline_seconds", 0), ("queue_timeout_seconds", -1), ("run_timeout_seconds", "5")):
        refused = post(node, **{field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert worker.held == 0


def test_an_expired_answer_is_gone_not_unknown(node: ApiProcess, worker: PlayingWorker, client: Client) -> None:
    """410 after its time, 404 for what never was."""
    job = post(node, background=True).json()["id"]
    worker.finish(worker.take())
    ref = parse_ref(job)
    client.delete(worker.keys.job(ref.token), worker.keys.log(ref.token))
    gone = httpx.get(f"{node.base_url}/v1/responses/{job}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "expired")
    unknown = httpx.get(f"{node.base_url}/v1/responses/resp_{MODEL}.0_{'0' * 32}")
    assert unknown.status_code == 404

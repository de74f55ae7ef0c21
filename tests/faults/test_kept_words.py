"""What an API process said of a job while the state server was away holds, also when that process ends: a 503 without
an id leaves nothing behind, and "it goes on" goes on."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pool.rules import jobs
from pool.store.ids import parse_ref
from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

GRACE_S = 1
SYNC_WAIT_S = 2
LEASE_S = 1.5
#: Runs for 9 s and more: longer than the outages below, a lease of respite after them, and the grace.
TOKENS = 180
#: Of nodes.
NUMBERS = itertools.count()
BODY = {"model": SCRIPTED, "input": f"repeat {TOKENS} x", "max_output_tokens": TOKENS + 10}


@pytest.fixture(scope="module")
def shared(start_shared_system: StartSystem) -> System:
    """One worker, a short grace, and no node yet."""
    sections = {
        "server": {"orphan_grace_seconds": GRACE_S},
        "worker": {"lease_seconds": LEASE_S, "renew_seconds": 0.4},
    }
    return start_shared_system(apis=0, workers=1, delay_ms=50, sections=sections)


@pytest.fixture
def system(shared: System) -> Iterator[System]:
    """The same with a node that is the test's alone, and cut off early when it is told to end."""
    node = shared.api_part(next(NUMBERS), "", "--graceful-timeout", "8")
    shared.apis = [node]
    node.start()
    shared.await_api(node)
    yield shared
    node.end()


def post(system: System, path: str = "responses", **body: Any) -> httpx.Response:
    """A request to the node; a stream is read to its end, whichever way it ends."""
    with httpx.stream("POST", f"{system.api_url(system.apis[0])}/v1/{path}", json=body, timeout=60) as answer:
        chunks: list[bytes] = []
        with contextlib.suppress(httpx.RemoteProtocolError):
            chunks.extend(answer.iter_raw())
        return httpx.Response(answer.status_code, headers=answer.headers, content=b"".join(chunks))


def running(system: System, count: int) -> list[str]:
    """The ids of that many jobs, once they have run for a while: their node knows by then that they were accepted."""
    with system.client() as client:
        wait_until(lambda: client.zcard(system.keys().leases) == count, description=f"{count} jobs to run")
        tokens = [token.decode() for token in client.zrange(system.keys().leases, 0, -1)]
        found = [client.hget(system.keys().job(token), "task_id").decode() for token in tokens]
    wait_until(lambda: all(system.tokens(job) >= 10 for job in found), description="tokens of each")
    return found


def take_state_away(system: System) -> None:
    """kill -9 of the state server, but not while it holds back confirmed writes because of an fsync under way."""
    with system.client() as client:
        wait_until(lambda: client.info("persistence")["aof_pending_bio_fsync"] == 0, description="no fsync under way")
    system.state.kill()


def restart_state(system: System) -> None:
    """The state server comes back."""
    system.state.start()
    system.await_state()


def assert_completes(system: System, job: str) -> None:
    """It runs to its end, and nobody has cancelled it."""
    record = system.ended(job, timeout_s=60)
    assert (record.state, [output.text for output in record.outputs]) == (jobs.COMPLETED, ["x" * TOKENS])


def test_a_wait_that_ends_while_the_state_server_is_away(system: System) -> None:
    """504, it goes on: its reader's time is over soon after, but nobody waits for a reader any more."""
    (node,) = system.apis
    node.kill()
    node.env["GENPOOL_SERVER__SYNC_WAIT_SECONDS"] = str(SYNC_WAIT_S)
    node.start()
    system.await_api(node)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(post, system, **BODY)
        (job,) = running(system, 1)
        take_state_away(system)
        answer = pending.result(60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "sync_wait_exceeded")
    restart_state(system)
    assert answer.json()["id"] == job
    assert_completes(system, job)


def test_a_node_that_stops_while_the_state_server_is_away(system: System) -> None:
    """A wait, a stream and a chat stream are cut off with the promise that their jobs go on. The node ends when the
    state server has been told so."""
    (node,) = system.apis
    chat = {"model": SCRIPTED, "messages": [{"role": "user", "content": BODY["input"]}], "max_tokens": TOKENS + 10}
    with ThreadPoolExecutor(3) as pool:
        pending = [
            pool.submit(post, system, **BODY),
            pool.submit(post, system, **BODY, stream=True),
            pool.submit(post, system, "chat/completions", **chat, stream=True),
        ]
        promised = running(system, 3)
        take_state_away(system)
        node.signal(signal.SIGTERM)
        answers = [each.result(60) for each in pending]
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (504, "node_stopping")
        assert '"code":"node_stopping"' in answers[2].text
        assert node.alive, "there is something left to be told"
        restart_state(system)
        assert node.wait() == 0
        for job in promised:
            assert_completes(system, job)


@pytest.mark.parametrize("ends_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_submit_that_was_refused_does_not_come_back(system: System, ends_by: signal.Signals) -> None:
    """The state server hangs, a background submit is answered 503, and the node ends before the server goes on: what it
    then reads of the submit is too late."""
    (node,) = system.apis
    system.ended(system.submit("say x"))
    with system.client() as client:
        stored = set(client.scan_iter(match=system.keys().job("*")))
    system.state.pause()
    try:
        answer = post(system, **BODY, background=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_unavailable")
        assert "id" not in answer.json()
        if ends_by == signal.SIGKILL:
            node.kill()
        else:
            node.signal(ends_by)
            wait_until(lambda: not node.alive, description="the node to end", timeout_s=30)
    finally:
        system.state.resume()
    system.await_state()
    resumed_s = time.monotonic()
    wait_until(lambda: time.monotonic() > resumed_s + 1, description="what was sent before to be read")
    with system.client() as client:
        assert set(client.scan_iter(match=system.keys().job("*"))) == stored
    node.start()
    system.await_api(node)
    assert parse_ref(system.submit("say y"))
    system.assert_recovered()

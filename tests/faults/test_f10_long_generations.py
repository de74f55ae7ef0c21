"""F10: a synchronous wait that is shorter than its generation, on a node whose own watch is shorter still."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from pool.rules import jobs
from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

SYNC_WAIT_S = 3
WATCH_S = 2  # gunicorn's --timeout
LONG = "repeat 45 x"  # of 0.1 s each


def sync(system: System, script: str) -> tuple[httpx.Response, float]:
    """One synchronous request and how long it took."""
    began_s = time.monotonic()
    answer = system.http.post(
        f"{system.api_url(system.apis[0])}/v1/responses", json={"model": SCRIPTED, "input": script}
    )
    return answer, time.monotonic() - began_s


def test_f10_a_wait_ends_before_its_generation_and_says_where_it_goes_on(start_system: StartSystem) -> None:
    """A running and a queued job whose callers' waits run out: each caller gets an id to poll, both jobs go on to their
    end, and the node serves others all the while."""
    system = start_system(
        workers=1,
        delay_ms=100,
        gunicorn=("--timeout", str(WATCH_S)),
        sections={"server": {"sync_wait_seconds": SYNC_WAIT_S}},
        models={SCRIPTED: {"target_inflight": 1}},
    )
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(sync, system, LONG)
        with system.client() as client:
            wait_until(lambda: client.zcard(system.keys().leases) == 1, description="the first job to run")
        queued = pool.submit(sync, system, "repeat 2 x")
        while not (running.done() and queued.done()):
            began_s = time.monotonic()
            assert system.http.get(f"{system.api_url(system.apis[0])}/healthz").status_code == 200
            assert time.monotonic() - began_s < 1
            time.sleep(0.1)
        waits = [running.result(), queued.result()]
    for (answer, taken_s), state in zip(waits, ("in_progress", "queued"), strict=True):
        body = answer.json()
        assert (answer.status_code, body["error"]["code"]) == (504, "sync_wait_exceeded")
        assert body["status"] == state
        assert body.get("queue_position") == (0 if state == "queued" else None)
        assert answer.headers["location"] == f"/v1/responses/{body['id']}"
        assert answer.headers["x-should-retry"] == "false"
        assert SYNC_WAIT_S <= taken_s < SYNC_WAIT_S + 3
        system.accepted.append(body["id"])
    for (answer, _), text in zip(waits, ("x" * 45, "xx"), strict=True):
        assert system.ended(answer.json()["id"]).state == jobs.COMPLETED
        shown = system.http.get(f"{system.api_url(system.apis[0])}{answer.headers['location']}").json()
        assert shown["output"][0]["content"][0]["text"] == text
    assert "TIMEOUT" not in system.apis[0].output()
    assert system.apis[0].output().count("Booting worker") == 1
    system.assert_recovered()

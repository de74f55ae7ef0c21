"""F08: a synchronous caller is woken, also when the result came first and when its process lost its connections."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.faults.conftest import StartSystem
from tests.faults.gauges import api_waits
from tests.system import SCRIPTED, System
from tests.waiting import wait_until
from webapp.waits import POLL_S

WAITS, AT_ONCE = 500, 20


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """Quick: a job is often done before its caller waits for it."""
    return start_shared_system(workers=1, delay_ms=1, models={SCRIPTED: {"target_inflight": AT_ONCE}})


def sync(system: System, **body: Any) -> tuple[httpx.Response, float]:
    """One synchronous request and how long it took."""
    began_s = time.monotonic()
    answer = system.http.post(f"{system.api_url(system.apis[0])}/v1/responses", json={"model": SCRIPTED, **body})
    return answer, time.monotonic() - began_s


def test_f08_every_wait_ends_with_its_job(system: System) -> None:
    """Hundreds of the shortest jobs, many at a time: none of the waits has to be saved by the slow poll."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda _: sync(system, input="say x"), range(WAITS)))
    assert {answer.status_code for answer, _ in found} == {200}
    assert {answer.json()["output"][0]["content"][0]["text"] for answer, _ in found} == {"x"}
    times_s = sorted(taken_s for _, taken_s in found)
    assert times_s[WAITS * 99 // 100] < POLL_S[0]
    system.assert_recovered()


@pytest.mark.parametrize(("stream", "fewest", "most"), [(False, 1, 5), (True, 20, 500)])
def test_f08_a_wait_is_woken_for_its_end_alone(system: System, stream: bool, fewest: int, most: int) -> None:
    """A stream is told of tokens as they come; a synchronous request hears of nothing before the end."""
    hints: list[bytes] = []
    with system.client() as client, client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.psubscribe("gp:node:*")
        heard.get_message(timeout=5)
        answer, _ = sync(system, input="repeat 200 x", stream=stream)
        while (message := heard.get_message(timeout=0.3)) is not None:
            hints.append(message["data"])
    assert "x" * 200 in answer.text
    assert fewest <= len(hints) <= most
    system.assert_recovered()


@pytest.mark.parametrize("kind", ["pubsub", "normal"])
def test_f08_cut_connections_leave_no_waiter(system: System, kind: str) -> None:
    """Connections of a kind are cut while a synchronous request waits: it is answered, and nothing of it is left."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        # Pools open their connections on demand: all that they ever open must be there before they are counted.
        list(pool.map(lambda _: sync(system, input="say x"), range(2 * AT_ONCE)))
    with system.client() as client:
        base = len(client.client_list())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(sync, system, input=f"repeat {1500 if kind == 'pubsub' else 1400} x")
            wait_until(lambda: client.zcard(system.keys().leases) == 1, description="the job to run")
            client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            answer, taken_s = waiting.result(timeout=60)
        assert taken_s < system.settings.server.sync_wait_seconds + 2
        assert answer.status_code in (200, 503, 504)
        assert answer.status_code == 200 or answer.json()["id"]
        wait_until(lambda: api_waits(system) == (0, 0), description="no waiter to be left")
        system.assert_recovered()
        wait_until(lambda: len(client.client_list()) <= base + 2, description="the connections to be as before")
        channels = client.pubsub_channels("gp:node:*")
        assert len(channels) == 2, "the node's and the rank's"
        assert all(count == 1 for _, count in client.pubsub_numsub(*channels))

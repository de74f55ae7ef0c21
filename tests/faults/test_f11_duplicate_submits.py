"""F11: the same request sent more than once, at once and later, and with its worker killed in between."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from pool.store.connection import Client
from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

AT_ONCE = 20


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """Two workers, so that a job can be taken over, and two nodes, so that a resend can go elsewhere."""
    worker = {"lease_seconds": 1.5, "renew_seconds": 0.4}
    return start_shared_system(workers=2, apis=2, delay_ms=50, sections={"worker": worker})


def send(system: System, script: str, key: str = "", *, api: int = 0, **body: object) -> httpx.Response:
    """A background submit with an Idempotency-Key."""
    headers = {"Idempotency-Key": key} if key else {}
    request = {"model": SCRIPTED, "input": script, "background": True, **body}
    return system.http.post(f"{system.api_url(system.apis[api])}/v1/responses", json=request, headers=headers)


def key_ttls(client: Client) -> list[int]:
    """Remaining lives, in s, of all keys that callers gave."""
    return [client.ttl(key) for key in client.scan_iter(match="gp:idempotency:*")]


def test_f11_one_key_is_one_job(system: System) -> None:
    """Many at once on two nodes: one id, one entry, one start. Another body under the key is refused, and the key
    outlives the job, its result and its tombstone."""
    with system.client() as client:
        before = client.xinfo_stream(system.keys().queue)["entries-added"]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda n: send(system, "repeat 20 x", "one", api=n % 2), range(AT_ONCE)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert client.xinfo_stream(system.keys().queue)["entries-added"] == before + 1
        state, limits = system.settings.state, system.settings.limits
        longest_s = limits.queue_timeout_seconds + limits.run_timeout_seconds + state.result_ttl_seconds
        assert min(key_ttls(client)) > longest_s + state.tombstone_ttl_seconds
    job = answers[0].json()["id"]
    system.accepted.append(job)

    other = send(system, "repeat 21 x", "one")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert other.headers["x-should-retry"] == "false"

    assert system.ended(job).outputs[0].text == "x" * 20
    assert system.starts(job) == 1
    again = send(system, "repeat 20 x", "one")
    assert (again.json()["id"], again.json()["status"]) == (job, "completed")
    assert send(system, "repeat 20 x", "two").json()["id"] != job
    system.assert_recovered()


def test_f11_callers_choose_no_ids(system: System) -> None:
    """Ids are ours: a request that brings one is refused by name, each time alike, and stores nothing."""
    with system.client() as client:
        before = client.zcard(system.keys().index)
        for _ in range(2):
            answer = send(system, "say x", id="resp_mine")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_parameter", "id")
        assert client.zcard(system.keys().index) == before
    system.assert_recovered()


def test_f11_a_redelivery_is_no_duplicate(system: System) -> None:
    """A keyed job whose worker is killed goes on elsewhere, and a resend meanwhile finds it."""
    sent = send(system, "repeat 60 x", "taken over")
    job = sent.json()["id"]
    system.accepted.append(job)
    wait_until(lambda: system.tokens(job) >= 3, description="three tokens")
    holder = system.holder(system.record(job).rank)
    holder.signal(signal.SIGKILL)
    assert send(system, "repeat 60 x", "taken over", api=1).json()["id"] == job
    record = system.ended(job)
    assert (record.outputs[0].text, record.attempt) == ("x" * 60, 2)
    assert system.starts(job) == 2
    assert send(system, "repeat 60 x", "taken over").json()["id"] == job
    holder.wait()
    holder.start()
    system.await_worker(holder)
    system.assert_recovered()

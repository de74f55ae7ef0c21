"""F06: what a reader of a result sees, at every moment of a job's life and after it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from pool.store.ids import parse_ref
from tests.faults.conftest import StartSystem
from tests.system import System
from tests.waiting import wait_until

RESULT_TTL_S = 3
JOBS = 300
#: A job's statuses in the order in which they may be seen when no worker dies.
ORDER = ("queued", "in_progress", "completed")


def polled(system: System, job: str) -> list[dict[str, Any]]:
    """Every answer of a tight loop of polls, to the job's end."""
    seen: list[dict[str, Any]] = []
    while not seen or seen[-1]["status"] != "completed":
        seen.append(system.poll(job))
    return seen


def check(seen: list[dict[str, Any]]) -> None:
    """Forwards only, and never a success without its text and usage."""
    steps = [ORDER.index(answer["status"]) for answer in seen]
    assert steps == sorted(steps)
    end = seen[-1]
    assert end["output"][0]["content"][0]["text"] == "x"
    assert (end["usage"]["output_tokens"], end["completed_at"] is not None) == (2, True), "a byte and the end token"
    assert all(answer["usage"] is None for answer in seen[:-1])


def test_f06_no_reader_sees_a_success_without_its_result(start_shared_system: StartSystem) -> None:
    """Hundreds of jobs, each polled by two clients in a tight loop; later each id is gone, never queued again. A job
    that waits for longer than a result is kept still runs."""
    system = start_shared_system(workers=1, delay_ms=1, sections={"state": {"result_ttl_seconds": RESULT_TTL_S}})

    def one(_: int) -> str:
        job = system.submit("say x")
        twin = readers.submit(polled, system, job)
        check(polled(system, job))
        check(twin.result())
        return job

    with ThreadPoolExecutor(2) as writers, ThreadPoolExecutor(2) as readers:
        ended = list(writers.map(one, range(JOBS)))

    system.workers[0].terminate()
    waiting = system.submit("say x")
    submitted_s = time.monotonic()
    answers: list[httpx.Response] = []

    def expired() -> bool:
        answers.append(system.http.get(f"{system.api_url(system.apis[0])}/v1/responses/{ended[-1]}"))
        return answers[-1].status_code == 410

    wait_until(expired, description="the result to expire", timeout_s=RESULT_TTL_S + 10)
    assert {answer.status_code for answer in answers[:-1]} <= {200}
    assert all(answer.json()["status"] == "completed" for answer in answers[:-1])
    assert answers[-1].json()["error"]["code"] == "expired"
    unknown = f"resp_scripted.0_{'5' * 32}"
    never = system.http.get(f"{system.api_url(system.apis[0])}/v1/responses/{unknown}")
    assert (never.status_code, never.json()["error"]["code"]) == (404, "not_found")

    over_s = submitted_s + RESULT_TTL_S + 1
    wait_until(lambda: time.monotonic() > over_s, description="longer than a result is kept", timeout_s=30)
    ref = parse_ref(waiting)
    with system.client() as client:
        assert client.ttl(system.keys().job(ref.token)) == -1
    assert system.poll(waiting)["status"] == "queued"
    system.workers[0].start()
    assert system.ended(waiting).outputs[0].text == "x"
    with system.client() as client:
        assert 0 < client.ttl(system.keys().job(ref.token)) <= RESULT_TTL_S
    system.accepted.clear()  # their records are gone, as they should be
    system.assert_recovered()

"""F27: the queue's bound is exact under a burst, counts choices, and never stops those who only look or cancel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from pool.rules import jobs
from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

BURST = 20
#: One running and five waiting.
BOUND = 6


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """One worker with one place."""
    return start_shared_system(
        workers=1,
        delay_ms=10,
        sections={"limits": {"pending_per_model": BOUND}},
        models={SCRIPTED: {"target_inflight": 1}},
    )


@contextmanager
def occupied(system: System) -> Iterator[None]:
    """The one place is taken for the time of the block, then given free by a cancel: that is never limited."""
    job = system.submit_running("repeat 9000 x", tokens=1)
    try:
        yield
    finally:
        answer = system.http.post(f"{system.api_url(system.apis[0])}/v1/responses/{job}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")


RESPONSES = "/v1/responses", {"input": "repeat 5 x"}
CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "repeat 5 x"}]}


def burst(system: System, pool: ThreadPoolExecutor, door: tuple[str, dict[str, Any]], **more: Any) -> list[Any]:
    """As many requests at once; their futures give (answer, seconds)."""
    path, body = door

    def one() -> tuple[httpx.Response, float]:
        began_s = time.monotonic()
        answer = system.http.post(system.api_url(system.apis[0]) + path, json={"model": SCRIPTED, **body, **more})
        return answer, time.monotonic() - began_s

    return [pool.submit(one) for _ in range(BURST)]


def check_refusals(answers: list[tuple[httpx.Response, float]]) -> None:
    """429 with a time to come back, in the one shape of errors, quickly."""
    for answer, taken_s in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "executor_queue_full")
        assert answer.headers["retry-after"].isdecimal() and int(answer.headers["retry-after"]) >= 1
        assert "id" not in answer.json()
        assert taken_s < 2  # 0.2 s on a machine of its own


def split(found: list[tuple[httpx.Response, float]]) -> tuple[list[str], list[tuple[httpx.Response, float]]]:
    """Ids of the accepted, and the refusals."""
    accepted = [answer.json()["id"] for answer, _ in found if answer.status_code == 200]
    return accepted, [each for each in found if each[0].status_code != 200]


def test_f27_a_burst_of_submits_fills_the_bound_exactly(system: System) -> None:
    """What fits is accepted and ends; the rest is refused at once and leaves no key behind. Polls and probes work all
    the while."""
    with system.client() as client, ThreadPoolExecutor(BURST) as pool:
        with occupied(system):
            before = client.dbsize()
            found = [each.result() for each in burst(system, pool, RESPONSES, background=True)]
            accepted, refused = split(found)
            assert (len(accepted), len(refused)) == (BOUND - 1, BURST - (BOUND - 1))
            check_refusals(refused)
            assert client.zcard(system.keys().index) == BOUND
            after = client.dbsize()
            refusal = burst(system, pool, RESPONSES, background=True)
            check_refusals([each.result() for each in refusal])
            assert client.dbsize() == after > before
            assert system.http.get(f"{system.api_url(system.apis[0])}/healthz").status_code == 200
            assert all(system.poll(job)["status"] == "queued" for job in accepted)
        assert all(system.ended(job).state == jobs.COMPLETED for job in accepted)
    system.accepted += accepted
    system.assert_recovered()


@pytest.mark.parametrize(("door", "n", "fit"), [(RESPONSES, 1, 5), (CHAT, 1, 5), (CHAT, 3, 1)])
def test_f27_waiting_requests_and_choices_count(
    system: System, door: tuple[str, dict[str, Any]], n: int, fit: int
) -> None:
    """A burst of synchronous requests: as many as their choices fit wait and are answered, the rest is refused at
    once."""
    more = {"n": n} if n > 1 else {}
    with ThreadPoolExecutor(BURST) as pool:
        with occupied(system), system.client() as client:
            futures = burst(system, pool, door, **more)
            wait_until(lambda: sum(each.done() for each in futures) == BURST - fit, description="the refusals")
            check_refusals([each.result() for each in futures if each.done()])
            assert client.zcard(system.keys().index) == 1 + fit * n
        answered, _ = split([each.result() for each in futures])
    assert len(answered) == fit
    system.assert_recovered()

"""F21: a cancel is durable and may be repeated; against a completion, one of the two wins, wholly."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pool.store.ids import new_ref
from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, System
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """One worker, 5 ms a token."""
    return start_shared_system(workers=1, delay_ms=5)


def cancel(system: System, job: str) -> tuple[int, dict[str, Any]]:
    """Status and body of POST .../cancel."""
    answer = system.http.post(f"{system.api_url(system.apis[0])}/v1/responses/{job}/cancel")
    return answer.status_code, answer.json()


def test_f21_a_cancel_outlives_the_workers_absence(system: System) -> None:
    """Cancelled while no worker was there: never started by the one that comes. 100 repeats change nothing."""
    (worker,) = system.workers
    assert worker.terminate() == 0
    job, kept = system.submit("repeat 5 x"), system.submit("repeat 5 y")
    first = cancel(system, job)
    assert (first[0], first[1]["status"]) == (200, "cancelled")
    worker.start()
    assert system.ended(kept).outputs[0].text == "y" * 5
    assert all(cancel(system, job) == first for _ in range(100))
    assert system.starts(job) == 0
    assert system.record(job).attempt == 0
    system.await_worker(worker)
    system.assert_recovered()


def test_f21_what_has_ended_stays_as_it_ended(system: System) -> None:
    """A completed job is not cancellable and stays completed; an id that was never issued is unknown."""
    job = system.submit("say done")
    system.ended(job)
    before = system.poll(job)
    status, body = cancel(system, job)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert system.poll(job) == before
    assert before["status"] == "completed"
    assert cancel(system, str(new_ref("responses", SCRIPTED)))[0] == 404
    system.assert_recovered()


def test_f21_a_running_job_stops_and_its_slot_is_free(system: System) -> None:
    """The worker drops it within a step or so: it makes no more tokens, and holds nothing."""
    job = system.submit("repeat 60000 x", max_output_tokens=60_000)

    def in_flight() -> list[int]:
        return [rank.facts["runtime_inflight"] for rank in system.ranks()]

    wait_until(lambda: system.tokens(job) > 5 and in_flight() == [1], description="a running job")
    assert cancel(system, job)[0] == 200
    wait_until(lambda: in_flight() == [0], description="an empty worker")
    made = system.tokens(job)
    system.assert_recovered()
    assert system.tokens(job) == made
    assert system.poll(job)["status"] == "cancelled"


def test_f21_at_the_instant_of_completion_exactly_one_wins(system: System) -> None:
    """100 cancels that come ever closer to the completion, from both sides: each job is what its cancel was told, has
    its result exactly if it completed, and stays so."""
    told: dict[str, str] = {}
    wait_s = 0.03
    for _ in range(100):
        job = system.submit("say x")
        time.sleep(wait_s)  # the instant itself, not a wait for something
        status, _body = cancel(system, job)
        assert status in (200, 400)
        told[job] = "cancelled" if status == 200 else "completed"
        wait_s = max(0.0, wait_s + (0.001 if status == 200 else -0.001))
    assert set(told.values()) == {"cancelled", "completed"}, "both must have happened, or nothing was shown"
    system.assert_recovered()
    for job, outcome in told.items():
        record = system.record(job)
        assert record.state == outcome
        assert [output.text for output in record.outputs] == (["x"] if outcome == "completed" else [])
        assert record.attempt <= 1

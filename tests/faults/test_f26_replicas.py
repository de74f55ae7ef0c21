"""F26 and replicas: no worker hoards work, whoever is free takes it, and workers come and go at any time."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pool.rules.model_states import WAITING
from pool.store.keys import GROUP
from pool.store.ranks import RankRegistry
from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, Part, System
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def shared(start_shared_system: StartSystem) -> System:
    """No worker yet; 10 ms a token, leases of 2 s."""
    worker = {"lease_seconds": 2, "renew_seconds": 0.4}
    return start_shared_system(workers=0, sections={"worker": worker}, delay_ms=10)


@pytest.fixture
def system(shared: System) -> System:
    """The same without the last test's workers, who leave."""
    left = [part for part in shared.workers if part.alive]
    for part in left:
        part.signal(signal.SIGTERM)
    for part in left:
        part.wait()
    shared.workers = []
    return shared


def start(system: System, *slots: int, wait: bool = True, **env: str) -> list[Part]:
    """More workers, of so many generations each."""
    parts = []
    for each in slots:
        parts.append(system.worker_part(len(system.workers), "", "-c", str(each)))
        system.workers.append(parts[-1])
    for part in parts:
        part.env |= env
        part.start()
    for part in parts if wait else ():
        system.await_worker(part)
    return parts


def in_hand(system: System) -> dict[str, int]:
    """Entries in each worker's hands, begun or not."""
    with system.client() as client:
        if not client.exists(system.keys().queue):
            return {}
        return {each["name"].decode(): each["pending"] for each in client.xinfo_consumers(system.keys().queue, GROUP)}


@contextmanager
def most_in_hand(system: System) -> Iterator[Counter[str]]:
    """The most that each worker ever had in its hands within the block, as far as that is seen."""
    most: Counter[str] = Counter()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            for name, count in in_hand(system).items():
                most[name] = max(most[name], count)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield most
    finally:
        over.set()
        looking.join()


def row(system: System) -> dict[str, Any]:
    """The model's row, with those of its replicas."""
    answer = system.http.get(f"{system.api_url(system.apis[0])}/v1/admin/models?ranks=1").json()
    found: dict[str, Any] = next(each for each in answer["data"] if each["id"] == SCRIPTED)
    return found


def test_f26_a_worker_that_comes_late_finds_work(system: System) -> None:
    """Ten jobs, a worker of two slots, then another: each has at most two in its hands, whatever waits, and the second
    runs its part. Nothing starts twice."""
    start(system, 2)
    with most_in_hand(system) as most:
        jobs = [system.submit("repeat 60 x") for _ in range(10)]
        wait_until(lambda: row(system)["runtime_inflight"] == 2, description="both slots to be taken")
        assert row(system)["queue_depth"] == 8
        start(system, 2)
        ranks = Counter(system.ended(job).rank for job in jobs)
    assert len(ranks) == 2
    assert most and max(most.values()) == 2
    assert [system.starts(job) for job in jobs] == [1] * 10
    system.assert_recovered()


def test_unequal_workers_fill_evenly(system: System) -> None:
    """Six slots and two: of four long jobs three are where there are three times as many slots, whoever has waited for
    longest."""
    start(system, 6, 2)
    jobs = []
    for _ in range(4):
        system.await_readers(2)
        jobs.append(system.submit_running("repeat 5000 x", max_output_tokens=5000))
    held = {each["effective_target_inflight"]: in_hand(system)[each["rank"]] for each in row(system)["ranks"]}
    assert held == {6: 3, 2: 1}
    for job in jobs:
        system.jobs.cancel(job)
    system.assert_recovered()


def test_three_workers_share_mixed_work_and_outlive_one_of_them(system: System) -> None:
    """Jobs of very different lengths. One worker is killed, another told to leave, a fresh one comes: each job ends
    once and whole, and nobody ever has more in its hands than it has slots."""
    doomed, leaving, _ = start(system, 3, 3, 3)
    with most_in_hand(system) as most:
        lengths = [5, 200, 20, 60] * 9
        jobs = [system.submit(f"repeat {length} x", max_output_tokens=length + 1) for length in lengths]
        wait_until(lambda: row(system)["runtime_inflight"] == 9, description="all slots to be taken")
        victims = [job for job in jobs if system.record(job).rank.startswith(f"{doomed.name}@")]
        doomed.kill()
        leaving.signal(signal.SIGTERM)
        start(system, 3)
        for job, length in zip(jobs, lengths, strict=True):
            assert system.ended(job, timeout_s=60).outputs[0].text == "x" * length
    assert victims
    assert max(most.values()) <= 3
    assert leaving.wait() == 0
    system.assert_recovered()


def test_a_worker_does_not_run_more_than_its_engine_can(system: System) -> None:
    """Configured are eight, `-c` says four, the engine can do one: one at a time, and all of that is told."""
    start(system, 4, SCRIPTED_SESSIONS="1")
    jobs = [system.submit("repeat 100 x") for _ in range(4)]
    wait_until(lambda: row(system)["runtime_inflight"] == 1, description="a job to run")
    found = row(system)
    assert (found["configured_target_inflight"], found["effective_target_inflight"]) == (8, 1)
    assert (found["runtime_inflight"], found["queue_depth"], found["loaded_replicas"]) == (1, 3, 1)
    (rank,) = found["ranks"]
    assert (rank["configured_target_inflight"], rank["effective_target_inflight"]) == (8, 1)
    assert sum(in_hand(system).values()) == 1
    for job in jobs:
        system.jobs.cancel(job)
    system.assert_recovered()


def test_one_worker_too_many_waits_for_a_place(start_system: StartSystem) -> None:
    """It holds no model and reads nothing, until another one has left or died; then it serves."""
    small = start_system(
        workers=0,
        sections={"worker": {"lease_seconds": 2, "renew_seconds": 0.4}},
        models={SCRIPTED: {"replica_max": 1}},
        delay_ms=1,
    )
    (first,) = start(small, 1)
    (spare,) = start(small, 1, wait=False)

    def states() -> dict[str, str]:
        with small.client() as client:
            return {rank.id.partition("@")[0]: rank.state for rank in RankRegistry(client, SCRIPTED).present()}

    wait_until(lambda: states().get(spare.name) == WAITING, description="the spare one to wait", timeout_s=30)
    assert row(small)["loaded_replicas"] == 1
    first.kill()
    job = small.submit("say x")
    assert small.ended(job).rank.startswith(f"{spare.name}@")
    small.assert_recovered()

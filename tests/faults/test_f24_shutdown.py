"""F24: workers that are told to leave finish what fits, give back the rest, and no job is the worse for it."""

from __future__ import annotations

import signal

import pytest

from pool.store.keys import GROUP
from tests.faults.conftest import StartSystem
from tests.system import Part, System
from tests.waiting import wait_until

GRACE_S = 3.0
#: Longer than any test waits for what must not depend on it.
LEASE_S = 20.0


@pytest.fixture(scope="module")
def shared(start_shared_system: StartSystem) -> System:
    """No worker yet; 20 ms a token."""
    return start_shared_system(
        workers=0,
        sections={"worker": {"lease_seconds": LEASE_S, "renew_seconds": 0.5, "drain_grace_seconds": GRACE_S}},
        delay_ms=20,
    )


@pytest.fixture
def system(shared: System) -> System:
    """The same without the last test's workers, who leave the registry."""
    left = [part for part in shared.workers if part.alive]
    for part in left:
        part.signal(signal.SIGTERM)
    for part in left:
        part.wait()
    shared.workers = []
    return shared


def workers(system: System, count: int, limit: int, *, grace_s: float = GRACE_S) -> list[Part]:
    """More workers of `limit` generations each, serving."""
    parts = [system.worker_part(len(system.workers) + number, "", "-c", str(limit)) for number in range(count)]
    system.workers += parts
    for part in parts:
        part.env["GENPOOL_WORKER__DRAIN_GRACE_SECONDS"] = str(grace_s)
        part.start()
    for part in parts:
        system.await_worker(part)
    return parts


def pending(system: System) -> int:
    """Entries in any worker's hands."""
    with system.client() as client:
        return int(client.xpending(system.keys().queue, GROUP)["pending"])


def test_f24_a_leaving_worker_finishes_and_leaves_nothing_in_its_hands(system: System) -> None:
    """SIGTERM with one job running and four queued: it has read no more than it runs, ends that one within the grace,
    exits 0 with nothing pending, and the next worker runs the other four. Everything starts once."""
    (leaving,) = workers(system, 1, 1)
    running = system.submit_running("repeat 60 x")
    queued = [system.submit("repeat 5 y") for _ in range(4)]
    assert pending(system) == 1
    assert leaving.terminate(GRACE_S + 10) == 0
    assert pending(system) == 0
    assert (system.record(running).state, system.record(running).attempt) == ("completed", 1)
    assert [system.record(job).state for job in queued] == ["queued"] * 4
    assert system.ranks() == []
    leaving.start()
    for job in queued:
        assert system.ended(job).outputs[0].text == "y" * 5
    assert [system.starts(job) for job in (running, *queued)] == [1] * 5
    assert [system.record(job).attempt for job in queued] == [1] * 4
    system.await_worker(leaving)
    system.assert_recovered()


def test_f24_what_was_read_and_not_begun_is_given_back_at_once(system: System) -> None:
    """A job that may only run alone waits in a busy worker. SIGTERM: another worker begins it long before its lease
    would have run out, while the first still finishes its own; it costs the job nothing."""
    (leaving,) = workers(system, 1, 2, grace_s=60)
    running = system.submit_running("repeat 9000 x", max_output_tokens=9001)
    leaving.pause()
    suspect = system.submit("repeat 5 y")
    with system.client() as client:
        # As if it had lost two workers in a row.
        client.hset(system.keys().job(suspect.rpartition("_")[2]), mapping={"crashes": 2, "suspect": 1})
    leaving.resume()
    wait_until(lambda: pending(system) == 2, description="the suspect to be read")
    workers(system, 1, 2)
    leaving.signal(signal.SIGTERM)
    assert system.ended(suspect, timeout_s=LEASE_S / 2).outputs[0].text == "y" * 5
    assert (system.record(suspect).attempt, system.fact(suspect, "losses")) == (1, "")
    assert (leaving.alive, system.record(running).state) == (True, "running")
    system.jobs.cancel(running)
    assert leaving.wait() == 0
    system.assert_recovered()


def test_three_deploys_in_a_row_poison_nobody(system: System) -> None:
    """All workers are told to leave with a grace too short for what they run, and replaced, three times over. Jobs of
    several choices, running and queued, go on from hand to hand: none counts a loss, all end whole."""
    workers(system, 2, 3, grace_s=0.1)
    jobs = [system.submit_choices("repeat 100 x", 2) for _ in range(4)]
    for _ in range(3):
        for part in system.workers:
            system.await_worker(part)
        wait_until(lambda: any(system.record(job).state == "running" for job in jobs), description="running jobs")
        for part in system.workers:
            part.signal(signal.SIGTERM)
        assert [part.wait(20) for part in system.workers] == [0, 0]
        assert pending(system) == 0
        assert all(system.record(job).state == "queued" for job in jobs)
        for part in system.workers:
            part.start()
    for job in jobs:
        record = system.ended(job)
        assert [output.text for output in record.outputs] == ["x" * 100] * 2
        assert (system.fact(job, "losses"), system.fact(job, "crashes") or "0") == ("", "0")
    assert max(system.record(job).attempt for job in jobs) > 3
    for part in system.workers:
        system.await_worker(part)
    system.assert_recovered()

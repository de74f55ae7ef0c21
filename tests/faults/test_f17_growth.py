"""F17: nothing grows with the jobs that have passed, and nothing unread is trimmed away."""

from __future__ import annotations

import pytest

from pool.store.connection import Client
from pool.store.keys import GROUP
from tests.builders import as_if_ranks_waited
from tests.conftest import leaking
from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, Part, System
from tests.waiting import wait_until

JOBS = 300
LEASE_S = 1.5


@pytest.fixture
def system(start_system: StartSystem) -> System:
    """Room for 300 jobs, and no worker."""
    return start_system(
        workers=0,
        sections={
            "worker": {"lease_seconds": LEASE_S, "renew_seconds": 0.4},
            "limits": {"pending_per_model": JOBS},
        },
        delay_ms=1,
    )


def test_f17_three_hundred_jobs_leave_only_what_expires(system: System) -> None:
    """300 jobs queued while no worker is there all run when one comes, and leave an empty stream and records with a
    TTL. An entry that somebody deletes from under its reader does not strand its job. The consumers of a worker killed
    with a job, and of a reader that never came back, do not outlive them for long."""
    worker, later = system.worker_part(0), system.worker_part(1)
    system.workers = [worker, later]
    jobs = [system.submit("say x") for _ in range(JOBS)]
    with system.client() as client:
        assert client.zcard(system.keys().lanes["backlog"]) == JOBS
        worker.start()
        for job in reversed(jobs):
            assert system.ended(job).outputs[0].text == "x"
        assert [system.starts(job) for job in jobs[::30]] == [1] * 10
        assert client.xlen(system.keys().queue) == 0
        assert leaking(client) == []
        assert all(client.ttl(system.keys().job(job.rpartition("_")[2])) > 0 for job in jobs[::30])
        _assert_a_deleted_entry_strands_no_job(system, client, worker)
        lost = system.submit_running("repeat 500 x")
        worker.kill()
        later.start()
        system.await_worker(later)
        (rank,) = [rank.id.encode() for rank in system.ranks() if rank.pid == later.pid]
        assert system.ended(lost).outputs[0].text == "x" * 500
        wait_until(lambda: consumers(system, client) == {rank}, description="the others to go", timeout_s=20)
    system.assert_recovered()


def _assert_a_deleted_entry_strands_no_job(system: System, client: Client, worker: Part) -> None:
    """XDEL of the pending entry of a running job, and of one that its reader never began."""
    running = system.submit_running("repeat 400 x")
    client.xdel(system.keys().queue, system.fact(running, "entry"))
    assert system.ended(running).outputs[0].text == "x" * 400
    worker.pause()
    wait_until(lambda: not client.info("clients")["blocked_clients"], description="its read to end")
    as_if_ranks_waited(client, model=SCRIPTED)
    unbegun = system.submit("say y")
    ((_, ((entry, _),)),) = client.xreadgroup(GROUP, "a-dead-reader", {system.keys().queue: ">"}, count=1)
    assert client.xdel(system.keys().queue, entry) == 1
    client.delete(system.keys().hungry)
    worker.resume()
    assert system.ended(unbegun).outputs[0].text == "y"
    assert [system.record(job).attempt for job in (running, unbegun)] == [1, 1]


def consumers(system: System, client: Client) -> set[bytes]:
    """Names of the group's consumers."""
    return {found["name"] for found in client.xinfo_consumers(system.keys().queue, GROUP)}

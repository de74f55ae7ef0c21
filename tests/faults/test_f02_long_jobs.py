"""F02: work that takes longer than a lease is not run twice, whether it runs or waits inside its worker."""

from __future__ import annotations

import time

from pool.store.keys import GROUP
from tests.faults.conftest import StartSystem
from tests.waiting import wait_until

LEASE_S = 1.5
N = 2


def test_f02_live_work_is_never_taken_for_lost(start_system: StartSystem) -> None:
    """Two jobs of two choices fill one worker twice over: the second waits in it for more than a lease before it
    starts, and then runs for longer than one. Each is begun once and every choice started once; all the time their
    entries are the worker's, young, and delivered once, though another worker is idle."""
    system = start_system(workers=0, sections={"worker": {"lease_seconds": LEASE_S, "renew_seconds": 0.4}}, delay_ms=30)
    jobs = [system.submit_choices("repeat 80 x", N), system.submit_choices("repeat 60 x", N)]
    system.workers = [system.worker_part(number, "", "-c", str(N)) for number in range(2)]
    first, second = system.workers
    first.start()
    wait_until(lambda: all(system.record(job).state == "running" for job in jobs), description="both", timeout_s=30)
    rank = system.record(jobs[0]).rank
    assert {system.record(job).rank for job in jobs} == {rank}
    began_s = time.monotonic()
    second.start()
    waited = 0.0
    with system.client() as client:
        while not all(system.record(job).terminal for job in jobs):
            for pending in client.xpending_range(system.keys().queue, GROUP, "-", "+", 10):
                assert pending["consumer"].decode() == rank
                assert pending["times_delivered"] == 1
                assert pending["time_since_delivered"] < LEASE_S * 1000
            if not system.tokens(jobs[1]):
                waited = time.monotonic() - began_s
            time.sleep(0.1)
    assert waited > LEASE_S, "the second job must have waited longer than a lease, or nothing was shown"
    assert time.monotonic() - began_s > waited + LEASE_S
    for job, count in zip(jobs, (80, 60), strict=True):
        record = system.record(job)
        assert [output.text for output in record.outputs] == ["x" * count] * N
        assert (record.attempt, system.starts(job), system.fact(job, "losses")) == (1, N, "")
    system.await_worker(second)
    system.assert_recovered()

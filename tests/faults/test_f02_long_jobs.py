"""F02: work that takes longer than a lease is not run twice, whether it runs or waits inside its worker."""

from __future__ import annotations

import time

from pool.store.keys import GROUP
from tests.faults.conftest import StartSystem
from tests.waiting import wait_until

LEASE_S = 1.5
SLOTS = 2
CHOICES = 2 * SLOTS


def test_f02_live_work_is_never_taken_for_lost(start_system: StartSystem) -> None:
    """One job of four choices fills its worker twice over: two of them wait in it for more than a lease before they
    start, and then run for longer than one. The job is begun once and every choice started once; all the time its
    entry is the worker's, young, and delivered once, though another worker is idle."""
    system = start_system(workers=0, sections={"worker": {"lease_seconds": LEASE_S, "renew_seconds": 0.4}}, delay_ms=30)
    job = system.submit_choices("repeat 80 x", CHOICES)
    system.workers = [system.worker_part(number, "", "-c", str(SLOTS)) for number in range(2)]
    first, second = system.workers
    first.start()
    wait_until(lambda: system.record(job).state == "running", description="it to run", timeout_s=30)
    rank = system.record(job).rank
    began_s = time.monotonic()
    second.start()
    waited = 0.0
    with system.client() as client:
        while not system.record(job).terminal:
            for pending in client.xpending_range(system.keys().queue, GROUP, "-", "+", 10):
                assert pending["consumer"].decode() == rank
                assert pending["times_delivered"] == 1
                assert pending["time_since_delivered"] < LEASE_S * 1000
            if system.starts(job) <= SLOTS:
                waited = time.monotonic() - began_s
            time.sleep(0.1)
    assert waited > LEASE_S, "two choices must have waited longer than a lease, or nothing was shown"
    assert time.monotonic() - began_s > waited + LEASE_S
    record = system.record(job)
    assert [output.text for output in record.outputs] == ["x" * 80] * CHOICES
    assert (record.attempt, record.rank, system.starts(job), system.fact(job, "losses")) == (1, rank, CHOICES, "")
    system.await_worker(second)
    system.assert_recovered()

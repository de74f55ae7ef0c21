"""A worker's connection breaks after the state server has done what was asked, and before the worker hears of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool.store.scripts import script
from tests.faults.conftest import StartSystem
from tests.faults.lossy_link import Loss, LossyLink
from tests.system import System
from tests.waiting import wait_until

#: Longer than any test waits: what a lost reply leaves behind must not wait for a lease to run out.
LEASE_S = 30.0


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """A system whose only worker is still to come."""
    return start_shared_system(
        workers=0,
        sections={"worker": {"lease_seconds": LEASE_S, "renew_seconds": 0.4, "flush_idle_ms": 50}},
        delay_ms=20,
    )


@pytest.fixture(scope="module")
def link(system: System) -> Iterator[LossyLink]:
    """The worker's link to the state server; every verb is known there."""
    link = LossyLink(system.port)
    worker = system.worker_part(0, link.url)
    system.workers.append(worker)
    worker.start()
    system.await_worker(worker)
    system.ended(system.submit("repeat 60 x"))
    yield link
    link.close()


def reply_of(verb: str) -> Loss:
    """The next reply of this verb."""
    return Loss(script(verb).sha.encode())


@pytest.mark.parametrize(
    "loss",
    [Loss(b"XREADGROUP", b"job"), *map(reply_of, ("begin", "append", "complete", "renew"))],
    ids=["read", "begin", "append", "complete", "renew"],
)
def test_a_lost_reply_costs_no_job_anything(system: System, link: LossyLink, loss: Loss) -> None:
    """Whichever reply the worker does not get, each job is begun once, runs once, and ends whole; none counts as lost
    by its worker."""
    link.arm(loss)
    jobs = [system.submit(f"repeat {count} x") for count in range(40, 44)]
    wait_until(lambda: link.lost, description="the reply to be lost")
    for count, job in zip(range(40, 44), jobs, strict=True):
        record = system.ended(job, timeout_s=LEASE_S / 2)
        assert (record.state, record.outputs[0].text) == ("completed", "x" * count)
        assert (record.attempt, system.starts(job)) == (1, 1)
        assert system.fact(job, "losses") == ""
    system.assert_recovered()


def test_a_worker_that_leaves_gives_back_what_it_could_not_begin(system: System, link: LossyLink) -> None:
    """The server says that the job runs, but no reply to `begin` ever reached its worker. SIGTERM: the job is queued
    again when the worker has left, at no cost, and the next one runs it as its second attempt."""
    link.arm(Loss(reply_of("begin").request, always=True))
    job = system.submit("repeat 20 x")
    wait_until(lambda: link.lost >= 2, description="replies to be lost")
    assert system.record(job).state == "running"
    (worker,) = system.workers
    assert worker.terminate() == 0
    assert (system.record(job).state, system.starts(job)) == ("queued", 0)
    link.arm(None)
    worker.start()
    assert system.ended(job).outputs[0].text == "x" * 20
    assert (system.record(job).attempt, system.starts(job), system.fact(job, "losses")) == (2, 1, "")
    system.await_worker(worker)
    system.assert_recovered()

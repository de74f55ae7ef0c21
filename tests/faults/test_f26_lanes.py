"""F26: nobody hoards, and who is urgent waits for a slot, not for a queue."""

from __future__ import annotations

from pool.rules import jobs
from pool.store.keys import GROUP
from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED
from tests.waiting import wait_until

SLOTS = 2
LOW = 10


def test_f26_an_urgent_job_takes_the_next_slot_and_nobody_hoards(start_system: StartSystem) -> None:
    """Ten batch jobs while one of two workers stands still: the other takes two, and two of what it left are the second
    one's as soon as that goes on. Then an interactive job begins before all that wait; they end, too."""
    system = start_system(workers=2, delay_ms=10, models={SCRIPTED: {"target_inflight": SLOTS}})
    most: dict[str, int] = {}

    def held() -> list[str]:
        """Consumers that hold something; the most that each ever held is kept."""
        with system.client() as client:
            consumers = client.xinfo_consumers(system.keys().queue, GROUP)
        for each in consumers:
            name = each["name"].decode()
            most[name] = max(most.get(name, 0), each["pending"])
        return [each["name"].decode() for each in consumers if each["pending"] == SLOTS]

    second = system.workers[1]
    second.pause()
    low = [system.submit("repeat 100 x", lane="batch") for _ in range(LOW)]
    wait_until(lambda: len(held()) == 1, description="the first worker to be full")
    second.resume()
    wait_until(lambda: len(held()) == 2, description="the second worker to be full beside it")
    urgent = system.submit("say x", lane="interactive")
    wait_until(lambda: held() is not None and system.jobs.get(urgent).terminal, description="the urgent job to end")
    record = system.jobs.get(urgent)
    assert record.started_ms is not None
    waited = [job for job in low if (system.jobs.get(job).started_ms or record.started_ms) >= record.started_ms]
    # What each worker may have been about to begin when it came.
    assert len(waited) >= LOW - 3 * SLOTS
    assert {system.ended(job).state for job in (urgent, *low)} == {jobs.COMPLETED}
    held()
    assert max(most.values()) <= SLOTS
    system.assert_recovered()

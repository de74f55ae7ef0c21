"""F04: a job that kills its worker ends, and takes nothing with it."""

from __future__ import annotations

from tests.faults.conftest import StartSystem
from tests.faults.supervising import Supervising
from tests.system import System

CAP = 3
CANARY = "ZQ-CANARY-17"


def test_f04_a_job_that_kills_its_worker_ends_after_its_cap(start_system: StartSystem) -> None:
    """The poison runs in the same batches as jobs before it and behind it, on workers that a supervisor restarts. It is
    begun as often as the cap allows and fails by name, with one dead letter; all others complete, unharmed and whole.
    Its prompt is in no log and in no letter."""
    system = start_system(
        sections={"worker": {"lease_seconds": 1.5, "renew_seconds": 0.4, "max_deliveries": CAP}}, delay_ms=20
    )
    with Supervising(system) as supervising:
        before = [system.submit(f"repeat {count} x") for count in (60, 61)]
        poison = system.submit(f"{CANARY}|crash 0")
        behind = [system.submit(f"repeat {count} x") for count in range(20, 25)]
        failed = system.ended(poison, timeout_s=60)
        for job, count in zip((*before, *behind), (60, 61, *range(20, 25)), strict=True):
            record = system.ended(job)
            assert (record.state, record.outputs[0].text) == ("completed", "x" * count)
        for worker in system.workers:
            system.await_worker(worker)
        # A worker that the poison killed has been restarted; nothing else kills one.
        assert supervising.restarts == failed.attempt == CAP
    assert (failed.state, failed.error_code) == ("failed", "poison")
    answer = system.poll(poison)
    assert (answer["status"], answer["error"]["code"]) == ("failed", "poison")
    _assert_letter(system, poison)
    assert all(CANARY not in part.output() for part in system.parts)
    system.assert_recovered(dead=1)


def _assert_letter(system: System, poison: str) -> None:
    with system.client() as client:
        ((_, letter),) = client.xrange(system.keys().dead)
    assert letter[b"job"].decode() == poison.rpartition("_")[2]
    assert (letter[b"code"], letter[b"losses"]) == (b"poison", str(CAP).encode())
    assert letter[b"rank"].decode() in {rank.id for rank in system.ranks()}
    assert CANARY.encode() not in b"".join(letter.values())

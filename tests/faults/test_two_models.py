"""Two models in one worker process: the job of one that kills the process is not blamed on the other's jobs."""

from __future__ import annotations

from tests.faults.conftest import StartSystem
from tests.faults.supervising import Supervising
from tests.system import SCRIPTED, TINY


def test_a_poisonous_job_takes_no_other_models_jobs_with_it(start_system: StartSystem) -> None:
    """One worker serves both models. A job of one kills it at each try, and is poison after its cap; jobs of the other,
    sent at the same moment and again and again before they show a token, all end well."""
    system = start_system(
        workers=1,
        serves=f"{SCRIPTED},{TINY}",
        sections={"worker": {"lease_seconds": 1.5, "renew_seconds": 0.4, "max_deliveries": 3}},
    )
    with Supervising(system):
        mates: list[str] = []
        poisons: list[str] = []
        for _ in range(2):
            poisons.append(system.submit("crash 0"))
            mates += [system.submit("Tell me more.", model=TINY, max_output_tokens=300) for _ in range(3)]
        for poison in poisons:
            assert system.ended(poison, timeout_s=60).error_code == "poison"
        for mate in mates:
            assert system.ended(mate, timeout_s=60).state in ("completed", "incomplete")
        system.await_worker(system.workers[0])
    system.assert_recovered(dead=2)

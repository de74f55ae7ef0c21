"""Time limits end what nobody runs, and nothing that only has to wait its turn again."""

from __future__ import annotations

from pathlib import Path

from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, TINY, System
from tests.waiting import wait_until

RUN_TIMEOUT_S = 2


def test_jobs_of_a_disabled_model_end_by_their_time_limits(tmp_path: Path) -> None:
    """Only one process is left, and it does not serve the model: it fails the job all the same, and a worker writes the
    Celery result."""
    sections = {
        "limits": {"queue_timeout_seconds": 1},
        "worker": {"lease_seconds": 1.5, "renew_seconds": 0.4},
        "state": {"celery_results": "all"},
    }
    with System(tmp_path, workers=1, serves=TINY, sections=sections) as system, system.client() as client:
        system.state.start()
        system.await_state()
        for sweeper in (*system.apis, *system.workers):
            job = system.submit_choices("say x", 1)
            sweeper.env[f"GENPOOL_MODELS__{SCRIPTED.upper()}__ENABLED"] = "false"
            sweeper.start()
            record = system.ended(job)
            assert (record.state, record.error_code) == ("failed", "queue_timeout")
            if sweeper in system.workers:
                wait_until(lambda: client.zcard(system.keys().outbox) == 0, description="its result")
            sweeper.terminate()


def test_a_deploy_under_a_backlog_costs_no_run_time(start_system: StartSystem) -> None:
    """A job that is handed back waits behind others for longer than its run timeout: it has not run meanwhile, and
    ends whole."""
    system = start_system(
        workers=1,
        delay_ms=20,
        models={SCRIPTED: {"target_inflight": 1}},
        sections={"worker": {"drain_grace_seconds": 0}, "limits": {"run_timeout_seconds": RUN_TIMEOUT_S}},
    )
    (worker,) = system.workers
    first = system.submit_running("repeat 60 x")
    others = [system.submit("repeat 50 y") for _ in range(3)]
    worker.terminate()
    worker.start()
    system.await_worker(worker)
    for job, text in ((first, "x" * 60), *((job, "y" * 50) for job in others)):
        assert system.ended(job).outputs[0].text == text
    record = system.record(first)
    assert record.attempt == 2
    assert record.started_ms is not None and record.finished_ms is not None
    assert record.finished_ms - record.started_ms > 1000 * RUN_TIMEOUT_S, (
        "it did not wait for longer than its run timeout"
    )
    system.assert_recovered()

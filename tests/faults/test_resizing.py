"""How much a running worker does at once follows the catalogue, up and down, and an operator's word besides."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

#: What the engine of the worker can do.
SESSIONS = 5


@pytest.fixture
def system(start_system: StartSystem) -> System:
    """One worker of two slots, whose engine could do five."""
    system = start_system(workers=0, models={SCRIPTED: {"target_inflight": 2}})
    worker = system.worker_part(0)
    worker.env["SCRIPTED_SESSIONS"] = str(SESSIONS)
    system.workers.append(worker)
    worker.start()
    system.await_worker(worker)
    return system


def row(system: System) -> dict[str, Any]:
    """As an admin sees the model."""
    rows = system.http.get(f"{system.api_url(system.apis[0])}/v1/admin/models").json()["data"]
    return next(row for row in rows if row["id"] == SCRIPTED)


def stands(system: System, configured: int, effective: int, inflight: int) -> None:
    """Wait until the row says so."""
    wanted = (configured, effective, inflight)

    def told() -> bool:
        seen = row(system)
        assert seen["loaded_replicas"] == 1
        names = ("configured_target_inflight", "effective_target_inflight", "runtime_inflight")
        return tuple(seen[name] for name in names) == wanted

    wait_until(told, description=f"configured, effective, in flight: {wanted}", timeout_s=30)


def configure(system: System, before: int, after: int) -> None:
    """Have the model's target changed in each file, and read again."""
    for part in (*system.apis, *system.workers):
        file = system.folder / f"{part.name}.toml"
        text = file.read_text().replace(f"target_inflight = {before}\n", f"target_inflight = {after}\n", 1)
        file.write_text(text)
    answer = system.http.post(f"{system.api_url(system.apis[0])}/v1/admin/settings/reload").json()
    assert answer["changed_fields"] == {SCRIPTED: ["target_inflight"]}


def test_a_reloaded_target_counts_at_once(system: System) -> None:
    """More begin up to what the engine can do, and the row tells both numbers. With a lower one what runs goes on, and
    nothing begins before there is room again. `pool_grow` comes on top of whatever is configured."""
    pid = system.workers[0].pid
    jobs = [system.submit("repeat 100000 ab", max_output_tokens=3000) for _ in range(SESSIONS + 3)]
    stands(system, 2, 2, 2)
    configure(system, 2, 64)
    stands(system, 64, SESSIONS, SESSIONS)

    configure(system, 64, 2)
    stands(system, 2, 2, SESSIONS)
    running = [job for job in jobs if system.starts(job)]
    waiting = [job for job in jobs if job not in running]
    assert len(running) == SESSIONS
    for job in running[2:]:
        system.jobs.cancel(job)
    stands(system, 2, 2, 2)
    seen = [system.tokens(job) for job in running[:2]]
    for job, tokens in zip(running[:2], seen, strict=True):
        wait_until(lambda job=job, tokens=tokens: system.tokens(job) >= tokens + 10, description=f"{job} to go on")
    assert not any(map(system.starts, waiting)), "as many run as may"
    system.jobs.cancel(running[0])
    wait_until(lambda: any(map(system.starts, waiting)), description="the next to begin")

    control = Celery(broker=system.url).control
    control.pool_grow(1)
    stands(system, 2, 3, 3)
    configure(system, 2, 3)
    stands(system, 3, 4, 4)
    control.pool_shrink(1)
    stands(system, 3, 3, 4)
    assert system.workers[0].alive and system.workers[0].pid == pid
    for job in jobs:
        if not system.record(job).terminal:
            system.jobs.cancel(job)
    system.assert_recovered()

"""F22: a model is unloaded, loaded and reloaded while it works; each state has a name, nothing is left, memory is back.

UNLOADS=40 in the environment makes it forty rounds (`make unloads`).
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

ROUNDS = int(os.environ.get("UNLOADS", "4"))
RUNNING = WAITING = 50
TEXTS = 60


def ask(system: System, what: str, *, model: str = SCRIPTED, status: int = 0, **body: Any) -> dict[str, Any]:
    """POST an admin's wish; its answer."""
    url = f"{system.api_url(system.apis[0])}/v1/admin/models/{model}/{what}"
    answer = system.http.post(url, json=body)
    assert not status or answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def state(system: System, model: str = SCRIPTED) -> str:
    """As /readyz names it."""
    answer = system.http.get(f"{system.api_url(system.apis[0])}/readyz")
    return str(answer.json()["models"][model])


def refused(system: System, model: str = SCRIPTED) -> tuple[str, str]:
    """The code and x-should-retry of a new request."""
    url = f"{system.api_url(system.apis[0])}/v1/responses"
    answer = system.http.post(url, json={"model": model, "input": "say x", "background": True})
    assert answer.status_code == 409, answer.text
    return answer.json()["error"]["code"], answer.headers["x-should-retry"]


def becomes(system: System, wanted: str, model: str = SCRIPTED) -> None:
    """The model's state, soon."""
    wait_until(lambda: state(system, model) == wanted, description=f"{model} to be {wanted}", timeout_s=30)


@pytest.mark.timeout(120)
def test_f22_unload_with_fifty_running_and_fifty_waiting(start_system: StartSystem) -> None:
    """What runs ends as if nothing were; what waits answers `model_unloading`; nothing comes in from the first instant;
    a load during the drain waits for it, and then the next request is served by the same processes."""
    system = start_system(workers=2, delay_ms=20, models={SCRIPTED: {"target_inflight": RUNNING // 2}})
    pids = {worker.pid for worker in system.workers}
    jobs = [system.submit_choices(f"repeat {TEXTS} ab", 1) for _ in range(RUNNING + WAITING)]
    with system.client() as client:
        leases = system.keys().leases
        wait_until(lambda: client.zcard(leases) == RUNNING, description="a full house", timeout_s=30)
    answer = ask(system, "unload", status=202, drain_timeout_s=60)
    assert (answer["state"], answer["wanted"], answer["changed"]) == ("unloading", "unloaded", True)
    assert refused(system) == ("model_unloading", "false")
    begun = [job for job in jobs if not system.record(job).terminal]
    ended = Counter((record.state, record.error_code) for record in map(system.record, set(jobs) - set(begun)))
    assert (len(begun), ended) == (RUNNING, {("failed", "model_unloading"): WAITING})
    assert ask(system, "load", status=202)["state"] == "unloading"
    assert refused(system) == ("model_unloading", "true")
    assert ask(system, "unload", status=202)["changed"] is True
    assert ask(system, "load", status=202)["wanted"] == "loaded"
    for job in begun:
        record = system.ended(job, timeout_s=60)
        assert (record.state, record.outputs[0].text) == ("completed", "ab" * TEXTS)
    becomes(system, "loaded")
    wait_until(lambda: {rank.pid for rank in system.ranks()} == pids, description="both workers to serve again")
    assert all(system.starts(job) <= 1 for job in jobs)
    system.accepted = [job for job in system.accepted if job in begun]
    system.assert_recovered()

"""F22: a model is unloaded, loaded and reloaded while it works; each state has a name, nothing is left, memory is back.

UNLOADS=40 in the environment makes it forty rounds (`make unloads`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, TINY, System
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

ROUNDS = int(os.environ.get("UNLOADS", "3"))
RUNNING = WAITING = 50
TEXTS = 45
#: For a machine that is busy with other things.
PATIENCE_S = 120.0
KV_BYTES = 64 * 2**20
#: More than an allocator needs for itself, far less than what an engine takes.
SLACK_BYTES = 8 * 2**20


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
    wait_until(lambda: state(system, model) == wanted, description=f"{model} to be {wanted}", timeout_s=PATIENCE_S)


def done(system: System, what: str, model: str = SCRIPTED, **body: Any) -> None:
    """An admin's wish, carried out."""
    assert "error" not in ask(system, what, model=model, **body)
    becomes(system, f"{what}ed", model)


def test_f22_unload_with_fifty_running_and_fifty_waiting(start_system: StartSystem) -> None:
    """What runs ends as if nothing were; what waits answers `model_unloading`; nothing comes in from the first instant;
    a load during the drain waits for it, and then the next request is served by the same processes."""
    system = start_system(workers=2, delay_ms=20, models={SCRIPTED: {"target_inflight": RUNNING // 2}})
    pids = {worker.pid for worker in system.workers}
    jobs = [system.submit_choices(f"repeat {TEXTS} ab", 1) for _ in range(RUNNING + WAITING)]
    with system.client() as client:
        leases = system.keys().leases
        wait_until(lambda: client.zcard(leases) == RUNNING, description="a full house", timeout_s=30)
    answer = ask(system, "unload", status=202, drain_timeout_s=PATIENCE_S)
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
        record = system.ended(job, timeout_s=PATIENCE_S)
        assert (record.state, record.outputs[0].text) == ("completed", "ab" * TEXTS)
    becomes(system, "loaded")
    wait_until(lambda: {rank.pid for rank in system.ranks()} == pids, description="both workers to serve again")
    assert all(system.starts(job) <= 1 for job in jobs)
    system.accepted = [job for job in system.accepted if job in begun]
    system.assert_recovered()


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """One worker that serves the scripted model, whose loads the test may hold up, and a real one."""
    worker = {"stall_timeout_seconds": 5}
    return start_shared_system(
        workers=1,
        serves=f"{SCRIPTED},{TINY}",
        sections={"worker": worker},
        models={TINY: {"kv_budget_bytes": KV_BYTES}},
    )


@pytest.fixture(autouse=True)
def loaded_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test of the shared system begins and ends with both models loaded, and nothing left."""
    if "system" not in request.fixturenames:
        yield
        return
    system: System = request.getfixturevalue("system")
    system.accepted.clear()
    yield
    system.scripted_load.unlink(missing_ok=True)
    system.workers[0].start()
    for model in (SCRIPTED, TINY):
        done(system, "load", model)
    system.accepted = [job for job in system.accepted if system.record(job).error_code != "model_unloading"]
    system.assert_recovered()


def test_f22_a_hung_backend_ends_with_the_time_to_drain(system: System) -> None:
    """The job fails by name with what it has said; the process that cannot let go of its model ends, and then the model
    is unloaded. A new process leaves it so, and takes its other model."""
    said, hung = system.submit_running("repeat 5000 a"), system.submit_running("hang 5", tokens=5)
    ask(system, "unload", status=202, drain_timeout_s=0.3)
    for job in (hung, said):
        record = system.ended(job, timeout_s=PATIENCE_S)
        assert (record.state, record.error_code) == ("failed", "model_unloading")
        assert system.jobs.view(job).entries
    worker = system.workers[0]
    assert worker.wait(PATIENCE_S) == os.EX_TEMPFAIL
    becomes(system, "unloaded")
    worker.start()
    wait_until(lambda: system.ranks(TINY), description="the other model", timeout_s=PATIENCE_S)
    assert state(system) == "unloaded" and refused(system) == ("model_not_loaded", "false")


def test_f22_a_drain_that_takes_too_long_keeps_what_was_said(system: System) -> None:
    """A worker that lives stops in time: its job fails by name, with all tokens that were made, and it goes on."""
    job = system.submit_running("repeat 5000 a", tokens=10)
    pid = system.workers[0].pid
    done(system, "unload", drain_timeout_s=0.2)
    assert system.workers[0].alive and system.workers[0].pid == pid
    record = system.record(job)
    assert (record.state, record.error_code) == ("failed", "model_unloading")
    assert sum(len(entry.token_ids) for entry in system.jobs.view(job).entries) >= 10


def test_f22_a_model_that_loads_is_unloaded(system: System) -> None:
    """As soon as its load lets it go; it never serves. A load that was asked for meanwhile follows."""
    done(system, "unload")
    system.scripted_load.touch()
    assert ask(system, "load")["wanted"] == "loaded"
    becomes(system, "loading")
    waits = system.submit("say x")
    assert ask(system, "unload", status=202, drain_timeout_s=PATIENCE_S)["state"] == "unloading"
    assert system.record(waits).error_code == "model_unloading"
    system.scripted_load.unlink()
    becomes(system, "unloaded")
    assert system.ranks() == []


def test_f22_a_load_that_fails_half_way(system: System) -> None:
    """It says why, leaves nothing, and refuses; the process and its other model go on. Loading again heals it."""
    done(system, "unload")
    system.scripted_load.touch()
    pid = system.workers[0].pid
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(ask, system, "load", status=500, wait=True)
        becomes(system, "loading")
        system.scripted_load.write_text("no memory is left")
        error = loading.result()["error"]
    assert error["code"] == "model_load_failed" and "no memory is left" in error["message"]
    assert state(system) == "failed" and refused(system) == ("model_failed", "false")
    assert system.workers[0].pid == pid and system.ranks(TINY) and not system.ranks()
    system.scripted_load.unlink()
    done(system, "load")
    answer = ask(system, "load", status=200)
    assert (answer["state"], answer["last_error"], answer["changed"]) == ("loaded", None, False)


def test_f22_a_load_that_fails_here_and_dies_there(system: System) -> None:
    """While another replica loads, the model may still come; once that one is dead, it has failed, and says why."""
    other, waits = system.worker_part(1), system.folder / "other.load"
    other.env["SCRIPTED_LOAD"] = str(waits)
    done(system, "unload")
    system.scripted_load.write_text("no memory is left")
    waits.touch()

    def row() -> dict[str, Any]:
        rows = system.http.get(f"{system.api_url(system.apis[0])}/v1/admin/models?ranks=1").json()["data"]
        return next(row for row in rows if row["id"] == SCRIPTED)

    def stand(*wanted: str) -> None:
        def states() -> list[str]:
            return sorted(rank["state"] for rank in row()["ranks"])

        wait_until(lambda: states() == list(wanted), description=f"ranks to be {wanted}", timeout_s=PATIENCE_S)

    try:
        other.start()
        stand("unloaded", "unloaded")
        ask(system, "load", status=202)
        stand("failed", "loading")
        assert state(system) == "loading"
    finally:
        other.kill()
    becomes(system, "failed")
    assert "no memory is left" in row()["last_error"] and refused(system) == ("model_failed", "false")
    system.scripted_load.unlink()
    done(system, "load")


def test_f22_what_cannot_be_loaded_is_refused(system: System) -> None:
    """A model that is not there, a body that is wrong; what was there goes on."""
    for what in ("load", "unload"):
        assert ask(system, what, model="nowhere", status=404)["error"]["code"] == "unknown_model"
        assert ask(system, what, model="..", status=404)
    drains = (-1, True, "1", 86_401)
    for wrong in ({"wait": 1}, {"force": 1}, *({"drain_timeout_s": drain} for drain in drains)):
        error = ask(system, "unload", status=400, **wrong)["error"]
        assert (error["code"], error["param"]) == ("invalid_load_request", next(iter(wrong)))
    assert state(system) == "loaded"


def test_f22_a_restart_is_no_unload(system: System) -> None:
    """Jobs of a model whose worker is killed stay queued, and run when one is back."""
    worker = system.workers[0]
    worker.kill()
    job = system.submit("say x")
    worker.start()
    assert system.ended(job, timeout_s=PATIENCE_S).outputs[0].text == "x"


def test_f22_memory_is_back_after_many_rounds(system: System) -> None:
    """Each round gives the same process a fresh engine, which answers; what it takes is given back each time."""
    worker, taken = system.workers[0], []
    for _ in range(ROUNDS):
        done(system, "unload", TINY)
        taken.append(resident_bytes(worker.pid))
        done(system, "load", TINY)
        answer = system.http.post(
            f"{system.api_url(system.apis[0])}/v1/responses", json={"model": TINY, "input": "x", "max_output_tokens": 1}
        )
        assert answer.status_code == 200, answer.text
    print([round(each / 2**20, 1) for each in taken])
    assert max(taken) - taken[0] < SLACK_BYTES, taken
    assert resident_bytes(worker.pid) - taken[-1] > 0


def test_f22_twenty_at_once(system: System) -> None:
    """Loads and unloads race: each is answered by name, and what was asked last comes true."""

    def wish(number: int) -> int:
        url = f"{system.api_url(system.apis[0])}/v1/admin/models/{SCRIPTED}/{('load', 'unload')[number % 2]}"
        return httpx.post(url, json={"drain_timeout_s": 1} if number % 2 else {}, timeout=PATIENCE_S).status_code

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(wish, range(20)))
    assert set(answers) <= {200, 202}
    done(system, "unload")
    assert not system.ranks()
    done(system, "load")
    assert [rank.pid for rank in system.ranks()] == [system.workers[0].pid]


def resident_bytes(pid: int) -> int:
    """What a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

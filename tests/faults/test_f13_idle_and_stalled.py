"""F13: a minute without work, and a state server that stands still for longer than any lease."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from pool.rules import jobs
from pool.store.connection import connect
from tests.faults.conftest import StartSystem
from tests.faults.gauges import missing
from tests.processes import descendants
from tests.system import SCRIPTED, Part, System
from tests.waiting import wait_until
from workers.intake import BLOCK_MS, reading_client

IDLE_S = 60.0
STALL_S = 15.0
COMPLAINT = re.compile(r"warning|error|critical|traceback|time-?out", re.IGNORECASE)


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """As it is run, with two workers."""
    return start_shared_system(workers=2)


def cpu_s(part: Part) -> float:
    """CPU time of a part's processes so far."""
    ticks = 0
    for pid in (part.pid, *descendants(part.pid)):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_f13_a_blocking_read_outlasts_its_block() -> None:
    """The worker's reading connection waits longer for a reply than the server may take for one."""
    client = reading_client("redis://127.0.0.1:1/0")
    assert client.connection_pool.connection_kwargs["socket_timeout"] * 1000 >= BLOCK_MS + 1000
    assert connect("redis://127.0.0.1:1/0").connection_pool.connection_kwargs["socket_timeout"]


@pytest.mark.timeout(180)
def test_f13_a_minute_without_work_is_silent_and_cheap(system: System) -> None:
    """No error line anywhere, each process under 1 % of a CPU, and then a job starts at once."""
    system.assert_recovered()
    quiet_s = time.monotonic() + 3  # what the last job set going is over
    wait_until(lambda: time.monotonic() > quiet_s, description="the last job's upkeep", timeout_s=5)
    begun = {part.name: (cpu_s(part), len(part.output())) for part in system.parts}
    idle_s = time.monotonic()
    wait_until(lambda: time.monotonic() > idle_s + IDLE_S, description="a minute", timeout_s=IDLE_S + 5, every_s=0.5)
    for part in system.parts:
        used_s, said = begun[part.name]
        share = (cpu_s(part) - used_s) / (time.monotonic() - idle_s)
        assert share < 0.01, f"{part.name} uses {share:.2%} of a CPU"
        assert not COMPLAINT.search(part.output()[said:]), part.output()[said:]
    job = system.submit("say x")
    wait_until(lambda: system.starts(job) == 1, description="the job to start", timeout_s=1)
    system.assert_recovered()


def submit(system: System) -> tuple[httpx.Response, float]:
    """A background submit and how long its answer took."""
    began_s = time.monotonic()
    body = {"model": SCRIPTED, "input": "say x", "background": True}
    answer = system.http.post(f"{system.api_url(system.apis[0])}/v1/responses", json=body)
    return answer, time.monotonic() - began_s


def test_f13_a_stalled_state_server_is_said_and_survived(system: System) -> None:
    """While it stands still: alive at once, not ready, submits refused within 5 s with a time to come back. After it:
    no restart, no job lost, none that was refused, and none run twice."""
    pids = {part.name: {part.pid, *descendants(part.pid)} for part in system.parts}
    lacked = missing(system)
    running = [system.submit("repeat 100 x") for _ in range(2)]
    wait_until(lambda: all(map(system.starts, running)), description="both jobs to run")
    accepted = len(system.accepted)
    url = system.api_url(system.apis[0])
    system.state.pause()
    stalled_s = time.monotonic()
    try:
        with ThreadPoolExecutor(8) as pool:
            while time.monotonic() - stalled_s < STALL_S:
                submits = [pool.submit(submit, system) for _ in range(8)]
                began_s = time.monotonic()
                assert system.http.get(f"{url}/healthz").status_code == 200
                assert time.monotonic() - began_s < 1
                assert any("state server" in thing for thing in missing(system))
                for answer, taken_s in (future.result() for future in submits):
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_unavailable")
                    assert int(answer.headers["retry-after"]) >= 1
                    assert taken_s < 5
    finally:
        system.state.resume()
    system.await_state()
    for job in running:
        record = system.ended(job)
        assert (record.state, record.outputs[0].text, system.starts(job)) == (jobs.COMPLETED, "x" * 100, 1)
    wait_until(lambda: missing(system) == lacked, description="the node to be as ready as before")
    assert {part.name: {part.pid, *descendants(part.pid)} for part in system.parts} == pids
    system.assert_recovered()
    with system.client() as client:
        stored = [client.hget(key, "state") for key in client.scan_iter(match=system.keys().job("*"))]
    refused = len(stored) - accepted - 1  # the fresh job of `assert_recovered`
    assert stored.count(b"cancelled") == refused, "a job whose submit was refused goes nowhere"

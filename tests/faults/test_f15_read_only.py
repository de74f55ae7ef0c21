"""F15: the state server is a replica for a while, as after a failover that is taken back."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from pool.rules import jobs
from tests.faults.conftest import StartSystem
from tests.faults.gauges import missing
from tests.processes import descendants, free_port
from tests.system import SCRIPTED
from tests.waiting import wait_until

READ_ONLY_S = 6.0


def test_f15_workers_outlive_a_read_only_state_server(start_system: StartSystem) -> None:
    """What was computed meanwhile is stored afterwards and not computed again; submits are refused and leave nothing;
    no process ends, and none floods its log."""
    system = start_system(workers=2)
    pids = {part.name: {part.pid, *descendants(part.pid)} for part in system.parts}
    lacked = missing(system)
    job = system.submit("repeat 40 x")
    wait_until(lambda: system.tokens(job) >= 3, description="three tokens")
    said = {part.name: len(part.output()) for part in system.parts}
    url = system.api_url(system.apis[0])
    with system.client() as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            httpx.post, f"{url}/v1/responses", json={"model": SCRIPTED, "input": "repeat 40 y"}, timeout=60
        )
        wait_until(lambda: client.zcard(system.keys().leases) == 2, description="a synchronous job to run as well")
        client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
        read_only_s = time.monotonic()
        before = client.dbsize()
        for _ in range(2):
            body = {"model": SCRIPTED, "input": "say z", "background": True}
            answer = system.http.post(f"{url}/v1/responses", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
            assert "id" not in answer.json()
        assert system.http.get(f"{url}/healthz").status_code == 200
        assert any("state server" in thing for thing in missing(system))
        assert system.poll(job)["status"] == "in_progress"
        wait_until(
            lambda: time.monotonic() - read_only_s > READ_ONLY_S, description="longer than a lease", timeout_s=30
        )
        assert client.dbsize() <= before
        client.execute_command("REPLICAOF", "NO", "ONE")
        answer = waiting.result(timeout=60)
    assert answer.json()["output"][0]["content"][0]["text"] == "y" * 40
    record = system.ended(job)
    assert (record.state, record.outputs[0].text, record.attempt) == (jobs.COMPLETED, "x" * 40, 1)
    assert (system.starts(job), system.starts(answer.json()["id"])) == (1, 1)
    assert {part.name: {part.pid, *descendants(part.pid)} for part in system.parts} == pids
    for part in [*system.workers, *system.apis]:
        lines = part.output()[said[part.name] :].splitlines()
        assert len(lines) < 20 * READ_ONLY_S, "\n".join(lines[:100])
    wait_until(lambda: missing(system) == lacked, description="the node to be as ready as before")
    system.assert_recovered()

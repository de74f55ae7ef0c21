"""Unloading a model pauses its Programs, and ends their requests that wait; loading it resumes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.faults.conftest import StartSystem
from tests.faults.http_agents import events, prompt, send, turn
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

TOKENS = 64


def program(system: System, name: str) -> dict[str, Any]:
    """The Program as the API tells it."""
    answer = system.http.get(f"{system.api_url(system.apis[0])}/v1/programs/{name}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["models"][0]
    return found


def wish(system: System, what: str, **body: Any) -> str:
    """An admin's; the model's state then."""
    url = f"{system.api_url(system.apis[0])}/v1/admin/models/{SCRIPTED}/{what}"
    answer = system.http.post(url, json=body)
    assert answer.status_code in (200, 202), answer.text
    return str(answer.json()["state"])


def test_unloading_pauses_programs_and_loading_resumes_them(start_system: StartSystem) -> None:
    """One that runs ends its request and is paused for that reason, with nothing left of its KV; one that waits is
    refused by name; after the load the same generation goes on."""
    system = start_system(
        workers=1,
        delay_ms=20,
        sections={
            "programs": {
                "enabled": True, "metrics_interval_seconds": 0.2, "max_active_programs_per_target": 1,
                "stats_window_size": 5,
            }
        },
    )  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        turn(system, prompt("a", TOKENS), program_id="a", kv_retention_ttl_seconds=60)
        runs = pool.submit(
            send, system, prompt("a", TOKENS, said=1), output=100, program_id="a", kv_retention_ttl_seconds=60
        )
        wait_until(lambda: program(system, "a")["status"] == "reasoning", description="the first to run")
        waits = pool.submit(send, system, prompt("b", TOKENS), program_id="b")
        wait_until(lambda: _waits(system, "b"), description="the second to wait")
        assert wish(system, "unload", drain_timeout_s=60) == "unloading"
        refused = waits.result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_unloading")
        assert refused.headers["x-should-retry"] == "false"
        answer = runs.result()
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 100
    assert wish(system, "unload", wait=True) == "unloaded"
    found = program(system, "a")
    assert (found["state"], found["generation"], found["completed_requests"]) == ("paused", 0, 2)
    assert [event.reason for event in events(system) if event.what == "pause"][-1] == "model_unloading"
    assert send(system, prompt("a", TOKENS, said=2), program_id="a").json()["error"]["code"] == "model_not_loaded"
    assert wish(system, "load", wait=True) == "loaded"
    record = turn(system, prompt("a", TOKENS, said=2), program_id="a")
    assert record.cached_tokens == 0, "its KV was released"
    found = program(system, "a")
    assert (found["generation"], found["completed_requests"]) == (0, 3)
    system.accepted = [job for job in system.accepted if system.record(job).error_code is None]
    system.assert_recovered()


def _waits(system: System, name: str) -> bool:
    answer = system.http.get(f"{system.api_url(system.apis[0])}/v1/programs/{name}")
    return answer.status_code == 200 and answer.json()["models"][0]["status"] == "reasoning"

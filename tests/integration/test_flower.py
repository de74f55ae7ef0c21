"""Flower, the monitor that Celery users have, shows every generation, and no prompt."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tasks.client import Client
from tasks.payloads import Sampling, TextPrompt
from tests.builders import request
from tests.integration.celery_process import ROOT, Site, Worker
from tests.processes import free_port
from tests.waiting import wait_until

CANARY = "ZQ-CANARY-17"


@pytest.fixture(scope="module")
def flower(site: Site, worker: Worker) -> Iterator[str]:
    """The address of a running Flower that has heard the worker."""
    assert worker.process.poll() is None
    port = free_port()
    command = ["-m", "celery", "-A", "tasks", "flower", "--address=127.0.0.1", f"--port={port}"]
    log = (site.folder / "flower.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=site.env | {"FLOWER_UNAUTHENTICATED_API": "true"},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    address = f"http://127.0.0.1:{port}"
    wait_until(lambda: workers_of(address), description="Flower to hear the worker", timeout_s=60)
    yield address
    process.terminate()
    process.wait(20)
    log.close()


def workers_of(address: str) -> dict[str, Any]:
    """The workers that Flower knows; none while it does not answer."""
    try:
        answer = httpx.get(f"{address}/api/workers", params={"refresh": "1"}, timeout=20)
    except httpx.TransportError:
        return {}
    workers: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
    return workers


def test_flower_lists_every_generation_and_no_prompt(site: Site, flower: str) -> None:
    """Succeeded and cancelled ones with their states, nothing left as started, no prompt or text on any page."""
    jobs = Client(site.settings)
    done = [jobs.submit(request(prompt=TextPrompt(text=CANARY))) for _ in range(10)]
    cancelled = jobs.submit(
        request(prompt=TextPrompt(text=CANARY), max_tokens=1900, sampling=Sampling(temperature=0.0, ignore_eos=True))
    )
    wait_until(lambda: jobs.get(cancelled).logged_tokens > 0, description="the first token")
    jobs.cancel(cancelled)
    expected = dict.fromkeys(done, "SUCCESS") | {cancelled: "REVOKED"}

    def states() -> dict[str, str]:
        tasks = httpx.get(f"{flower}/api/tasks", timeout=20).json()
        return {task: about["state"] for task, about in tasks.items()}

    wait_until(lambda: states() == expected, description="Flower to list every end", timeout_s=30)
    about = httpx.get(f"{flower}/api/task/info/{done[0]}", timeout=20).json()
    assert about["name"] == "genpool.generate"
    assert about["args"] == "()"
    text = jobs.get(done[0]).outputs[0].text
    for path in ("/api/tasks", f"/api/task/info/{done[0]}", "/tasks", f"/task/{done[0]}", "/workers", "/metrics"):
        page = httpx.get(f"{flower}{path}", timeout=20)
        assert page.status_code == 200, path
        assert CANARY not in page.text
        assert text not in page.text
    jobs.close()

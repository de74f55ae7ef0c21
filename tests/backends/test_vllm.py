"""vLLM as a child of a worker: killed, orphaned, and looked at for Programs. Only with `make test-vllm`."""

from __future__ import annotations

import os
import signal
import time

import httpx
import pytest

from tasks.payloads import GenerationRequest, Sampling, TextPrompt
from tests.backends.conftest import SLOTS, VLLM_ONLY, VLLM_START_S
from tests.processes import descendants, is_running
from tests.system import System
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not VLLM_ONLY, reason="make test-vllm")

MODEL, TOKENS = "vllm", 120


def servers_of(system: System) -> dict[int, str]:
    """The processes below the worker."""
    return descendants(system.workers[0].pid)


def submit(system: System) -> str:
    """A greedy generation."""
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    prompt = TextPrompt(text="Once upon a time there was a lighthouse")
    request = GenerationRequest(model=MODEL, prompt=prompt, max_tokens=TOKENS, sampling=sampling)
    return system.jobs.submit(request)


def assert_whole(system: System, job: str) -> None:
    """It has all its tokens, each once."""
    record = system.ended(job, timeout_s=VLLM_START_S)
    assert (record.state, record.outputs[0].tokens) == ("incomplete", TOKENS)
    entries = list(system.jobs.follow(job))
    assert [entry.seq for entry in entries[1:]] == [entry.next_seq for entry in entries[:-1]]
    assert "".join(entry.text for entry in entries) == record.outputs[0].text


def test_jobs_outlast_a_killed_server(every_backend: System) -> None:
    """It is started again, its own children are gone, and the jobs go on behind what they have logged."""
    system = every_backend
    jobs = [submit(system) for _ in range(SLOTS)]
    wait_until(lambda: all(system.record(job).logged_tokens > 10 for job in jobs), description="streams", timeout_s=60)
    before = servers_of(system)
    os.kill(next(pid for pid, line in before.items() if "vllm" in line and "serve" in line), signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, before)), description="all of it to be gone", timeout_s=60)
    for job in jobs:
        assert_whole(system, job)
        assert system.record(job).attempt == 1


def test_a_killed_worker_leaves_no_process(every_backend: System) -> None:
    """Neither its server nor what that has started; another worker goes on."""
    system, worker = every_backend, every_backend.workers[0]
    job = submit(system)
    wait_until(lambda: system.record(job).logged_tokens > 10, description="a stream", timeout_s=60)
    before = servers_of(system)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    wait_until(lambda: not any(map(is_running, before)), description="no process to be left", timeout_s=60)
    worker.start()
    assert_whole(system, job)


def test_its_metrics_have_the_names_that_are_looked_for(every_backend: System) -> None:
    """Running, waiting, and the part of its KV that is in use."""
    from workers.backends.remote_residence import scraped  # noqa: PLC0415

    system = every_backend
    line = next(line for line in servers_of(system).values() if "--port" in line)
    port = line.split("--port ")[1].split()[0]
    job = submit(system)
    wait_until(lambda: system.record(job).logged_tokens > 1, description="a stream", timeout_s=60)
    time.sleep(0.1)
    seen = scraped(httpx.get(f"http://127.0.0.1:{port}/metrics").text, "vllm", None)
    assert seen.running is not None and seen.waiting == 0
    assert seen.kv_usage is not None and 0 <= seen.kv_usage < 1
    assert_whole(system, job)

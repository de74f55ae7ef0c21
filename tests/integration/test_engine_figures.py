"""The figures of a real worker's batching loops: in its heartbeat, on a real node's /metrics, and from `celery inspect
engine`, whatever the engine is doing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tasks.payloads import Sampling, TextPrompt
from tests.builders import request
from tests.system import ROOT, SCRIPTED, TINY, System
from tests.unit.test_telemetry import NAMES
from tests.waiting import wait_until

CANARY = "ZQ-CANARY-17"
#: What a heartbeat may take in the state server.
MOST_BYTES = 4096
JOBS, TOKENS = 4, 6
#: The figures of what has passed; the others are of an instant.
PASSED = (
    "prefill_tokens_total", "decode_tokens_total", "prompt_tokens_total", "prompt_tokens_cached_total",
    "completed_sessions", "cancelled_sessions", "failed_sessions", "preempted_total", "cache_misses_total", "ticks",
)  # fmt: skip

Figures = dict[str, float]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A node, and a worker that serves the scripted engine and the numpy engine. It may hang for long."""
    sections = {"worker": {"lease_seconds": 3, "renew_seconds": 0.5, "stall_timeout_seconds": 100}}
    folder = tmp_path_factory.mktemp("figures")
    with System(folder, workers=1, sections=sections, serves=f"{SCRIPTED},{TINY}") as system:
        system.start()
        yield system


def scraped(system: System, model: str) -> Figures:
    """The model's series of /metrics without prefix and labels but the bucket's bound or the reason."""
    text = system.http.get(f"{system.api_url(system.apis[0])}/metrics").text
    found: Figures = {}
    for name, held, value in re.findall(r"^genpool_engine_(\w+){(.*)} (\S+)$", text, re.MULTILINE):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', held))
        if labels.pop("model") == model:
            assert labels.pop("rank").startswith("worker-0@")
            found[" ".join((name, *labels.values()))] = float(value)
    return found


def beaten(system: System, model: str) -> dict[str, Any]:
    """What the worker's last heartbeat told of the model."""
    (rank,) = system.ranks(model)
    return rank.facts


def node(system: System) -> str:
    """The worker's name, for Celery and as a rank."""
    (rank,) = system.ranks()
    return rank.id


def inspected(system: System, *options: str) -> str:
    """What `celery inspect engine` prints. Asked again while nobody answers: a worker that has just started serves its
    models before it listens to Celery."""
    argv = [sys.executable, "-m", "celery", "-A", "tasks", "inspect", "--timeout", "5", "--destination", node(system)]

    def asked() -> str:
        done = subprocess.run(
            [*argv, *options, "engine"],
            cwd=ROOT,
            env=system.workers[0].env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""

    return wait_until(asked, description="an answer to inspect", timeout_s=60)


def run_jobs(system: System) -> None:
    """JOBS generations of TOKENS tokens on the numpy engine, none of which ends early."""
    prompt, sampling = TextPrompt(text=CANARY), Sampling(temperature=0.0, ignore_eos=True)
    jobs = [
        system.jobs.submit(request(model=TINY, prompt=prompt, max_tokens=TOKENS, sampling=sampling))
        for _ in range(JOBS)
    ]
    for job in jobs:
        wait_until(lambda job=job: system.jobs.get(job).terminal, description="a job to end", timeout_s=30)


def test_all_three_say_the_same_and_it_is_so(system: System) -> None:
    """Sessions, tokens and steps are those that were asked for, and every histogram has as many values as its counter;
    the other model of the same worker is none the wiser. Nothing holds a prompt, and a heartbeat stays small."""
    before, untouched = scraped(system, TINY), scraped(system, SCRIPTED)
    run_jobs(system)
    completed = before["completed_sessions_total"] + JOBS
    wait_until(
        lambda: beaten(system, TINY)["completed_sessions"] == completed,
        description="a heartbeat after the end",
        timeout_s=30,
    )

    after, heartbeat = scraped(system, TINY), beaten(system, TINY)
    (told,) = json.loads(inspected(system, "--json")).values()
    assert after["completed_sessions_total"] == completed
    assert after["decode_tokens_total"] - before["decode_tokens_total"] == JOBS * (TOKENS - 1)
    computed = after["prefill_tokens_total"] - before["prefill_tokens_total"]
    cached = after["prompt_tokens_cached_total"] - before["prompt_tokens_cached_total"]
    assert computed + cached == after["prompt_tokens_total"] - before["prompt_tokens_total"] > JOBS
    assert after["step_seconds_count"] == after["step_seconds_bucket +Inf"] == after["ticks_total"]
    assert after["batch_occupancy_count"] == after["decode_batches_total"] > 0
    assert after["batch_occupancy_sum"] == after["decode_tokens_total"] == after["inter_token_seconds_count"]
    assert after["step_seconds_sum"] > 0
    assert 1 <= after["batch_occupancy_avg"] <= after["batch_occupancy_max"] <= 8
    for histogram in ("step_seconds", "batch_occupancy", "inter_token_seconds"):
        counts = [value for name, value in after.items() if name.startswith(f"{histogram}_bucket ")]
        assert counts == sorted(counts) and len(counts) > 8
    assert (after["active_sessions"], after["kv_total_bytes"], after["scratch_used_bytes"]) == (0, 0, 0)

    assert heartbeat.keys() >= NAMES
    assert {name: told[TINY][name] for name in PASSED} == {name: heartbeat[name] for name in PASSED}
    shown = [after[name if name.endswith("_total") else f"{name}_total"] for name in PASSED]
    assert shown == [heartbeat[name] for name in PASSED]
    assert scraped(system, SCRIPTED)["completed_sessions_total"] == untouched["completed_sessions_total"]
    assert len(json.dumps(heartbeat)) < MOST_BYTES
    assert CANARY not in json.dumps([heartbeat, told])


@pytest.mark.timeout(240)  # it starts two workers and a client, one after another
def test_inspect_answers_while_a_step_hangs_and_a_dead_rank_has_no_series(system: System) -> None:
    """With one entry a model, and in it the session that hangs. After the worker was killed and its
    lease has passed nothing of it is on the page; started again under its name, it counts from nothing."""
    run_jobs(system)
    job = system.submit("hang 3")
    wait_until(lambda: system.tokens(job) == 3, description="the step that hangs", timeout_s=30)
    headline, _, printed = inspected(system).partition("\n")
    assert headline.split() == ["->", f"{node(system)}:", "OK"]
    told = json.loads(printed.rpartition("}")[0] + "}")
    assert told.keys() == {SCRIPTED, TINY}
    for model, figures in told.items():
        assert (figures["model"], figures["state"]) == (model, "loaded")
        assert figures.keys() >= NAMES
    assert (told[SCRIPTED]["active_sessions"], told[TINY]["active_sessions"]) == (1, 0)
    assert told[TINY]["completed_sessions"] >= JOBS
    # Its loop is in the step, and heartbeats go on.
    wait_until(lambda: scraped(system, SCRIPTED)["active_sessions"] == 1, description="it in a heartbeat")

    system.jobs.cancel(job)
    (worker,) = system.workers
    worker.kill()
    wait_until(
        lambda: not scraped(system, TINY) and not scraped(system, SCRIPTED),
        description="its series to go",
        timeout_s=30,
        every_s=0.2,
    )
    worker.start()
    system.await_worker(worker)
    again = scraped(system, TINY)
    assert (again["completed_sessions_total"], again["decode_tokens_total"], again["step_seconds_count"]) == (0, 0, 0)

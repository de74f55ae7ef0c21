"""F38: what /metrics counts is right on every scrape, whichever process answers and whichever has died."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.conftest import StartSystem
from tests.faults.gauges import ask, samples
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

REQUESTS = 40
SCRAPES = 20
MOST_NEW_SERIES = 20
PROCESSES = 4
POSTED = 'genpool_http_request_total{method="POST",status="200"}'
SUBMITTED = f'genpool_jobs_submitted_total{{model="{SCRIPTED}"}}'
LOST = f'genpool_jobs_requeued_total{{model="{SCRIPTED}",reason="lost"}}'


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """A node of four processes, and two workers with leases of 1.5 s."""
    return start_shared_system(
        sections={
            "server": {"processes": PROCESSES},
            "worker": {"lease_seconds": 1.5, "renew_seconds": 0.4},
        },
        delay_ms=10,
    )


def ended(state: str) -> str:
    """The counter of jobs that ended so."""
    return f'genpool_jobs_ended_total{{model="{SCRIPTED}",state="{state}"}}'


def in_flight(system: System) -> list[float]:
    """The gauges of what is under way."""
    found = samples(system)
    of_model = ("genpool_jobs_queued", "genpool_jobs_running", "genpool_oldest_queued_seconds")
    names = [f'{name}{{model="{SCRIPTED}"}}' for name in of_model]
    return [found[name] for name in (*names, "genpool_requests_waiting", "genpool_waiters")]


def processes(system: System) -> list[int]:
    """Process ids of the node's gunicorn workers."""
    pid = system.apis[0].pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_one_process(system: System) -> None:
    """kill -9 of one, and wait for its successor."""
    victim = processes(system)[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(
        lambda: len(processes(system)) == PROCESSES and victim not in processes(system), description="a new process"
    )


def test_f38_forty_requests_are_forty_on_every_scrape(system: System) -> None:
    """Over four processes, also after one of them is killed: requests, submitted jobs, ended jobs and tokens. The
    gauges of what is under way are back at 0, and the waits and runs have as many observations as there were jobs."""
    before = samples(system)
    # As for a moment with each process that starts.
    (folder,) = system.folder.glob("genpool-metrics-*")
    (folder / "counter_0.db").touch()

    def post(_: int) -> int:
        body = {"model": SCRIPTED, "input": "say ab"}
        return system.http.post(f"{system.api_url(system.apis[0])}/v1/responses", json=body).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(post, range(REQUESTS))) == {200}
    names = (
        POSTED,
        SUBMITTED,
        ended("completed"),
        f'genpool_queue_wait_seconds_count{{model="{SCRIPTED}"}}',
        f'genpool_run_seconds_bucket{{le="+Inf",model="{SCRIPTED}"}}',
    )
    tokens = f'genpool_output_tokens_total{{model="{SCRIPTED}"}}'
    for _ in range(2):
        for _ in range(SCRAPES):
            found = samples(system)
            assert [found[name] - before.get(name, 0) for name in names] == [REQUESTS] * len(names)
            # Two characters and the end.
            assert found[tokens] - before[tokens] == 3 * REQUESTS
        kill_one_process(system)
    assert in_flight(system) == [0] * 5
    assert found["genpool_state_up"] == 1
    assert found[f'genpool_ranks{{model="{SCRIPTED}"}}'] == 2
    assert found[f'genpool_slots{{model="{SCRIPTED}"}}'] == 16


def test_f38_a_takeover_is_a_requeue_and_one_end(system: System) -> None:
    """A job whose worker is killed (F01) is submitted once, requeued once as lost, and ends once; one that outlives
    several leases (F02) is not requeued at all."""
    before = samples(system)
    long = system.submit("repeat 200 x")
    victim_job = system.submit("repeat 100 y")
    wait_until(lambda: system.tokens(victim_job) > 3, description="some tokens")
    victim = system.holder(system.record(victim_job).rank)
    rode_along = system.record(long).rank == system.record(victim_job).rank
    victim.kill()
    for job in (long, victim_job):
        assert system.ended(job).state == "completed"
    after = samples(system)
    assert after[LOST] - before[LOST] == 1 + rode_along
    for name in (SUBMITTED, ended("completed")):
        assert after[name] - before[name] == 2
    assert sum(after[ended(state)] - before[ended(state)] for state in ("failed", "cancelled", "incomplete")) == 0
    victim.start()
    system.await_worker(victim)


def test_f38_twenty_disconnects_and_a_killed_process_leave_nothing_waiting(system: System) -> None:
    """Synchronous and streamed requests whose clients go away, and some whose process is killed: all gauges are back at
    0, each job has ended once as cancelled."""
    before = samples(system)
    with contextlib.ExitStack() as open_sockets:
        _leave_twenty(system, before, open_sockets)
    wait_until(lambda: in_flight(system) == [0] * 5, description="all gauges at 0", timeout_s=20)
    after = samples(system)
    assert after[ended("cancelled")] - before[ended("cancelled")] == 20
    assert after[SUBMITTED] - before[SUBMITTED] == 20


def _leave_twenty(system: System, before: dict[str, float], open_sockets: contextlib.ExitStack) -> None:
    sockets = [open_sockets.enter_context(ask(system, input="repeat 2000 x", stream=bool(at % 2))) for at in range(20)]
    running = f'genpool_jobs_running{{model="{SCRIPTED}"}}'
    wait_until(lambda: samples(system)[SUBMITTED] - before[SUBMITTED] == 20, description="20 jobs")
    wait_until(lambda: samples(system)[running] == 16, description="all slots to be taken")
    found = samples(system)
    assert found["genpool_requests_waiting"] == 20
    assert found[f'genpool_jobs_queued{{model="{SCRIPTED}"}}'] == 4
    assert found[f'genpool_oldest_queued_seconds{{model="{SCRIPTED}"}}'] > 0
    for each in sockets[:15]:
        each.close()
    # The killed process's jobs lose their readers only after the orphan grace: they are cancelled by hand.
    kill_one_process(system)
    with system.client() as client:
        for token in client.zrange(system.keys().index, 0, -1):
            job = f"resp_{SCRIPTED}.0_{token.decode()}"
            system.http.post(f"{system.api_url(system.apis[0])}/v1/responses/{job}/cancel")


def test_f38_strangers_add_at_most_twenty_series(system: System) -> None:
    """500 requests with random paths, models, methods and ids, on a node that has served nothing but one job."""
    url = system.api_url(system.apis[0])
    system.ended(system.submit("say x"))
    before = set(samples(system))
    rng = random.Random(38)

    def word() -> str:
        return f"{rng.getrandbits(64):x}"

    def send(_: int) -> None:
        methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", word().upper())
        job = f"resp_{rng.choice((SCRIPTED, word()))}.0_{rng.getrandbits(128):032x}"
        paths = (f"/{word()}", f"/v1/{word()}", f"/v1/models/{word()}", f"/v1/responses/{job}",
                 f"/v1/responses/{job}/cancel", f"/v1/responses/{word()}/{word()}", "/v1/chat/completions",
                 "/v1/responses", f"/metrics/{word()}")  # fmt: skip
        body = (
            {"model": word(), "input": word(), word(): word()}
            if rng.random() < 0.5
            else {"model": word(), "input": "x"}
        )
        answer = system.http.request(rng.choice(methods), f"{url}{rng.choice(paths)}?{word()}={word()}", json=body)
        assert answer.status_code < 500

    for number in range(500):
        send(number)
    after = set(samples(system))
    assert before <= after
    assert len(after - before) <= MOST_NEW_SERIES, after - before

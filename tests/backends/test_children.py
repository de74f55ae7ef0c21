"""llama.cpp's server as a child of a worker: killed, hung, orphaned; and what its jobs and its Programs notice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pool.store.log import texts_of
from tasks.payloads import GenerationRequest, Sampling, TextPrompt
from tests.backends.conftest import SLOTS, llama_server
from tests.backends.upstream import Upstream
from tests.engine.small_model import write_small_model
from tests.processes import descendants, is_running
from tests.system import System
from tests.waiting import wait_until

MODEL, TOKENS = "llama", 300


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's file."""
    return str(write_small_model(tmp_path_factory.mktemp("model") / "small.gguf"))


@pytest.fixture
def system(tmp_path: Path, small: str) -> Iterator[System]:
    """One node and one worker with its server."""
    with System(tmp_path / "system", workers=1, models={MODEL: llama_server(small)}, serves=MODEL) as system:
        system.start()
        yield system


def server_of(system: System) -> int:
    """The process id of the worker's server."""
    below = descendants(system.workers[0].pid).items()
    # Above it is its keeper, whose command line has its own.
    found = [pid for pid, line in below if "xllamacpp_program" in line and "leash_exec" not in line]
    return found[0] if found else 0


def submit(system: System, *, tokens: int = TOKENS) -> str:
    """A greedy generation of so many tokens."""
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    prompt = TextPrompt(text="the other people of this world ")
    return system.jobs.submit(GenerationRequest(model=MODEL, prompt=prompt, max_tokens=tokens, sampling=sampling))


def assert_whole(system: System, job: str) -> None:
    """It has all its tokens, each once, and its record says what its log says."""
    record = system.ended(job, timeout_s=60)
    assert (record.state, record.outputs[0].tokens) == ("incomplete", TOKENS)
    entries = list(system.jobs.follow(job))
    assert [entry.seq for entry in entries[1:]] == [entry.next_seq for entry in entries[:-1]]
    assert sum(len(entry.token_ids) for entry in entries) == TOKENS
    assert texts_of(entries, 1) == [record.outputs[0].text]


def test_jobs_outlast_a_killed_server_and_a_killed_worker(system: System) -> None:
    """The server: it is started again, and they go on behind what they have logged, in the same attempt. The worker:
    its server dies with it, and another worker goes on."""
    jobs = [submit(system) for _ in range(SLOTS + 2)]
    wait_until(lambda: all(system.record(job).logged_tokens > 20 for job in jobs[:SLOTS]), description="streams")
    first = server_of(system)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: server_of(system) not in (0, first), description="another server", timeout_s=60)
    for job in jobs:
        assert_whole(system, job)
        assert system.record(job).attempt == 1
    (rank,) = system.ranks(MODEL)
    wait_until(lambda: system.ranks(MODEL)[0].facts["upstream_restarts_total"] == 1, description="the restart told")
    assert system.ranks(MODEL)[0].incarnation == rank.incarnation

    jobs = [submit(system) for _ in range(SLOTS)]
    wait_until(lambda: all(system.record(job).logged_tokens > 20 for job in jobs), description="streams")
    second, worker = server_of(system), system.workers[0]
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    wait_until(lambda: not is_running(second), description="the server to die with its worker")
    worker.start()
    system.await_worker(worker)
    for job in jobs:
        assert_whole(system, job)
    assert system.audit() == []


def test_a_worker_that_leaves_takes_its_server_along(system: System) -> None:
    """And what has not ended goes back to the queue with its tokens."""
    server, worker = server_of(system), system.workers[0]
    with httpx.Client() as client:
        # Nobody else may use it.
        port = next(
            int(word)
            for line in [descendants(worker.pid)[server]]
            for before, word in zip(line.split(), line.split()[1:], strict=False)
            if before == "--port"
        )
        answer = client.post(f"http://127.0.0.1:{port}/completion", json={"prompt": [5], "n_predict": 1})
        assert answer.status_code == 401
    assert worker.terminate() == 0
    assert not is_running(server)
    assert system.ranks(MODEL) == []


def test_a_server_that_cannot_start_ends_the_worker_by_name(tmp_path: Path, small: str) -> None:
    """With what it said, and the program's arguments are no shell's."""
    models = {MODEL: llama_server(small, **{"upstream.arguments": ["--no-such-flag", "; touch oops"]})}
    with System(tmp_path / "system", apis=0, workers=1, models=models, serves=MODEL) as system:
        system.state.start()
        system.await_state()
        worker = system.workers[0]
        worker.start()
        assert worker.wait(90) != 0
        assert "no-such-flag" in worker.output()
        assert not (Path.cwd() / "oops").exists()


def test_each_url_is_a_rank(tmp_path: Path, small: str) -> None:
    """One worker, two servers: each takes its target at most, and one that dies leaves its work to the other."""
    one, two = Upstream(delay_s=0.004), Upstream(delay_s=0.004)
    fields = {
        "backend": "openai_remote",
        "target_inflight": 2,
        "upstream.base_urls": [one.url, two.url],
        "upstream.kind": "llama_cpp",
        "upstream.tokenizer": small,
        "upstream.model": "known",
        "upstream.patience_seconds": 0.5,
    }
    try:
        with System(tmp_path / "system", workers=1, models={MODEL: fields}, serves=MODEL) as system:
            system.start()
            wait_until(lambda: len(system.ranks(MODEL)) == 2, description="two ranks", timeout_s=30)
            jobs = [submit(system, tokens=TOKENS) for _ in range(8)]
            wait_until(lambda: one.in_flight == two.in_flight == 2, description="both servers full")
            one.close()
            for job in jobs:
                assert_whole(system, job)
            assert one.most_in_flight == two.most_in_flight == 2
    finally:
        two.close()

"""Celery workers that run llama.cpp: streams, batches, a killed worker, and one whose package is missing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool.store.server import StateServer
from tasks.client import Client
from tasks.config import load_configuration
from tasks.payloads import GenerationRequest, Sampling, TextPrompt
from tests.engine.small_model import BYTES_PER_TOKEN, write_small_model
from tests.integration.celery_process import Site, Worker
from tests.waiting import wait_until

MODEL = "small"
TOKENS = 1900
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, ignore_eos=True),
    "seeded": Sampling(temperature=0.9, top_p=0.9, seed=5, ignore_eos=True),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site that also has a small model of llama.cpp's, in four slots of 2,048 positions."""
    folder = tmp_path_factory.mktemp("site")
    path = write_small_model(folder / "small.gguf")
    with StateServer(tmp_path_factory.mktemp("state")) as server:
        site = Site(server.url, folder)
        add_model(site, path)
        yield site
        site.close()


def add_model(site: Site, path: Path) -> None:
    """Into the site's configuration."""
    config = Path(site.env["GENPOOL_CONFIG"])
    lines = {"backend": '"llama_cpp"', "source": f'"{path}"', "target_inflight": 3, "kept_prefixes": 1, "threads": 1}
    lines["kv_budget_bytes"] = 4 * 2048 * BYTES_PER_TOKEN
    settings = "".join(f"{name} = {value}\n" for name, value in lines.items())
    config.write_text(f"{config.read_text()}[models.{MODEL}]\n{settings}")
    site.settings = load_configuration(config, environ={}).settings


@pytest.fixture(scope="module")
def jobs(site: Site) -> Iterator[Client]:
    client = Client(site.settings)
    yield client
    client.close()


@pytest.fixture(scope="module")
def pair(site: Site) -> list[Worker]:
    """Two workers; a test that kills one starts another."""
    return [site.worker(model=MODEL), site.worker(model=MODEL)]


def stream_of(
    sampling: Sampling, prompt: str = "the other people of this world ", tokens: int = TOKENS
) -> GenerationRequest:
    return GenerationRequest(model=MODEL, prompt=TextPrompt(text=prompt), max_tokens=tokens, sampling=sampling)


def test_streams_are_the_same_alone_and_together(jobs: Client, pair: list[Worker]) -> None:
    """One after the other and all at once: each text is its own."""
    assert len(pair) == 2
    requests = [stream_of(sampling, prompt, 60) for sampling in SAMPLINGS.values() for prompt in ("she ", "what if ")]
    alone = ["".join(entry.text for entry in jobs.follow(jobs.submit(request))) for request in requests]
    ids = [jobs.submit(request) for request in requests]
    together = ["".join(entry.text for entry in jobs.follow(job)) for job in ids]
    assert together == alone
    assert len(set(alone)) == len(alone)
    assert {jobs.get(job).state for job in ids} == {"incomplete"}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_stream_outlives_its_worker(site: Site, jobs: Client, pair: list[Worker], name: str) -> None:
    """Killed in the middle of a stream: another worker prefills the prompt, feeds what was logged, and goes on to the
    text of an undisturbed run."""
    request = stream_of(SAMPLINGS[name])
    undisturbed = "".join(entry.text for entry in jobs.follow(jobs.submit(request)))
    job = jobs.submit(request)
    wait_until(lambda: jobs.get(job).logged_tokens > 50, description="a stream in progress", timeout_s=30)
    (pid,) = [rank["pid"] for rank in site.ranks(MODEL) if rank["id"] == jobs.get(job).rank]
    victim = next(worker for worker in pair if worker.process.pid == pid)
    victim.signal(signal.SIGKILL)
    pair[pair.index(victim)] = site.worker(model=MODEL, wait=False)
    seen = list(jobs.follow(job))
    assert "".join(entry.text for entry in seen) == undisturbed == jobs.get(job).outputs[0].text
    assert [entry.seq for entry in seen[1:]] == [entry.next_seq for entry in seen[:-1]]
    assert jobs.get(job).attempt == 2


def test_a_missing_package_ends_the_worker_by_name(site: Site) -> None:
    """Its log says what to type, and it exits with an error for its supervisor."""
    hidden = site.folder / "hidden" / "llama_cpp"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('not here')")
    before = dict(site.env)
    site.env["PYTHONPATH"] = str(hidden.parent)
    try:
        worker = site.worker("-n", "lacking@%h", model=MODEL, wait=False)
    finally:
        site.env = before
    assert worker.wait(60) != 0
    assert "make llama" in worker.output()

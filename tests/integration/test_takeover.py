"""A worker dies or leaves in the middle of a stream: another goes on, and the reader cannot tell."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from pool.store.log import texts_of
from tasks.client import Client
from tasks.payloads import GenerationRequest, Sampling
from tests.builders import request
from tests.integration.celery_process import Site, Worker
from tests.waiting import wait_until

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
SEEDED = Sampling(temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)


@pytest.fixture
def site(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A state server without workers yet."""
    site = Site(redis_url, tmp_path_factory.mktemp("site"))
    yield site
    site.close()


@pytest.fixture
def jobs(site: Site) -> Iterator[Client]:
    """A client of the site."""
    client = Client(site.settings)
    yield client
    client.close()


def long_request(sampling: Sampling, max_tokens: int = 1500) -> GenerationRequest:
    """A stream long enough to be interrupted."""
    return request(max_tokens=max_tokens, sampling=sampling)


def holder(site: Site, jobs: Client, job: str, workers: list[Worker]) -> Worker:
    """The worker that runs the job, once it has logged a few tokens."""
    wait_until(lambda: jobs.get(job).logged_tokens > 50, description="a stream in progress", timeout_s=30)
    record = jobs.get(job)
    (pid,) = [rank["pid"] for rank in site.ranks() if rank["id"] == record.rank]
    return next(worker for worker in workers if worker.process.pid == pid)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGQUIT], ids=lambda number: number.name)
def test_a_stream_goes_on_elsewhere(site: Site, jobs: Client, sampling: Sampling, number: signal.Signals) -> None:
    """Two workers, started by hand without a name, and a stream in progress. Killed, terminated or quit: the follower
    sees one gapless stream, byte-identical to an undisturbed run; a leaving worker exits 0 and costs the job nothing.
    """
    # A grace too short for what runs, so that SIGTERM has to hand back.
    site.env["GENPOOL_WORKER__DRAIN_GRACE_SECONDS"] = "0.05"
    workers = [site.worker(), site.worker()]
    assert len({rank["id"] for rank in site.ranks()}) == 2
    undisturbed = jobs.submit(long_request(sampling))
    expected = "".join(entry.text for entry in jobs.follow(undisturbed))
    job = jobs.submit(long_request(sampling))
    stream = jobs.follow(job)
    seen = [next(stream)]
    victim = holder(site, jobs, job, workers)
    victim.signal(number)
    seen += stream
    record = jobs.get(job)
    assert record.state == "incomplete"
    assert record.attempt == 2
    assert "".join(entry.text for entry in seen) == expected == record.outputs[0].text
    assert [entry.seq for entry in seen[1:]] == [entry.next_seq for entry in seen[:-1]]
    assert seen[-1].next_seq == 1500
    assert victim.wait() == (-signal.SIGKILL if number == signal.SIGKILL else 0), victim.output()


def test_a_draining_worker_finishes_what_fits_its_grace(site: Site, jobs: Client) -> None:
    """SIGTERM with time enough: the running job ends there in its first attempt, queued ones stay for others."""
    worker = site.worker("-c", "1")
    running = jobs.submit(long_request(GREEDY))
    queued = jobs.submit(long_request(GREEDY, 5))
    wait_until(lambda: jobs.get(running).logged_tokens > 0, description="a stream in progress")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert (jobs.get(running).state, jobs.get(running).attempt) == ("incomplete", 1)
    assert (jobs.get(queued).state, jobs.get(queued).attempt) == ("queued", 0)
    assert site.ranks() == []
    jobs.cancel(queued)


def test_a_worker_started_later_finds_what_was_queued(site: Site, jobs: Client) -> None:
    """Jobs submitted while nobody serves the model are measured by the worker: good ones run, one that cannot fit the
    context fails with both numbers."""
    good = jobs.submit(request())
    long = jobs.submit(request(max_tokens=100_000))
    assert jobs.get(good).prompt_tokens is None
    site.worker()
    for job in (good, long):
        wait_until(lambda job=job: jobs.get(job).terminal, description="the job to end")
    assert jobs.get(good).state == "incomplete"
    failed = jobs.get(long)
    assert (failed.state, failed.error_code) == ("failed", "context_length_exceeded")
    assert "100000" in str(failed.error_message)
    assert "2048" in str(failed.error_message)


def test_partial_text_of_a_cancelled_job_stays_readable(site: Site, jobs: Client) -> None:
    """What was shown before the cancel is the log, and its texts join by choice."""
    site.worker()
    job = jobs.submit(request(max_tokens=1500, sampling=SEEDED, n=2))
    wait_until(lambda: jobs.get(job).logged_tokens > 20, description="both choices to run")
    jobs.cancel(job)
    entries = list(jobs.follow(job))
    assert {entry.choice for entry in entries} == {0, 1}
    assert all(texts_of(entries, 2))

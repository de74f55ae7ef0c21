"""A worker dies or leaves in the middle of a stream: another goes on, and the reader cannot tell."""

from __future__ import annotations

import signal

import pytest

from pool.store.log import texts_of
from tasks.client import Client
from tasks.payloads import GenerationRequest, Sampling
from tests.builders import request
from tests.integration.celery_process import Site, Worker
from tests.waiting import wait_until

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
SEEDED = Sampling(temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}
TOKENS = 1500


@pytest.fixture(scope="module")
def pair(site: Site) -> list[Worker]:
    """Two workers, started by hand without a name, with a grace too short for what runs, so that SIGTERM has to hand
    back. Who ends one of them starts another."""
    site.env["GENPOOL_WORKER__DRAIN_GRACE_SECONDS"] = "0.05"
    return [site.worker(), site.worker()]


@pytest.fixture(scope="module")
def undisturbed(site: Site, pair: list[Worker]) -> dict[str, str]:
    """The texts of both streams when nothing happens to them."""
    assert len(pair) == 2
    client = Client(site.settings)
    ids = {name: client.submit(long_request(sampling)) for name, sampling in SAMPLINGS.items()}
    texts = {name: "".join(entry.text for entry in client.follow(job)) for name, job in ids.items()}
    client.close()
    return texts


def long_request(sampling: Sampling, max_tokens: int = TOKENS) -> GenerationRequest:
    """A stream long enough to be interrupted."""
    return request(max_tokens=max_tokens, sampling=sampling)


def holder(site: Site, jobs: Client, job: str, workers: list[Worker]) -> Worker:
    """The worker that runs the job, once it has logged a few tokens."""
    wait_until(lambda: jobs.get(job).logged_tokens > 50, description="a stream in progress", timeout_s=30)
    record = jobs.get(job)
    (pid,) = [rank["pid"] for rank in site.ranks() if rank["id"] == record.rank]
    return next(worker for worker in workers if worker.process.pid == pid)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGQUIT], ids=lambda number: number.name)
def test_a_stream_goes_on_elsewhere(
    site: Site, jobs: Client, pair: list[Worker], undisturbed: dict[str, str], name: str, number: signal.Signals
) -> None:
    """Two workers, and a stream in progress. Killed, terminated or quit: the follower sees one gapless stream,
    byte-identical to an undisturbed run; a leaving worker exits 0 and costs the job nothing."""
    both = {worker.process.pid for worker in pair}
    wait_until(lambda: {rank["pid"] for rank in site.ranks()} == both, description="both to serve", timeout_s=60)
    assert len({rank["id"] for rank in site.ranks()}) == 2
    job = jobs.submit(long_request(SAMPLINGS[name]))
    stream = jobs.follow(job)
    seen = [next(stream)]
    victim = holder(site, jobs, job, pair)
    victim.signal(number)
    pair[pair.index(victim)] = site.worker(wait=False)
    seen += stream
    record = jobs.get(job)
    assert record.state == "incomplete"
    assert record.attempt == 2
    assert "".join(entry.text for entry in seen) == undisturbed[name] == record.outputs[0].text
    assert [entry.seq for entry in seen[1:]] == [entry.next_seq for entry in seen[:-1]]
    assert seen[-1].next_seq == TOKENS
    assert victim.wait() == (-signal.SIGKILL if number == signal.SIGKILL else 0), victim.output()


def test_a_draining_worker_finishes_what_fits_its_grace(fresh_site: Site, fresh_jobs: Client) -> None:
    """SIGTERM with time enough: the running job ends there in its first attempt, queued ones stay for others."""
    worker = fresh_site.worker("-c", "1")
    running = fresh_jobs.submit(long_request(GREEDY))
    queued = fresh_jobs.submit(long_request(GREEDY, 5))
    wait_until(lambda: fresh_jobs.get(running).logged_tokens > 0, description="a stream in progress")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert (fresh_jobs.get(running).state, fresh_jobs.get(running).attempt) == ("incomplete", 1)
    assert (fresh_jobs.get(queued).state, fresh_jobs.get(queued).attempt) == ("queued", 0)
    assert fresh_site.ranks() == []
    fresh_jobs.cancel(queued)


def test_a_worker_started_later_finds_what_was_queued(fresh_site: Site, fresh_jobs: Client) -> None:
    """Jobs submitted while nobody serves the model are measured by the worker: good ones run, one that cannot fit the
    context fails with both numbers, one that names a token which there is not with that."""
    good = fresh_jobs.submit(request())
    long = fresh_jobs.submit(request(max_tokens=100_000))
    biased = fresh_jobs.submit(request(sampling=Sampling(logit_bias={512: 1})))
    assert fresh_jobs.get(good).prompt_tokens is None
    fresh_site.worker()
    for job in (good, long, biased):
        wait_until(lambda job=job: fresh_jobs.get(job).terminal, description="the job to end")
    assert fresh_jobs.get(good).state == "incomplete"
    failed = fresh_jobs.get(long)
    assert (failed.state, failed.error_code) == ("failed", "context_length_exceeded")
    assert "100000" in str(failed.error_message)
    assert "2048" in str(failed.error_message)
    assert fresh_jobs.get(biased).state == "failed"
    assert "token id 512" in str(fresh_jobs.get(biased).error_message)


def test_partial_text_of_a_cancelled_job_stays_readable(jobs: Client, pair: list[Worker]) -> None:
    """What was shown before the cancel is the log, and its texts join by choice."""
    assert len(pair) == 2
    job = jobs.submit(request(max_tokens=TOKENS, sampling=SEEDED, n=2))
    wait_until(lambda: jobs.get(job).logged_tokens > 20, description="both choices to run")
    jobs.cancel(job)
    entries = list(jobs.follow(job))
    assert {entry.choice for entry in entries} == {0, 1}
    assert all(texts_of(entries, 2))

"""F01, F07 and zombies: a worker is killed, or stopped past its lease, with work in its hands."""

from __future__ import annotations

import pytest

from pool.store.delivery import Delivery
from pool.store.handouts import Lease, Write
from pool.store.keys import GROUP
from tests.builders import completed, delivery, entry
from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, Part, System
from tests.waiting import wait_until

LEASE_S = 1.5
#: A machine shared with other work may be this much slower than a case's own bound.
SLACK = 3


@pytest.fixture(scope="module")
def shared(start_shared_system: StartSystem) -> System:
    """Two workers, 25 ms a token."""
    return start_shared_system(sections={"worker": {"lease_seconds": LEASE_S, "renew_seconds": 0.4}}, delay_ms=25)


@pytest.fixture
def system(shared: System) -> System:
    """The same with both workers alive, whatever the last test did to them."""
    for worker in shared.workers:
        worker.start()
    for worker in shared.workers:
        shared.await_worker(worker)
    return shared


def holder(system: System, job: str, *, tokens: int = 3) -> Part:
    """The worker that runs the job, once it has made some tokens."""
    wait_until(lambda: system.tokens(job) >= tokens and system.record(job).logged_tokens, description="some tokens")
    return system.holder(system.record(job).rank)


def text_of(answer: dict[str, object]) -> str:
    """The text of a response object's only output item."""
    (item,) = answer["output"]  # type: ignore[misc] # JSON
    return str(item["content"][0]["text"])


def test_f01_a_killed_workers_job_ends_elsewhere_whole(system: System) -> None:
    """kill -9 after 3 of 40 tokens: another worker ends the job in its second attempt, with all 40 tokens. Whoever
    polls sees it run, perhaps queued, run again, and complete, once."""
    job = system.submit("repeat 40 x")
    victim = holder(system, job)
    seen: list[str] = []

    def status() -> str:
        now = str(system.poll(job)["status"])
        seen.extend([now] if seen[-1:] != [now] else [])
        return now

    victim.kill()
    other = next(worker for worker in system.workers if worker is not victim)
    wait_until(
        lambda: status() == "in_progress" and system.record(job).attempt == 2,
        description="the takeover",
        timeout_s=LEASE_S * SLACK,
    )
    with system.client() as client:
        (pending,) = client.xpending_range(system.keys().queue, GROUP, "-", "+", 10)
    assert system.holder(pending["consumer"].decode()) is other
    # A requeued job has a new entry, so the stream's own count starts again; the record counts attempts.
    assert pending["times_delivered"] == 1
    wait_until(lambda: status() == "completed", description="completion", timeout_s=(LEASE_S + 5) * SLACK)
    # The moment between the two workers may be too short to be seen.
    assert seen in (["in_progress", "queued", "in_progress", "completed"], ["in_progress", "completed"])
    answer = system.poll(job)
    assert text_of(answer) == "x" * 40
    assert answer["usage"]["output_tokens"] == system.record(job).logged_tokens == 41
    assert (system.record(job).attempt, system.starts(job)) == (2, 2)
    system.assert_recovered()


def test_f01_a_killed_workers_queue_of_jobs_with_choices_ends_elsewhere(system: System) -> None:
    """A worker dies with jobs of three choices, some of them still waiting for a slot in it: every choice of every job
    is whole, and none is made twice over."""
    jobs = [system.submit_choices(f"repeat {count} x", 3) for count in range(20, 26)]
    wait_until(lambda: system.record(jobs[0]).logged_tokens > 6, description="some tokens")
    system.holder(system.record(jobs[0]).rank).kill()
    for job, count in zip(jobs, range(20, 26), strict=True):
        record = system.ended(job)
        assert [output.text for output in record.outputs] == ["x" * count] * 3
        assert record.attempt <= 2
    system.assert_recovered()


def test_f07_a_job_without_any_worker_is_not_running_for_ever(system: System) -> None:
    """The only workers are killed and none is started: an API node takes the job back, and fails it at its deadline;
    one without a deadline stays queued for whoever comes. /readyz names the model without a worker."""
    deadline = system.submit("repeat 400 x", deadline_seconds=5)
    patient = system.submit("repeat 20 x")
    for job in (deadline, patient):
        holder(system, job)
    for worker in system.workers:
        worker.kill()
    wait_until(
        lambda: system.poll(deadline)["status"] != "in_progress",
        description="the job to leave `running`",
        timeout_s=(LEASE_S + 2) * SLACK,
    )
    wait_until(lambda: system.poll(patient)["status"] == "queued", description="queued", timeout_s=LEASE_S * SLACK)
    wait_until(lambda: system.poll(deadline)["status"] == "failed", description="the deadline", timeout_s=10)
    assert system.poll(deadline)["error"]["code"] == "deadline_exceeded"
    ready = system.http.get(f"{system.api_url(system.apis[0])}/readyz")
    assert ready.status_code == 503
    assert f"a worker for model {SCRIPTED}" in ready.json()["missing"]
    assert system.poll(patient)["status"] == "queued"
    system.workers[0].start()
    assert system.ended(patient).outputs[0].text == "x" * 20
    system.assert_recovered()


def test_a_zombies_late_writes_are_refused_everywhere(system: System) -> None:
    """A worker is stopped past its lease and goes on after another has taken its job: nothing it writes counts, it
    drops the work, and the text is whole."""
    job = system.submit("repeat 160 x")
    zombie = holder(system, job)
    old = Lease(job.rpartition("_")[2], 1, system.fact(job, "nonce"))
    rank = system.record(job).rank
    wait_until(lambda: _in_flight(system, rank) == 1, description="the worker to say that it holds the job")
    zombie.pause()
    wait_until(lambda: system.record(job).attempt == 2, description="the takeover", timeout_s=LEASE_S * SLACK)
    _assert_refused(delivery(system.url, rank, model=SCRIPTED), old)
    zombie.resume()
    # The zombie lists itself again within one renewal; by then it must have let the job go.
    wait_until(lambda: _in_flight(system, rank) == 0, description="the zombie to drop the job", timeout_s=2 * SLACK)
    assert not system.record(job).terminal, "the job must outlast the zombie, or nothing was shown"
    dropped = _tokens_of(system, zombie.pid)
    assert system.ended(job).outputs[0].text == "x" * 160
    assert _tokens_of(system, zombie.pid) == dropped
    assert (system.record(job).attempt, system.starts(job)) == (2, 2)
    assert zombie.alive
    system.assert_recovered()


def test_what_a_stopped_worker_was_sent_is_run_by_another(system: System) -> None:
    """Jobs arrive while one worker is stopped in the middle of its blocked read: those that the server handed to it run
    elsewhere a lease later, at no cost, and the worker that wakes up drops them."""
    stopped = system.workers[0]
    stopped.pause()
    jobs = [system.submit(f"repeat {count} x") for count in range(1, 7)]
    for count, job in enumerate(jobs, start=1):
        record = system.ended(job)
        assert (record.outputs[0].text, record.attempt) == ("x" * count, 1)
        assert system.fact(job, "losses") in ("", "0")
    stopped.resume()
    system.await_worker(stopped)
    assert [system.starts(job) for job in jobs] == [1] * 6
    system.assert_recovered()


def _assert_refused(late: Delivery, old: Lease) -> None:
    assert late.write([Write(old, 0, (entry(0, 5),))])[0].code == "stale"
    assert late.write([Write(old, 0, (), completed("forged"))])[0].code == "stale"
    assert late.renew([old])[0].code == "stale"
    assert late.hand_back([old]) == 0
    for client in (late.reader, late.writer):
        client.connection_pool.disconnect()


def _tokens_of(system: System, pid: int) -> int:
    """Token lines of one process."""
    lines = system.scripted_log.read_text().splitlines()
    return sum(line.startswith("tok ") and line.split()[3] == str(pid) for line in lines)


def _in_flight(system: System, rank: str) -> int | None:
    """Generations that a rank says it holds; None while it is not registered."""
    facts = {live.id: live.facts for live in system.ranks()}
    return facts[rank]["runtime_inflight"] if rank in facts else None

"""The intake against a real store, two ranks of one process: trials, cancels and lost replies at awkward moments.

Its turns are made from the test's own thread, and the loops make none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pool.rules.admission import Budgets
from pool.store.connection import Client, connect
from pool.store.delivery import Delivery
from pool.store.handouts import Entry, Handout
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.ranks import Card
from pool.store.records import NewJob
from tasks.ports import Tokens
from tests.builders import delivery, new_job, sweeper, swept_steadily
from tests.waiting import wait_until
from workers.engines.numpy_llama import NumpyLlama
from workers.engines.tiny import tiny_llama
from workers.intake import Intake
from workers.loop import BatchingLoop
from workers.outlet import Outlet
from workers.trials import TrialGate

#: Longer than any test, but for the one that waits for it.
LEASE_MS = 60_000
ONE, TWO = "one", "two"


@dataclass
class Rank:
    """One model's rank, without threads. `on_begun` is called for each job that it begins."""

    delivery: Delivery
    gate: TrialGate
    begun: list[Handout] = field(default_factory=list)
    on_begun: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        engine = NumpyLlama(*tiny_llama(7))
        self.loop = BatchingLoop(engine, Budgets(max_prefill_tokens_per_tick=64), 8)
        self.outlet = Outlet(
            self.delivery, self.loop, flush_idle_ms=500, renew_ms=60_000, stall_timeout_s=60, on_left=lambda *_: None
        )
        self.intake = Intake(
            self.delivery,
            self.loop,
            self.outlet,
            card=Card(engine.context_length, 10_000, "f", b""),
            vocabulary=engine.vocabulary,
            gate=self.gate,
            on_begun=self._begun,
        )
        self.gate.join(self.outlet, self.loop)

    def _begun(self, handout: Handout) -> None:
        self.begun.append(handout)
        self.on_begun()

    def turn(self) -> None:
        """Make a turn of the intake."""
        self.intake._room.clear()
        self.intake._turn()

    def store(self) -> None:
        """Make a turn of the outlet, everything written."""
        self.outlet.nudge()
        assert self.outlet._turn(everything=True)

    def prove(self) -> None:
        """The job begun last shows a token."""
        lease = self.begun[-1].lease
        self.outlet.deliver([Tokens(lease.token, lease.attempt, 0, (5,), "x")])
        self.store()


class Process:
    """Two ranks, models `one` and `two`, that share a gate."""

    def __init__(self, url: str, client: Client, store: JobStore, lease_ms: int = LEASE_MS) -> None:
        self.client = client
        self.store = store
        gate = TrialGate()
        self.one, self.two = (Rank(delivery(url, "w", model=model, lease_ms=lease_ms), gate) for model in (ONE, TWO))
        self._jobs: list[NewJob] = []

    def submit(self, model: str, **facts: Any) -> NewJob:
        """Submit a job; `facts` are put into its record."""
        job = new_job(model=model)
        self.store.submit(job)
        self._jobs.append(job)
        if facts:
            self.client.hset(self.key(job), mapping=facts)
        return job

    def suspect(self, model: str) -> NewJob:
        """A job that has lost two workers in a row before it logged a token: one more, and it is poison."""
        return self.submit(model, crashes=2, suspect=1, begun_tokens=0)

    def state(self, job: NewJob) -> str:
        """The job's state."""
        return self.store.read(job.ref).state

    def key(self, job: NewJob) -> str:
        """The job's record."""
        return ModelKeys(job.ref.tag).job(job.ref.token)

    def close(self) -> None:
        """End what was submitted, and all connections."""
        for job in self._jobs:
            self.store.cancel(job.ref)
        for rank in (self.one, self.two):
            rank.delivery.reader.connection_pool.disconnect()
            rank.delivery.writer.connection_pool.disconnect()


@pytest.fixture
def process(redis_url: str, client: Client, store: JobStore) -> Iterator[Process]:
    """Two ranks with leases that do not run out."""
    process = Process(redis_url, client, store)
    yield process
    process.close()


def test_a_suspect_that_is_cancelled_while_it_waits_opens_the_gate(process: Process) -> None:
    """It waits for an empty process, and nobody begins anything beside it. Cancelled, it leaves its rank when that
    claims its waiting entries anew; then the other rank begins its jobs again."""
    process.submit(ONE)
    process.one.turn()
    process.one.prove()
    suspect = process.suspect(ONE)
    process.one.turn()
    process.one.turn()
    assert (process.state(suspect), process.one.gate.closed_to(process.two.outlet)) == ("queued", True)
    process.store.cancel(suspect.ref)
    process.one.intake._next_keep_s = 0.0
    process.submit(ONE)
    process.one.turn()
    assert len(process.one.begun) == 2
    other = process.submit(TWO)
    process.two.turn()
    assert process.state(other) == "running"


def test_a_suspect_does_not_wait_for_ever(redis_url: str, client: Client, store: JobStore) -> None:
    """A long generation runs, so the process is not empty. After a lease the suspect begins beside it, on trial; not
    before, and not beside a job that has shown no token."""
    process = Process(redis_url, client, store, lease_ms=300)
    process.submit(TWO)
    process.two.turn()
    suspect = process.suspect(ONE)
    process.one.turn()
    unproven_until_s = time.monotonic() + 0.6
    while time.monotonic() < unproven_until_s:
        process.one.turn()
    assert process.state(suspect) == "queued", "the other job is not proven"
    process.two.prove()
    process.one.turn()
    assert process.state(suspect) == "queued", "it has only begun to wait"

    def begun() -> bool:
        process.one.turn()
        return process.state(suspect) == "running"

    wait_until(begun, description="the suspect to begin")
    assert (process.one.begun[-1].alone, process.one.gate.closed_to(process.two.outlet)) == (True, True)
    process.one.prove()
    assert not process.one.gate.closed_to(process.two.outlet)
    process.close()


def test_a_begin_in_flight_counts_as_running(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has asked the server to begin a job and nobody holds it yet: another rank's suspect must not take the
    process for empty, nor for proven."""
    seen: list[tuple[bool, bool]] = []
    begin, gate = process.two.delivery.begin, process.one.gate

    def observed(entries: Sequence[Entry], **options: Any) -> Iterator[Handout | Entry]:
        seen.append((gate.is_empty(), gate.has_unproven()))
        return begin(entries, **options)

    monkeypatch.setattr(process.two.delivery, "begin", observed)
    process.submit(TWO)
    process.two.turn()
    assert seen == [(False, True)]
    process.two.prove()
    assert (gate.is_empty(), gate.has_unproven()) == (False, False)


def test_a_job_that_is_fed_its_own_tokens_again_holds_up_no_trial(process: Process) -> None:
    """It showed some in its last attempt, and lost its worker since. One that showed none is not proven."""
    process.submit(TWO)
    process.two.turn()
    assert process.one.gate.has_unproven()
    process.two.prove()
    swept_steadily(process.client, model=TWO)
    keys = ModelKeys(f"{TWO}:0")
    process.client.zadd(keys.leases, dict.fromkeys(process.client.zrange(keys.leases, 0, -1), 1))
    assert sweeper(process.client).sweep(TWO).requeued == 1
    process.two.turn()
    again = process.two.begun[-1]
    assert (again.lease.attempt, again.logged > 0, again.alone) == (2, True, False)
    assert process.two.outlet.is_unproven(again)
    assert (process.one.gate.is_empty(), process.one.gate.has_unproven()) == (False, False)


def test_what_was_read_while_a_trial_began_waits_for_it(process: Process) -> None:
    """Its rank has read it when another puts a job on trial: it is set aside, and begins when the trial is over."""
    job = process.submit(TWO)
    suspect = process.suspect(ONE)
    read = process.two.delivery.read

    def slow(room: int, block_ms: int) -> list[Entry]:
        entries = read(room, block_ms)
        process.one.turn()
        process.one.turn()
        return entries

    process.two.delivery.read = slow  # type: ignore[method-assign] # the other rank's turns fall into the read
    process.two.turn()
    assert (process.state(suspect), process.state(job)) == ("running", "queued")
    process.two.turn()
    assert process.state(job) == "queued"
    process.one.prove()
    process.two.turn()
    assert process.state(job) == "running"


def test_an_unanswered_begin_is_given_back_while_another_rank_has_a_trial(process: Process) -> None:
    """The server began the job and its reply was lost. It cannot run beside the trial, so it is queued again, at no
    cost."""
    job = process.submit(TWO)
    (entry,) = process.two.delivery.read(1, 10)
    assert len(list(process.two.delivery.begin([entry]))) == 1
    process.two.intake._unanswered = {entry.token: entry}
    process.suspect(ONE)
    process.one.turn()
    process.one.turn()
    process.two.turn()
    assert (process.state(job), process.two.begun) == ("queued", [])
    process.one.prove()
    process.two.turn()
    assert (process.state(job), process.two.begun[-1].lease.attempt) == ("running", 2)
    assert process.client.hget(process.key(job), "crashes") is None


def test_a_trial_whose_begin_was_not_answered_goes_on(process: Process) -> None:
    """The suspect began where nothing else ran, and its reply was lost: asking again gives the same attempt, and it is
    on trial."""
    suspect = process.suspect(ONE)
    process.one.turn()
    (entry,) = process.one.intake._alone
    assert isinstance(process.one.delivery.begin_alone(entry), Handout)
    process.one.intake._alone.clear()
    process.one.intake._unanswered = {entry.token: entry}
    process.one.turn()
    (handout,) = process.one.begun
    assert (process.state(suspect), handout.lease.attempt, handout.alone) == ("running", 1, True)
    assert process.one.gate.closed_to(process.two.outlet)


def test_a_begin_whose_reply_was_lost_is_no_crash(process: Process) -> None:
    """By the time that the server answers again, the sweep has taken the job for lost with its worker. The worker
    lives, and says so."""
    job = process.submit(ONE)
    (entry,) = process.one.delivery.read(1, 10)
    assert len(list(process.one.delivery.begin([entry]))) == 1
    process.one.intake._unanswered = {entry.token: entry}
    swept_steadily(process.client, model=ONE)
    process.client.zadd(ModelKeys(f"{ONE}:0").leases, {entry.token: 1})
    assert sweeper(process.client).sweep(ONE).requeued == 1
    assert process.client.hget(process.key(job), "crashes") == b"1"
    process.one.turn()
    assert process.client.hmget(process.key(job), "crashes", "blamed") == [b"0", b""]
    assert process.one.intake._unanswered == {}
    process.one.turn()
    assert (process.state(job), process.one.begun[-1].alone) == ("running", False)


def test_a_job_cancelled_as_it_is_submitted_leaves_the_loop(process: Process) -> None:
    """The outlet drops it before the loop has it. Its slot is free afterwards."""
    job = process.submit(ONE)

    def cancel() -> None:
        process.store.cancel(job.ref)
        process.one.store()

    process.one.on_begun = cancel
    process.one.turn()
    assert (len(process.one.begun), process.one.outlet.held()) == (1, [])
    process.one.loop.tick()
    assert process.one.loop.capacity().in_flight == 0


def test_a_rank_that_reads_no_more_still_counts(process: Process) -> None:
    """It drains: what it runs may be lost with the process, until it has handed it back."""
    process.submit(ONE)
    intake, gate = process.one.intake, process.one.gate
    intake.start()
    wait_until(lambda: process.one.begun, description="the job to begin")
    intake.stop()
    assert (gate.is_empty(), gate.has_unproven()) == (False, True)


def test_what_could_not_be_given_back_is_kept_for_later(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state server is away when reading stops: the entries stay with the rank, which tries again."""
    job = process.submit(ONE)
    (entry,) = process.one.delivery.read(1, 10)
    assert len(list(process.one.delivery.begin([entry]))) == 1
    process.one.intake._unanswered = {entry.token: entry}
    with monkeypatch.context() as away:
        away.setattr(process.one.delivery, "reader", connect("redis://127.0.0.1:1/0", max_connections=1))
        process.one.intake.give_back()
    assert process.state(job) == "running"
    process.one.intake.give_back()
    assert process.state(job) == "queued"


def test_a_job_reaches_the_loop_as_its_tenants(process: Process) -> None:
    """What it computes is kept for that tenant alone."""
    process.submit(ONE, tenant="somebody")
    process.one.turn()
    process.one.loop.tick()
    (generation,) = process.one.loop.stop()
    assert generation.tenant == "somebody"


def test_a_job_that_finds_no_place_goes_back(process: Process) -> None:
    """Its choices are more than may wait inside: it is queued again, at no cost, and the rank waits before it reads
    more. The one before it runs."""
    rank = process.one
    rank.loop.budgets = Budgets(max_queue_depth=0)
    rank.loop.set_limit(2)
    first, second = process.submit(ONE, n=2), process.submit(ONE)
    rank.turn()
    rank.store()
    assert (process.state(first), process.state(second)) == ("running", "queued")
    assert [held.handout.lease.token for held in rank.outlet.held()] == [first.ref.token]
    assert rank.loop.telemetry()["rejected_by_reason"] == {"rejected-queue-full": 1}
    assert process.client.hget(process.key(second), "crashes") is None
    assert rank.intake._crowded


def test_an_attempt_that_ran_here_before_goes_back(process: Process) -> None:
    """A state server that came back with less than it had confirmed counts attempts anew: the rank knows this one, so
    it is queued again for a next attempt, which runs."""
    rank = process.one
    job = process.submit(ONE)
    rank.turn()
    assert rank.loop.cancel(job.ref.token, 1)
    rank.loop.tick()
    rank.outlet.refuse(rank.begun[-1])
    rank.store()
    process.client.hset(process.key(job), "attempt", 0)
    rank.turn()
    rank.store()
    assert process.state(job) == "queued"
    rank.intake._crowded = False
    rank.turn()
    assert (process.state(job), rank.begun[-1].lease.attempt) == ("running", 2)
    assert rank.loop.capacity().in_flight == 1


def test_what_was_read_for_slots_that_are_gone_goes_back(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target was lowered while a read waited: no more begins than there is room for now, and the rest at its time."""
    rank, read = process.one, process.one.delivery.read
    jobs = [process.submit(ONE) for _ in range(4)]

    def lowered(room: int, block_ms: int) -> list[Entry]:
        found = read(room, block_ms)
        rank.loop.set_limit(3)
        return found

    with monkeypatch.context() as slow:
        slow.setattr(rank.delivery, "read", lowered)
        rank.turn()
    assert [process.state(job) for job in jobs] == ["running"] * 3 + ["queued"]
    assert rank.intake._unanswered == {}
    rank.loop.set_limit(4)
    rank.turn()
    assert process.state(jobs[3]) == "running"
    assert process.client.hget(process.key(jobs[3]), "crashes") is None

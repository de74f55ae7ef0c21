"""The scheduler and the books of KV under random operations, against a simple model.

The model knows what every generation would say if it ran alone, on an engine that nobody else uses. Whatever happens
to it (company, other prompts with the same beginning, preemption, lost KV, limits, failing mates), the loop may only
tell a beginning of that, in order, and all of it in the end. The engine keeps tokens for KV in real blocks, so wrong
books show in the tokens.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pool.rules.admission import Budgets, Reason
from pool.rules.batching import MAX_PASSES
from tasks.payloads import Sampling
from tasks.ports import Failed, Finished, Generation, Tokens
from tests.engine.looping import generation, undisturbed
from tests.scripted.blocks import BlockEngine
from tests.stateful.watched_engine import Watched
from workers.hints import HintAnswer, HintOutcome
from workers.loop import BatchingLoop
from workers.offload import OffloadBudget
from workers.residence import PrefixReuse
from workers.scheduler import Tick

#: A live session must be prefilled, fed, drawn for or let in at least this often. What may be ahead of it: every other
#: session of the queue (24 of at most 40 tokens, in batches of 1 at worst), each begun anew now and then.
PATIENCE_TICKS = 4 * 24 * 40
OPERATIONS = Counter[str]()
#: What came of them, all machines together.
HAPPENED = Counter[str]()


@dataclass
class Expected:
    """A job in the model: what it would say alone, what it has said (replayed tokens included), and for each of its
    sessions the last tick in which it got on."""

    given: Generation
    streams: list[list[int]]
    said: list[list[int]]
    order: int
    progress: dict[str, int]
    queued: bool
    doomed: bool = False
    passed: int = 0
    began: set[str] = field(default_factory=set)


@cache
def alone(recompute_exact: bool, prompt: tuple[int, ...], n: int, tokens: int, temperature: float) -> list[list[int]]:
    """What a generation says alone."""
    sampling = Sampling(temperature=temperature, ignore_eos=True)
    engine = BlockEngine(recompute_exact=recompute_exact)
    return undisturbed(engine, generation("alone", prompt, n=n, max_tokens=tokens, sampling=sampling))


def prompt_of(family: int, length: int) -> tuple[int, ...]:
    """The beginning of one of three texts."""
    return tuple(np.random.default_rng(family).integers(17, 400, length).tolist())


class Machine(RuleBasedStateMachine):
    """A loop on a small engine, whose KV is one long session or two."""

    @initialize(
        recompute_exact=st.booleans(),
        snapshot=st.booleans(),
        reuse=st.sampled_from(["exact", "exact", "off", "all"]),
        overcommit=st.sampled_from([1.0, 2.0, 8.0, 8.0]),
        blocks=st.sampled_from([12, 14, 24]),
        batch=st.integers(1, 4),
        limit=st.sampled_from([8, 4, 1]),
        prefill=st.sampled_from([1, 16, 40, 512]),
        target_s=st.sampled_from([0.0, 0.001, 0.02, 0.1]),
        depth=st.sampled_from([0, 4, 24]),
        outside=st.sampled_from([0, 1000, 2**20, 2**20]),
        dear=st.sampled_from([True, True, False]),
    )
    def set_up(
        self,
        recompute_exact: bool,
        snapshot: bool,
        reuse: PrefixReuse,
        overcommit: float,
        blocks: int,
        batch: int,
        limit: int,
        prefill: int,
        target_s: float,
        depth: int,
        outside: int,
        dear: bool,
    ) -> None:
        """One of the kinds of engine and of the settings."""
        self.exact = recompute_exact
        if not (recompute_exact or snapshot):
            overcommit = 1.0
        if not recompute_exact and reuse == "all":
            reuse = "exact"  # `all` promises nothing there
        self.engine = Watched(blocks=blocks, recompute_exact=recompute_exact, snapshot=snapshot)
        self.budgets = Budgets(
            max_batch_size=batch,
            max_prefill_tokens_per_tick=prefill,
            max_queue_depth=depth,
            kv_overcommit=overcommit,
        )
        self.loop = BatchingLoop(
            self.engine,
            self.budgets,
            limit,
            reuse=reuse,
            target_step_s=target_s,
            clock=lambda: self.engine.now_s,
            offload=OffloadBudget(memory_bytes=outside, retention_s=0.4),
            prefill_seconds=lambda tokens: tokens * dear,
        )
        self.outside = outside
        #: Whose it is and what was said last, by holder; and accepted hints whose end was not told yet.
        self.last: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.hinted: Counter[tuple[str, str]] = Counter()
        self.jobs: dict[str, Expected] = {}
        #: What the last jobs that ended said, behind their prompts.
        self.said: deque[tuple[int, ...]] = deque(maxlen=2)
        self.count = self.ticks = 0
        self.holders: set[str] = set()

    # -- operations --------------------------------------------------------------------------------------------------

    @rule(
        family=st.integers(0, 5),
        length=st.sampled_from([1, 17, 40, 64, 70, 100, 150]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        tokens=st.sampled_from([40, 7, 2, 1]),
        temperature=st.sampled_from([0.0, 0.8]),
        replayed=st.sampled_from([0, 0, 0, 3, 40]),
        holder=st.sampled_from(["", "", "p", "q"]),
        tenant=st.sampled_from(["", "", "t"]),
    )
    def submit(
        self,
        family: int,
        length: int,
        n: int,
        tokens: int,
        temperature: float,
        replayed: int,
        holder: str,
        tenant: str,
    ) -> None:
        """A job, new or taken over with part of its log."""
        OPERATIONS["submit"] += 1
        prompt = prompt_of(family, length)
        if self.said and family > 2:
            # The next turn of one that has ended.
            prompt = (*self.said[length % len(self.said)], *prompt[:5])[:150]
        self._submit(prompt, n, tokens, temperature, replayed, holder, tenant)

    def _submit(
        self,
        prompt: tuple[int, ...],
        n: int,
        tokens: int,
        temperature: float,
        replayed: int,
        holder: str,
        tenant: str,
    ) -> None:
        streams = alone(self.exact, prompt, n, tokens, temperature)
        self.count += 1
        given = generation(
            f"job-{self.count}",
            prompt,
            n=n,
            max_tokens=tokens,
            sampling=Sampling(temperature=temperature, ignore_eos=True),
            replay=tuple(tuple(stream[:replayed]) for stream in streams) if replayed else (),
            holder=holder,
            tenant=tenant,
        )
        before = self.loop.capacity()
        decision = self.loop.admit(given)
        if not before.in_flight:
            assert decision.reason is Reason.ADMITTED, "nobody is here"
        if decision.accepted:
            said = [list(stream[:replayed]) for stream in streams]
            names = {f"{given.job}/{choice}": self.ticks for choice in range(n)}
            queued = decision.reason is Reason.QUEUED
            self.jobs[given.job] = Expected(given, streams, said, self.count, names, queued)
            self.holders |= {holder}
        else:
            assert decision.reason is Reason.QUEUE_FULL
            assert self._queued() + n > self.budgets.max_queue_depth
            assert self.loop._ahead or before.in_flight >= before.effective, "there is a slot, and nobody is ahead"

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        """A job that is here, or one that has ended."""
        OPERATIONS["again"] += 1
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        assert self.loop.admit(job.given).reason is Reason.DUPLICATE

    @precondition(lambda self: len(self.jobs) > 3)
    @rule(data=st.data(), how=st.sampled_from(["cancelled", "failed"]))
    def cancel(self, data: st.DataObject, how: Any) -> None:
        """It says nothing more."""
        OPERATIONS["cancel"] += 1
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        assert self.loop.cancel(name, 1, how=how)
        del self.jobs[name]
        self._work(1)
        assert not self.loop.cancel(name, 1)

    @rule(count=st.sampled_from([1, 2, 5, 15]))
    def tick(self, count: int) -> None:
        """Let the loop work."""
        OPERATIONS["tick"] += 1
        self._work(count)

    def _work(self, count: int) -> None:
        for _ in range(count):
            self.engine.now_s += 0.01
            self.ticks += 1
            self.engine.batch = []
            waiting = {name for name, job in self.jobs.items() if not job.began}
            report = self.loop.tick()
            self._hear()
            self._check_budgets(report)
            self._check_order(report, waiting)
            self._take(report)

    @precondition(lambda self: len(self.jobs) > 2)
    @rule(limit=st.sampled_from([1, 3, 8]))
    def set_limit(self, limit: int) -> None:
        """More or fewer at once."""
        OPERATIONS["limit"] += 1
        self.loop.set_limit(limit)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """An engine forgets a session's KV, in the middle of anything."""
        OPERATIONS["lose"] += 1
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        self.engine.release(f"{name}/0", 1)

    @precondition(lambda self: len(self.jobs) > 3)
    @rule(data=st.data())
    def doom(self, data: st.DataObject) -> None:
        """From now on the engine raises whenever this job's last choice is in a batch."""
        OPERATIONS["doom"] += 1
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        if len(job.said[-1]) < len(job.streams[-1]):
            job.doomed = True
            self.engine.culprits.add(f"{job.given.job}/{job.given.n - 1}")

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """A Program has ended."""
        OPERATIONS["unpin"] += 1
        self.loop.drop_holder(data.draw(st.sampled_from(sorted(self.holders))))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), action=st.sampled_from(["offload", "offload", "offload", "drop", "retain"]))
    def hint(self, data: st.DataObject, action: Any) -> None:
        """A Program pauses, or comes back soon."""
        OPERATIONS["hint"] += 1
        holder = data.draw(st.sampled_from(sorted(self.holders)))
        self._hint(holder, action)

    def _hint(self, holder: str, action: Any) -> None:
        if self.loop.hint(holder, action) is HintAnswer.ACCEPTED:
            assert not any(pending == holder for pending, _ in self.hinted)
            self.hinted[holder, action] += 1

    @rule(data=st.data(), length=st.sampled_from([64, 100, 140]))
    def leave_and_return(self, data: st.DataObject, length: int) -> None:
        """A Program's KV leaves the engine, others use the room, and its next turn comes."""
        OPERATIONS["return"] += 1
        if not self._idle():
            self._submit(prompt_of(length % 3, length), 1, 2, 0.0, 0, "r", "")
            self._work(15)
        holder = data.draw(st.sampled_from(self._idle() or ["r"]))
        self._hint(holder, "offload")
        self._work(1)
        free = self.engine.kv_usage()
        room = free.total - free.held
        if room and self.engine.begin("others", 1, np.array([7], np.int32), room, "others") is not None:
            self.engine.release("others", 1)
        tenant, said = self.last.get(holder, ("", prompt_of(0, 64)))
        self._submit((*said[:145], 30, 31), 1, 2, 0.0, 0, holder, tenant)

    def _idle(self) -> list[str]:
        """Holders of whom something is kept, and no request is here."""
        busy = {job.given.holder for job in self.jobs.values()}
        return sorted(holder for holder in self.loop.holdings() if holder not in busy and holder in self.last)

    def _hear(self) -> None:
        """Each accepted hint ends once; what was applied has left nothing in the engine."""
        for result in self.loop.hint_results():
            self.hinted.subtract([(result.holder, result.action)])
            assert self.hinted[result.holder, result.action] == 0
            live = any(job.given.holder == result.holder for job in self.jobs.values())
            if result.outcome is HintOutcome.APPLIED and result.action != "retain":
                assert result.holder not in self.loop.holdings() or live
            HAPPENED[f"{result.action} {result.outcome}"] += 1
        self.hinted = +self.hinted

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _check_budgets(self, report: Tick) -> None:
        rows = [member for member in self.engine.batch if member.session in report.decoded]
        prefill = sum(len(member.tokens) for member in self.engine.batch if member.session not in report.decoded)
        assert len(rows) <= self.budgets.max_batch_size
        assert report.occupancy <= self.budgets.max_batch_size
        assert prefill <= max(self.budgets.max_prefill_tokens_per_tick, self.engine.prefill_grid)
        if report.promoted:
            assert self.loop.telemetry()["active_sessions"] <= self.loop.effective_limit()

    def _check_order(self, report: Tick, waiting: set[str]) -> None:
        """First come, first served, except residents, and those a bounded number of times."""
        for session in report.promoted:
            job = self.jobs[session.split("/")[0]]
            first = not job.began
            job.began.add(session)
            passed = [self.jobs[name] for name in waiting if self.jobs[name].order < job.order]
            passed = [older for older in passed if not older.began and not all(self._ended(older))]
            if first and passed:
                assert self.engine.was_resident[session], "only residents pass"
                head = min(passed, key=lambda older: older.order)
                head.passed += 1
                HAPPENED["passed"] += 1
                assert head.passed <= MAX_PASSES

    @staticmethod
    def _ended(job: Expected) -> list[bool]:
        return [len(said) == len(stream) for said, stream in zip(job.said, job.streams, strict=True)]

    def _take(self, report: Tick) -> None:
        for session in (*report.promoted, *report.prefilled, *report.decoded):
            name = session.split("/")[0]
            if name in self.jobs:
                self.jobs[name].progress[session] = self.ticks
        for event in report.events:
            job = self.jobs[event.job]
            if isinstance(event, Tokens):
                said, stream = job.said[event.choice], job.streams[event.choice]
                said += event.token_ids
                assert said == stream[: len(said)]
            elif isinstance(event, Finished):
                assert not job.doomed
                assert job.said == job.streams
                assert [output.tokens for output in event.outputs] == [len(stream) for stream in job.streams]
                self.said.append((*job.given.prompt.tolist(), *job.said[0]))
                self.last[job.given.holder] = job.given.tenant, self.said[-1]
                del self.jobs[event.job]
            else:
                assert isinstance(event, Failed)
                assert job.doomed
                del self.jobs[event.job]

    @invariant()
    def nothing_starves(self) -> None:
        """Whoever was accepted gets on."""
        for job in getattr(self, "jobs", {}).values():
            for choice, ended in enumerate(self._ended(job)):
                assert ended or self.ticks - job.progress[f"{job.given.job}/{choice}"] < PATIENCE_TICKS

    @invariant()
    def the_books_are_exact(self) -> None:
        """In every moment, and no budget is exceeded."""
        if not hasattr(self, "loop"):
            return
        self.engine.check_integrity()
        telemetry = self.loop.telemetry()
        assert telemetry["kv_pressure"] <= 1
        assert telemetry["kv_offloaded_memory_bytes"] <= self.outside
        assert telemetry["runtime_inflight"] == sum(
            not ended for job in self.jobs.values() for ended in self._ended(job)
        ) + sum(self._unseen(job) for job in self.jobs.values())
        assert self._queued() <= self.budgets.max_queue_depth

    def _queued(self) -> int:
        """Sessions that were taken into the queue, and have neither begun nor ended."""
        queued = 0
        for job in self.jobs.values():
            if job.queued and job.given.job in self._mailed():
                queued += job.given.n
            elif job.queued:
                over = {f"{job.given.job}/{choice}" for choice, ended in enumerate(self._ended(job)) if ended}
                queued += job.given.n - len(job.began | over)
        return queued

    def _unseen(self, job: Expected) -> int:
        """Choices whose log held their end, and that the loop has not looked at yet: those of jobs in the mailbox."""
        return sum(self._ended(job)) if job.given.job in self._mailed() else 0

    def _mailed(self) -> set[str]:
        return {item.generation.job for item in self.loop._inbox if hasattr(item, "generation")}

    def teardown(self) -> None:
        """All that was accepted ends, within the bound of a run to completion."""
        if not hasattr(self, "loop"):
            return
        live = self.loop.capacity().in_flight
        tokens = sum(job.given.max_tokens * job.given.n for job in self.jobs.values())
        chunks = sum(len(job.given.prompt) // 16 + 1 for job in self.jobs.values()) * 3
        for _ in range(8 * (tokens + live + 1) + chunks):
            if not self.loop.capacity().in_flight:
                break
            self._work(1)
            self.the_books_are_exact()
        assert self.jobs == {}
        self.loop.check_integrity()
        for holder in self.holders:
            self.loop.drop_holder(holder)
        self.loop.tick()
        self._hear()
        usage = self.engine.kv_usage()
        assert (usage.held, usage.pinned) == (0, 0)
        assert (self.loop.holdings(), self.loop.resident_tokens(), self.hinted) == ({}, 0, Counter())
        assert self.loop.telemetry()["kv_offloaded_memory_bytes"] == 0
        telemetry = self.loop.telemetry()
        for name in (
            "preempted_total",
            "cache_misses_total",
            "prompt_tokens_cached_total",
            "kv_evictions_total",
            "kv_restores_total",
            "kv_offloads_dropped_total",
        ):
            HAPPENED[name] += telemetry[name]


@pytest.fixture
def unlogged() -> Iterator[None]:
    """The loop tells of each failing step, thousands here."""
    log = logging.getLogger("genpool.loop")
    log.disabled = True
    yield
    log.disabled = False


@pytest.mark.timeout(600)
def test_ten_thousand_random_operations(unlogged: None) -> None:  # noqa: ARG001 - a fixture
    """Of all kinds, on all kinds of engines."""
    OPERATIONS.clear()
    HAPPENED.clear()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=250,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert OPERATIONS.total() >= 10_000
    assert len(OPERATIONS) == 10 and min(OPERATIONS.values()) > 50, OPERATIONS
    assert len(HAPPENED) == 12 and min(HAPPENED.values()) > 1, HAPPENED

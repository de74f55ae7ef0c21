"""The batching loop: many generations, one engine step after another.

One thread owns the engine. Others talk to it through a mailbox (submit, cancel) and a sink (events); no lock is held
over an engine step, and nothing here knows Redis, Celery or HTTP. Tests drive `tick` from their own thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pool.errors import InvalidRequest
from pool.rules.batching import Budgets, Prefill, prefill_stops, promotable, rotate
from tasks.ports import (
    CacheMiss,
    Engine,
    Event,
    EventSink,
    Failed,
    Finished,
    Generation,
    Member,
    MemberError,
    RunnerCapacity,
    StepLogits,
    StepResult,
)
from workers.sessions import Session, sessions_of

log = logging.getLogger("genpool.loop")

IDLE_WAIT_S = 0.5
CONGESTED_WAIT_S = 0.005


@dataclass(slots=True)
class _Job:
    """A job's live sessions; `left` counts those that have not ended."""

    generation: Generation
    sessions: list[Session]
    left: int


@dataclass(slots=True)
class Counters:
    """Totals since start; `batch_occupancy_sum` adds up the rows of each decode batch."""

    ticks: int = 0
    decode_batches: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    batch_occupancy_last: int = 0
    batch_occupancy_max: int = 0
    completed_jobs: int = 0
    cancelled_jobs: int = 0
    failed_jobs: int = 0
    cache_misses: int = 0
    step_seconds: float = 0.0


@dataclass
class BatchingLoop:
    """A Runner over an in-process engine. `limit`: generations in flight at most (more wait inside, in order)."""

    engine: Engine
    budgets: Budgets
    limit: int
    _inbox: deque[Generation | tuple[str, int]] = field(default_factory=deque)
    _wake: threading.Event = field(default_factory=threading.Event)
    _known: set[tuple[str, int]] = field(default_factory=set)
    _jobs: dict[tuple[str, int], _Job] = field(default_factory=dict)
    _waiting: deque[Session] = field(default_factory=deque)
    _prefilling: list[Session] = field(default_factory=list)
    _decoding: list[Session] = field(default_factory=list)
    _reserved_positions: int = 0
    _in_flight: int = 0
    _progress: int = 0
    _stopping: bool = False
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._sink: EventSink | None = None
        self._eos_ids = frozenset(self.engine.vocabulary.eos_ids)
        self._count_lock = threading.Lock()
        self._mail_lock = threading.Lock()

    # -- what other threads call -------------------------------------------------------------------------------------

    def start(self, sink: EventSink) -> None:
        """Begin to run in a thread of its own."""
        self._sink = sink
        self._thread = threading.Thread(target=self._run, name="genpool-engine", daemon=True)
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Take a job. Raises InvalidRequest when it can never fit this rank."""
        peak = len(generation.prompt) + generation.max_tokens - 1
        if peak > self.budgets.kv_positions:
            raise InvalidRequest(
                f"The request needs KV for {peak} tokens, but this rank holds {self.budgets.kv_positions}.",
                param="max_tokens",
                code="kv_budget_exceeded",
            )
        self._add_in_flight(generation.n)
        with self._mail_lock:
            # Together: a cancel must not lie in the inbox before its job, nor find it unknown while it lies there.
            self._known.add((generation.job, generation.attempt))
            self._inbox.append(generation)
        self._ring()

    def _ring(self) -> None:
        """Wake the engine's thread. Looking first is much cheaper than setting an event that is set."""
        if not self._wake.is_set():
            self._wake.set()

    def cancel(self, job: str, attempt: int) -> bool:
        """Stop a job before the next step, without any event. False: it is not here (any more)."""
        with self._mail_lock:
            known = (job, attempt) in self._known
            if known:
                self._inbox.append((job, attempt))
        if known:
            self._wake.set()
        return known

    def capacity(self) -> RunnerCapacity:
        """Effective limit and choices in flight."""
        return RunnerCapacity(effective=self.effective_limit(), in_flight=self._in_flight)

    def effective_limit(self) -> int:
        """The configured limit, clamped by what the engine can honestly do."""
        return max(1, min(self.limit, self.engine.capability().max_sessions))

    def set_limit(self, limit: int) -> None:
        """Generations in flight at most from now on; running ones finish."""
        self.limit = max(1, limit)
        self._wake.set()

    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def progress(self) -> int:
        """Rises with every turn, idle turns included."""
        return self._progress

    def telemetry(self) -> dict[str, Any]:
        """JSON-safe figures without session content."""
        counters = self.counters
        batches = max(1, counters.decode_batches)
        return {
            "active_sessions": len(self._prefilling) + len(self._decoding),
            "queue_depth": len(self._waiting),
            "batch_occupancy_last": counters.batch_occupancy_last,
            "batch_occupancy_avg": round(counters.decode_tokens / batches, 4),
            "batch_occupancy_max": counters.batch_occupancy_max,
            "kv_reserved_bytes": self._reserved_positions * self.engine.bytes_per_token,
            "kv_budget_bytes": self.budgets.kv_positions * self.engine.bytes_per_token,
            "prefill_tokens_total": counters.prefill_tokens,
            "decode_tokens_total": counters.decode_tokens,
            "decode_batches_total": counters.decode_batches,
            "completed_jobs": counters.completed_jobs,
            "cancelled_jobs": counters.cancelled_jobs,
            "failed_jobs": counters.failed_jobs,
            "cache_misses_total": counters.cache_misses,
            "ticks": counters.ticks,
            "step_seconds_total": round(counters.step_seconds, 4),
            "effective_target_inflight": self.effective_limit(),
            "runtime_inflight": self._in_flight,
        }

    def stop(self) -> list[Generation]:
        """Stop after the current step, free all KV, and return the jobs that had not ended."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._read_mail()
        left = [job.generation for job in self._jobs.values()]
        for key in list(self._jobs):
            self._drop(key)
        return left

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._sink is not None
        while not self._stopping:
            self._progress += 1
            self._wake.clear()
            if self._sink.congested():
                self._wake.wait(CONGESTED_WAIT_S)
                continue
            events, did_work = self.tick()
            if events:
                self._sink.deliver(events)
            if not did_work and not self._inbox:
                self._wake.wait(IDLE_WAIT_S)

    def tick(self) -> tuple[list[Event], bool]:
        """One turn: read the mail, promote, step, take the results. Returns the events and whether anything ran."""
        self._read_mail()
        events = self._promote()
        batch = self._plan()
        if batch:
            self.counters.ticks += 1
            started = time.perf_counter()
            results = self._step([member for _, member in batch])
            self.counters.step_seconds += time.perf_counter() - started
            for (session, member), result in zip(batch, results, strict=True):
                # A sibling's failure in this very step may have ended the whole job.
                if (session.generation.job, session.generation.attempt) in self._jobs:
                    events.extend(self._settle(session, member, result))
        return events, bool(batch) or bool(events)

    def _read_mail(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Generation):
                sessions = sessions_of(item, self.engine.vocabulary, self._eos_ids)
                self._jobs[item.job, item.attempt] = _Job(item, sessions, len(sessions))
                self._waiting.extend(sessions)
            elif item in self._jobs:
                self.counters.cancelled_jobs += 1
                self._drop(item)

    def _promote(self) -> list[Event]:
        """Move waiting sessions into free slots; one whose log already held its end is done here."""
        events: list[Event] = []
        finished = [session for session in self._waiting if session.finish_reason]
        for session in finished:
            self._waiting.remove(session)
            events.extend(self._end(session))
        count = promotable(
            [session.peak_positions for session in self._waiting],
            free_slots=self.effective_limit() - len(self._prefilling) - len(self._decoding),
            reserved_positions=self._reserved_positions,
            kv_positions=self.budgets.kv_positions,
        )
        for _ in range(count):
            session = self._waiting.popleft()
            self._reserved_positions += session.peak_positions
            self._prefilling.append(session)
        return events

    def _plan(self) -> list[tuple[Session, Member]]:
        """Decode rows first, then prefill chunks within the budget."""
        now, self._decoding = rotate(self._decoding, self.budgets.max_batch_size)
        batch = [(session, session.row()) for session in now]
        self.counters.batch_occupancy_last = len(now)
        if now:
            self.counters.decode_batches += 1
            self.counters.decode_tokens += len(now)
            self.counters.batch_occupancy_max = max(self.counters.batch_occupancy_max, len(now))
        stops = prefill_stops(
            [Prefill(session.held, session.prompt_tokens) for session in self._prefilling],
            budget_tokens=self.budgets.max_prefill_tokens_per_tick,
            grid=self.budgets.prefill_grid,
        )
        for session, stop in zip(self._prefilling, stops, strict=True):
            if stop > session.held:
                self.counters.prefill_tokens += stop - session.held
                batch.append((session, session.chunk(stop)))
        return batch

    def _step(self, members: Sequence[Member]) -> list[StepResult]:
        """Run the batch; when it raises, run its members alone, so that only the culprit fails."""
        try:
            return self._checked_step(members)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises must not end the loop
            log.error("engine step of %d members failed: %s", len(members), type(error).__name__)
            if len(members) == 1:
                return [MemberError(f"The engine failed: {type(error).__name__}.")]
            return [result for member in members for result in self._step([member])]

    def _checked_step(self, members: Sequence[Member]) -> list[StepResult]:
        results = self.engine.step(members)
        if len(results) != len(members):
            raise RuntimeError(f"the engine answered {len(results)} results for {len(members)} members")
        return results

    def _settle(self, session: Session, member: Member, result: StepResult) -> list[Event]:
        if isinstance(result, MemberError):
            return self._fail(session, result.message)
        if isinstance(result, CacheMiss):
            self.counters.cache_misses += 1
            session.held = 0
            if session in self._decoding:
                self._decoding.remove(session)
                self._prefilling.append(session)
            return []
        return self._advance(session, member, result)

    def _advance(self, session: Session, member: Member, result: StepLogits) -> list[Event]:
        prefilled = session.prefilling
        session.held += len(member.tokens)
        events: list[Event] = []
        if member.wants_logits:
            if result.row is None:
                return self._fail(session, "The engine answered without logits.")
            events.append(session.draw(result.row))
        if session.finish_reason:
            return [*events, *self._end(session)]
        if prefilled and not session.prefilling:
            self._prefilling.remove(session)
            self._decoding.append(session)
        return events

    def _end(self, session: Session) -> list[Event]:
        """A choice ended by itself; with the last one, so did the job."""
        generation = session.generation
        self._leave(session)
        job = self._jobs[generation.job, generation.attempt]
        job.left -= 1
        if job.left:
            return []
        self._forget((generation.job, generation.attempt))
        self.counters.completed_jobs += 1
        outputs = tuple(each.result() for each in job.sessions)
        return [Finished(generation.job, generation.attempt, outputs, session.prompt_tokens, 0)]

    def _fail(self, session: Session, message: str) -> list[Event]:
        generation = session.generation
        self.counters.failed_jobs += 1
        self._drop((generation.job, generation.attempt))
        return [Failed(generation.job, generation.attempt, "engine_error", message)]

    def _drop(self, key: tuple[str, int]) -> None:
        for session in self._forget(key).sessions:
            # One whose log already held its end waits like any other until `_promote` sees it.
            if not session.finish_reason or session in self._waiting:
                self._leave(session)

    def _forget(self, key: tuple[str, int]) -> _Job:
        self._known.discard(key)
        return self._jobs.pop(key)

    def _leave(self, session: Session) -> None:
        """Take a live session out of whichever list it is in; its slot, reservation and KV are free."""
        self._add_in_flight(-1)
        if session in self._waiting:
            self._waiting.remove(session)
            return
        for phase in (self._prefilling, self._decoding):
            if session in phase:
                phase.remove(session)
                self._reserved_positions -= session.peak_positions
                self.engine.release(session.id, session.generation.attempt)

    def _add_in_flight(self, count: int) -> None:
        with self._count_lock:
            self._in_flight += count

"""The scheduler: which sessions an engine runs in each tick, and what becomes of them. One thread drives it.

Who runs is decided in `pool/rules/batching.py`; a session's KV is `workers/residence.py`'s; threads, mailboxes and
admission are those of the loop around it (`workers/loop.py`). A tick reads: promote, plan, step, settle, promote again.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from pool.rules.batching import (
    MAX_MISSES,
    MAX_PASSES,
    Prefill,
    exported_for,
    gives_way,
    prefill_stops,
    promote,
    rotate,
)
from pool.rules.kv_blocks import IntegrityError
from tasks.ports import (
    CacheMiss,
    Engine,
    Event,
    Failed,
    Generation,
    Member,
    MemberError,
    StepLogits,
    StepResult,
    Stopped,
)
from workers.hints import Hint, HintResult
from workers.residence import Residence
from workers.sessions import Job, Phase, Session
from workers.stepping import Stepping
from workers.telemetry import Telemetry

log = logging.getLogger("genpool.loop")

#: A job and the number of its attempt.
Key = tuple[str, int]

_by_arrival = attrgetter("arrival")


@dataclass(slots=True)
class Tick:
    """What one tick did, and what was done since the one before: events to deliver; ids of the sessions that were
    promoted, prefilled, decoded, and completed (those only that ended by themselves). `ended`: jobs that are gone;
    `left`: how many sessions are; `unqueued`: how many left the bounded queue."""

    events: list[Event] = field(default_factory=list)
    promoted: list[str] = field(default_factory=list)
    prefilled: list[str] = field(default_factory=list)
    decoded: list[str] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)
    ended: list[Key] = field(default_factory=list)
    left: int = 0
    unqueued: int = 0

    @property
    def occupancy(self) -> int:
        """Rows of the decode batch."""
        return len(self.decoded)

    @property
    def did_work(self) -> bool:
        """Whether the engine made a step."""
        return bool(self.prefilled or self.decoded)


class Scheduler:
    """`slots`: sessions that may be active at once; it may change between ticks. `target_step_s`: seconds that a step
    with prefill should take beside sessions that decode; 0: no matter."""

    def __init__(
        self, engine: Engine, residence: Residence, telemetry: Telemetry, *, slots: int, target_step_s: float = 0.0
    ) -> None:
        self._engine = engine
        self._residence = residence
        self._holders = residence.holders
        self._telemetry = telemetry
        self._budgets = telemetry.budgets
        self._slots = slots
        self._stepping = Stepping(engine, telemetry, target_step_s)
        self._eos_ids = frozenset(engine.vocabulary.eos_ids)
        self._fingerprint = engine.fingerprint()
        self._jobs: dict[Key, Job] = {}
        #: By arrival, so that a preempted session is in front of those that came later.
        self._waiting: list[Session] = []
        #: Came with a log that holds their end.
        self._replayed: list[Session] = []
        self._prefilling: list[Session] = []
        self._decoding: list[Session] = []
        self._arrivals = 0
        self._report = Tick()
        #: Whether anything has happened that may let a waiting session in.
        self._stirred = False

    @property
    def active(self) -> int:
        """Sessions that hold a slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Sessions that wait for a slot or for room."""
        return len(self._waiting)

    def live(self) -> list[Session]:
        """All sessions that have not ended."""
        return [*self._replayed, *self._waiting, *self._prefilling, *self._decoding]

    def generations(self) -> list[Generation]:
        """The jobs that have not ended."""
        return [job.generation for job in self._jobs.values()]

    def set_slots(self, slots: int) -> None:
        """Running sessions finish."""
        self._stirred = self._stirred or slots != self._slots
        self._slots = slots

    def submit(self, generation: Generation, *, queued: bool) -> None:
        """Take a job; `queued`: its sessions count as queued until they are active. One whose log is not of this model
        fails by name."""
        try:
            job = Job.of(generation, self._engine.vocabulary, self._eos_ids, self._arrivals)
        except Exception as error:  # noqa: BLE001 - one job's log must not end the loop
            self._refuse(generation, f"Its log cannot be read: {type(error).__name__}.", queued=queued)
            return
        self._arrivals += generation.n
        self._jobs[job.key] = job
        for session in job.sessions:
            session.queued = queued
            if session.finish_reason:
                self._replayed.append(session)
            else:
                self._residence.forget(session)
                self._waiting.append(session)
        self._stirred = True

    def _refuse(self, generation: Generation, message: str, *, queued: bool) -> None:
        """A job that has no sessions fails."""
        self._telemetry.failed_sessions += generation.n
        self._report.left += generation.n
        self._report.unqueued += generation.n * queued
        self._report.ended.append((generation.job, generation.attempt))
        self._report.events.append(Failed(generation.job, generation.attempt, "engine_error", message))

    def stop(self, key: Key, how: Stopped | None) -> None:
        """End a job without any event; it counts as `how` says, if at all. Unknown ones are ignored."""
        if key in self._jobs:
            stopped = self._drop(self._jobs[key])
            self._telemetry.cancelled_sessions += stopped * (how == "cancelled")
            self._telemetry.failed_sessions += stopped * (how == "failed")

    def drop_holder(self, holder: str) -> None:
        """Nothing is kept for this holder any more."""
        self._holders.drop(holder)
        self._stirred = True

    def apply(self, hint: Hint) -> HintResult | None:
        """Do as a hint says, or say why not. None: not yet."""
        if hint.action != "retain" and any(session.generation.holder == hint.holder for session in self.live()):
            self._holders.abandon(hint)
            return hint.failed("a request of it is here")
        self._stirred = True
        try:
            return self._holders.apply(hint)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises must not end the loop
            self._holders.abandon(hint)
            return hint.failed(f"the engine failed: {type(error).__name__}")

    def poll(self) -> None:
        """Take note of what the disk has done with KV that is outside."""
        self._stirred = self._holders.poll() or self._stirred

    def tick(self) -> Tick:
        """One turn; what it did."""
        self.poll()
        for session in list(self._replayed):
            self._end(session)
        self._promote()
        batch = self._plan()
        self._telemetry.see(self._engine.kv_usage())
        if batch:
            self._run(batch)
            self._promote()
            if self._report.left or self._report.promoted:
                self._telemetry.see(self._engine.kv_usage())
        return self.report()

    def report(self) -> Tick:
        """What was done since the last report."""
        report, self._report = self._report, Tick()
        return report

    def check_integrity(self) -> None:
        """Raises IntegrityError when the engine's books contradict themselves or hold what no session has, or when the
        engine is not the one it was."""
        self._engine.check_integrity()
        usage = self._engine.kv_usage()
        if not self.active and usage.held != usage.pinned:
            raise IntegrityError(f"{usage.held - usage.pinned} positions of KV are held by no session")
        self._holders.check_integrity(usage, (*self._prefilling, *self._decoding))
        if self._engine.fingerprint() != self._fingerprint:
            raise IntegrityError("the engine's fingerprint has changed")

    # -- promotion ---------------------------------------------------------------------------------------------------

    def _promote(self) -> None:
        """Let waiting sessions in, until nothing more can be done for the first that does not fit."""
        while self._stirred and self._waiting:
            self._stirred = False
            found = promote(
                list(self._waiting),
                free_slots=self._slots - self.active,
                begin=self._begin,
                is_resident=self._residence.is_resident,
                passes_left=lambda session: MAX_PASSES - session.passed,
            )
            if found.head is not None:
                found.head.passed += found.passers
                self._stirred = self._make_room_for(found.head)

    def _begin(self, session: Session) -> bool:
        if session.phase is not Phase.WAITING or self._waits_for_leader(session):
            return False
        try:
            entered = not self._residence.is_loading(session) and self._residence.enter(session)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises must not end the loop
            # It may have begun all the same.
            self._residence.leave(session, sound=False)
            self._fail(session, f"The engine failed: {type(error).__name__}.")
            return False
        if entered:
            self._activate(session)
        return entered

    def _activate(self, session: Session) -> None:
        self._waiting.remove(session)
        self._unqueue(session)
        self._report.promoted.append(session.id)
        if session.cached < 0:
            session.cached = min(session.held, session.prompt_tokens)
            self._telemetry.began(session.prompt_tokens, session.cached)
        if session.prefilling:
            session.phase = Phase.PREFILLING
            insort(self._prefilling, session, key=_by_arrival)
        else:
            session.phase = Phase.DECODING
            self._decoding.append(session)

    def _waits_for_leader(self, session: Session) -> bool:
        """Whether the prompt it would begin with is being computed for another choice of its job."""
        leader = self._job(session).leader
        return (
            self._residence.shares
            and session is not leader
            and session.cached < 0
            and leader.phase in (Phase.WAITING, Phase.PREFILLING)
        )

    def _make_room_for(self, head: Session) -> bool:
        """The first in the queue does not fit. Whether that has changed anything."""
        if head.phase is Phase.DONE:
            return True
        if self._waits_for_leader(head) or self._residence.is_loading(head):
            return False
        exported = self._exported_for(head)
        if exported is not None:
            self._preempt(exported)
            return True
        if self.active:
            return False
        # Nobody will make room by ending: whatever it takes, the first one runs.
        if not self._holders.make_way():
            self._give_up_on(head)
        return True

    def _exported_for(self, head: Session) -> Session | None:
        outside = {session.arrival: session for session in self._decoding[self._budgets.max_batch_size :]}
        if not outside or not self._residence.can_preempt:
            return None
        usage = self._engine.kv_usage()

        def freed(arrivals: Sequence[int]) -> int:
            """What they share with sessions that stay is not freed."""
            return self._engine.sole([(outside[each].id, outside[each].attempt) for each in arrivals])

        lacking = self._residence.wanted(head) - (usage.total - usage.held)
        arrival = exported_for(head.arrival, outside, lacking=lacking, freed=freed)
        return None if arrival is None else outside[arrival]

    def _give_up_on(self, head: Session) -> None:
        """A session that finds no room though all is free: it came to need more than when it was saved, or it is too
        large after all."""
        if head.saved is None:
            self._fail(head, "The engine has no room for its KV.")
        else:
            self._telemetry.cache_misses += 1
            self._residence.forget(head)

    # -- the plan of a step ------------------------------------------------------------------------------------------

    def _plan(self) -> list[tuple[Session, Member]]:
        """Decode rows first, then prefill chunks within the budget."""
        now, self._decoding = rotate(self._decoding, self._budgets.max_batch_size)
        for session in now:
            self._secure(session)
        now = [session for session in now if session.phase is Phase.DECODING]
        batch = [(session, session.row()) for session in now]
        self._telemetry.planned(len(now))
        self._report.decoded += [session.id for session in now]
        stops = prefill_stops(
            [Prefill(session.held, len(session.feed)) for session in self._prefilling],
            budget_tokens=self._stepping.prefill_budget(len(now), settled=self._is_settled()),
            grid=self._engine.prefill_grid,
        )
        for session, stop in zip(self._prefilling, stops, strict=True):
            if stop > session.held:
                batch.append((session, session.chunk(stop)))
                self._report.prefilled.append(session.id)
        return batch

    def _is_settled(self) -> bool:
        """Whether anybody who decodes has had more than a first token."""
        return any(len(session.output) > 1 for session in self._decoding)

    def _secure(self, session: Session) -> None:
        """Make sure of room for the session's next position, at the youngest's cost if it must be."""
        while session.phase is Phase.DECODING and not self._grow(session):
            if self.active > 1:
                active = {each.arrival: each for each in (*self._prefilling, *self._decoding)}
                self._preempt(active[gives_way(active)])
            elif not self._holders.make_way():
                # All is its own now, and still it cannot grow: the engine does not hold it any more.
                self._miss(session)

    def _grow(self, session: Session) -> bool:
        try:
            return self._residence.grow(session)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises must not end the loop
            self._fail(session, f"The engine failed: {type(error).__name__}.")
            return False

    def _preempt(self, session: Session) -> None:
        """A live session gives its room to others, and waits in front of all that came after it."""
        self._telemetry.preempted += 1
        self._residence.save(session)
        self._wait_again(session)

    def _wait_again(self, session: Session) -> None:
        self._list_of(session).remove(session)
        session.phase = Phase.WAITING
        insort(self._waiting, session, key=_by_arrival)
        self._stirred = True

    # -- the step ----------------------------------------------------------------------------------------------------

    def _run(self, batch: list[tuple[Session, Member]]) -> None:
        rows = sum(session.phase is Phase.DECODING for session, _ in batch)
        results, now_s = self._stepping.run([member for _, member in batch], rows)
        for (session, member), result in zip(batch, results, strict=True):
            # A sibling's failure in this very step may have ended the whole job.
            if session.phase is not Phase.DONE:
                self._settle(session, member, result, now_s)

    # -- its results -------------------------------------------------------------------------------------------------

    def _settle(self, session: Session, member: Member, result: StepResult, now_s: float) -> None:
        if isinstance(result, MemberError):
            self._fail(session, result.message)
        elif isinstance(result, CacheMiss):
            self._miss(session)
        else:
            self._advance(session, member, result, now_s)

    def _miss(self, session: Session) -> None:
        """Its KV is gone: it begins anew, unseen by anybody."""
        self._telemetry.cache_misses += 1
        session.misses += 1
        if session.misses > MAX_MISSES:
            self._fail(session, "The engine keeps losing its KV.")
            return
        self._residence.leave(session, sound=False)
        self._residence.forget(session)
        self._wait_again(session)

    def _advance(self, session: Session, member: Member, result: StepLogits, now_s: float) -> None:
        session.held += len(member.tokens)
        if session.held > session.furthest:
            session.furthest, session.misses = session.held, 0
        if session.phase is Phase.PREFILLING:
            self._telemetry.prefilled(len(member.tokens), now_s)
        if member.wants_logits and not self._draw(session, result, now_s):
            return
        if session.finish_reason:
            self._end(session)
        elif session.phase is Phase.PREFILLING and not session.prefilling:
            self._prefilling.remove(session)
            session.phase = Phase.DECODING
            self._decoding.append(session)
            # Others may begin with what it has computed.
            self._stirred = True

    def _draw(self, session: Session, result: StepLogits, now_s: float) -> bool:
        """Draw the session's next token and tell it. False: it failed."""
        if result.row is None:
            self._fail(session, "The engine answered without logits.")
            return False
        try:
            drawn = session.draw(result.row)
        except Exception as error:  # noqa: BLE001 - one session's logits must not end the loop
            self._fail(session, f"No token could be drawn: {type(error).__name__}.")
            return False
        self._report.events.append(drawn)
        if session.phase is Phase.DECODING:
            self._telemetry.decoded(now_s)
        gap_s = session.told(now_s)
        if gap_s is not None:
            self._telemetry.gap(gap_s)
        return True

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end(self, session: Session) -> None:
        """A choice ended by itself; with the last one, so did the job."""
        self._leave(session)
        self._telemetry.completed_sessions += 1
        self._report.completed.append(session.id)
        job = self._job(session)
        job.left -= 1
        if not job.left:
            self._forget(job)
            self._report.events.append(job.finished())

    def _fail(self, session: Session, message: str) -> None:
        """The job fails by name. What its sessions hold is not trusted: the same step may have changed it."""
        generation = session.generation
        self._telemetry.failed_sessions += self._drop(self._job(session), sound=False)
        self._report.events.append(Failed(generation.job, generation.attempt, "engine_error", message))

    def _drop(self, job: Job, *, sound: bool = True) -> int:
        """End all that is left of a job. Returns how many sessions that was."""
        live = [session for session in job.sessions if session.phase is not Phase.DONE]
        for session in live:
            self._leave(session, sound=sound)
        self._forget(job)
        return len(live)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.key]
        self._report.ended.append(job.key)

    def _leave(self, session: Session, *, sound: bool = True) -> None:
        """Take a live session out of whichever list it is in; its slot and its KV are free."""
        self._list_of(session).remove(session)
        if session.phase is not Phase.WAITING:
            self._residence.leave(session, sound=sound)
        self._unqueue(session)
        session.phase, session.saved = Phase.DONE, None
        self._report.left += 1
        self._stirred = True

    def _unqueue(self, session: Session) -> None:
        self._report.unqueued += session.queued
        session.queued = False

    def _list_of(self, session: Session) -> list[Session]:
        if session.phase is Phase.WAITING:
            return self._replayed if session.finish_reason else self._waiting
        return self._prefilling if session.phase is Phase.PREFILLING else self._decoding

    def _job(self, session: Session) -> Job:
        return self._jobs[session.generation.job, session.attempt]

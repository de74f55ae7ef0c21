"""The batching loop: many generations, one engine step after another.

One thread owns the engine, through the scheduler. Others talk to it through a mailbox (submit, cancel, hints) and a
sink (events), and read what it has published; no lock is held over an engine step, and nothing here knows Redis, Celery
or HTTP. Tests drive `tick` from their own thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pool.errors import InvalidRequest, QueueFull, Refused
from pool.program_settings import PrefillCostModel
from pool.rules.admission import Budgets, Decision, Reason, Request, Usage, decide
from pool.rules.batching import completion_guard, most_chunks
from pool.rules.programs.ttl import prefill_seconds
from tasks.ports import Engine, Event, EventSink, Generation, RunnerCapacity, Stopped
from workers.bell import Bell
from workers.hints import EXPIRES_S, Hint, HintAction, HintAnswer, HintDesk, HintResult
from workers.holders import Holdings, PrefillSeconds
from workers.offload import OffloadBudget, OffloadStore
from workers.residence import PrefixReuse, Residence
from workers.scheduler import Key, Scheduler, Tick
from workers.telemetry import Telemetry

log = logging.getLogger("genpool.loop")

IDLE_WAIT_S = 0.5
CONGESTED_WAIT_S = 0.005
#: Ended jobs that are remembered, so that none of them runs again under the same attempt.
REMEMBERED = 4096
NO_OFFLOAD = OffloadBudget()
#: What a prompt costs where nobody has measured it.
REFERENCE_PREFILL = partial(prefill_seconds, PrefillCostModel())
#: A refusal's error code, where it is the request's fault.
_CODES = {
    Reason.INVALID: "invalid_request",
    Reason.KV_BUDGET: "kv_budget_exceeded",
    Reason.SCRATCH_BUDGET: "scratch_budget_exceeded",
}


@dataclass(slots=True)
class _Submitted:
    generation: Generation
    queued: bool


@dataclass(slots=True)
class _Stop:
    key: Key
    how: Stopped


@dataclass(slots=True)
class _Drop:
    holder: str


class BatchingLoop:
    """A Runner over an in-process engine. `limit`: generations in flight at most (more wait inside, in order);
    `target_step_s`: seconds that a step with prefill should take beside generations that decode, 0: no matter.

    `offload`: room for KV that is moved out of the engine, if its kind can be. It is put back where that takes less
    time than `prefill_seconds` says of computing its prompt again.
    """

    def __init__(
        self,
        engine: Engine,
        budgets: Budgets,
        limit: int,
        *,
        reuse: PrefixReuse = "exact",
        target_step_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        offload: OffloadBudget = NO_OFFLOAD,
        prefill_seconds: PrefillSeconds = REFERENCE_PREFILL,
    ) -> None:
        self.engine = engine
        self.budgets = budgets
        self.limit = limit
        usage = engine.kv_usage()
        self.figures = Telemetry(budgets, engine.bytes_per_token, usage, clock)
        can = engine.capability()
        self._kv_positions = min(usage.total, can.max_positions)
        self._most = min(can.max_sessions, budgets.active_cap)
        self._wake = Bell()
        self._keeps = can.prefix_share and reuse != "off"
        self._offloads = self._keeps and can.offload and bool(offload)
        residence = Residence(
            engine,
            self.figures,
            overcommit=budgets.kv_overcommit,
            reuse=reuse,
            store=OffloadStore(offload, clock=clock, wake=self._wake.ring) if self._offloads else None,
            prefill_seconds=prefill_seconds,
        )
        self._holders = residence.holders
        self._scheduler = Scheduler(
            engine, residence, self.figures, slots=self.effective_limit(), target_step_s=target_step_s
        )
        #: Prompt tokens that a tick prefills in any case, as far as there are so many.
        self._least_prefill = 1 if target_step_s else budgets.max_prefill_tokens_per_tick
        self._inbox: deque[_Submitted | _Stop | _Drop | Hint] = deque()
        self._desk = HintDesk()
        #: Hints that have been read and not carried out yet, in order.
        self._hints: list[Hint] = []
        self._holdings = Holdings()
        self._thread: threading.Thread | None = None
        self._sink: EventSink | None = None
        self._stopping = False
        self._progress = 0
        self._unchecked = False
        #: Guards what admission looks at, and that a cancel comes behind its job; held for moments, never over a step.
        self._lock = threading.Lock()
        self._known: set[Key] = set()
        self._ended: OrderedDict[Key, None] = OrderedDict()
        self._in_flight = 0
        self._queued = 0
        #: Sessions that found no room in the last tick.
        self._ahead = 0

    # -- what other threads call -------------------------------------------------------------------------------------

    def start(self, sink: EventSink) -> None:
        """Begin to run in a thread of its own."""
        self._sink = sink
        self._thread = threading.Thread(target=self._run, name="genpool-engine", daemon=True)
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Take a job. Raises InvalidRequest when it can never run here, QueueFull or Refused (`duplicate`) when it may
        run elsewhere or later."""
        decision = self.admit(generation)
        if decision.accepted:
            return
        message = f"The request was refused: {decision.detail}."
        if decision.reason is Reason.QUEUE_FULL:
            raise QueueFull(message, retry_after_s=1)
        if decision.reason is Reason.DUPLICATE:
            raise Refused(message, code="duplicate")
        param = "max_tokens" if decision.reason is Reason.KV_BUDGET else None
        raise InvalidRequest(message, param=param, code=_CODES[decision.reason])

    def admit(self, generation: Generation) -> Decision:
        """Decide about a job, and take it if it is accepted."""
        key = (generation.job, generation.attempt)
        request = Request(
            generation.job, len(generation.prompt), generation.max_tokens, generation.n, generation.attempt
        )
        with self._lock:
            usage = Usage(
                slots=self.effective_limit(),
                in_flight=self._in_flight,
                ahead=self._ahead,
                queued=self._queued,
                kv_positions=self._kv_positions,
                is_known=key in self._known or key in self._ended,
            )
            decision = decide(request, self.budgets, usage)
            if decision.accepted:
                queued = decision.reason is Reason.QUEUED
                self._in_flight += generation.n
                self._queued += generation.n * queued
                self._known.add(key)
                self._inbox.append(_Submitted(generation, queued))
            else:
                self.figures.rejected_for(decision.reason)
        self._wake.ring()
        return decision

    def cancel(self, job: str, attempt: int, *, how: Stopped = "cancelled") -> bool:
        """Stop a job before the next step, without any event; `how` it counts. False: it is not here (any more)."""
        with self._lock:
            known = (job, attempt) in self._known
            if known:
                self._inbox.append(_Stop((job, attempt), how))
        if known:
            self._wake.ring()
        return known

    def holdings(self) -> dict[str, int]:
        """Resident tokens by holder, as of the last turn: the positions of KV that its live sessions have, room they
        were given and have not filled included, and that are kept for it. Each counts once, for the holder that was
        here first; 0 where a holder shares all it has. What sessions without a holder have, and what is only cached,
        is left out. Where KV is in sequences of one size (llama.cpp), whole sequences count."""
        return dict(self._holdings.tokens)

    def offloaded(self) -> frozenset[str]:
        """Holders of whom there is KV outside the engine, as of the last turn."""
        return self._holdings.offloaded

    def return_seconds_per_token(self) -> float:
        """What a position of a holder's KV takes to leave the engine and to come back; infinity where none ever was."""
        return self._holders.return_seconds_per_token()

    def resident_tokens(self) -> int:
        """All positions of KV that sessions or holders have, as of the last turn: those of `holdings`, and of sessions
        without a holder."""
        return self.figures.usage.held

    def drop_holder(self, holder: str) -> None:
        """Nothing needs to be kept for this holder any more, in the engine or outside. Its live sessions go on."""
        self._inbox.append(_Drop(holder))
        self._wake.ring()

    def hint(self, holder: str, action: HintAction, *, expires_s: float = EXPIRES_S) -> HintAnswer:
        """What is to become of the KV that is kept for a holder: `retain` it, as the last to be given up; `offload` it
        out of the engine; or `drop` it. How an accepted hint ends is told by `hint_results`; it has freed nothing
        until then, and expires when it could not be carried out for so long."""
        if not self._keeps or (action == "offload" and not self._offloads):
            return HintAnswer.UNSUPPORTED
        known = self._holdings
        if holder not in known.tokens and (action == "offload" or holder not in known.offloaded):
            return HintAnswer.REJECTED
        if self._stopping or not self._desk.accept(holder):
            return HintAnswer.REJECTED
        self._inbox.append(Hint(holder, action, self.figures.clock() + expires_s))
        self._wake.ring()
        return HintAnswer.ACCEPTED

    def hint_results(self) -> list[HintResult]:
        """How accepted hints have ended since the last call, in order."""
        return self._desk.results()

    def capacity(self) -> RunnerCapacity:
        """Effective limit and choices in flight."""
        return RunnerCapacity(effective=self.effective_limit(), in_flight=self._in_flight)

    def waiting(self) -> int:
        """Choices that found no slot or no room in the last turn. Others in flight that have none yet came since, and
        are about to be looked at."""
        return self._scheduler.waiting

    def effective_limit(self) -> int:
        """The configured limit, clamped by the budgets and by what the engine can honestly do."""
        return max(1, min(self.limit, self._most))

    def set_limit(self, limit: int) -> None:
        """Generations in flight at most from now on; running ones finish."""
        self.limit = max(1, limit)
        self._wake.ring()

    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def progress(self) -> int:
        """Rises with every turn, idle turns included."""
        return self._progress

    def telemetry(self) -> dict[str, Any]:
        """JSON-safe figures without session content."""
        active = self._scheduler.active
        return {
            **self.figures.data(active=active, waiting=max(0, self._in_flight - active)),
            "effective_target_inflight": self.effective_limit(),
            "runtime_inflight": self._in_flight,
        }

    def stop(self) -> list[Generation]:
        """Stop after the current step, free all KV, and return the jobs that had not ended."""
        self._stopping = True
        self._wake.ring()
        if self._thread is not None:
            self._thread.join()
        self._read_mail()
        left = self._scheduler.generations()
        for generation in left:
            self._scheduler.stop((generation.job, generation.attempt), None)
        for hint in self._hints:
            self._desk.close(hint.expired())
        self._hints.clear()
        self._holders.close()
        self._account(self._scheduler.report())
        self.figures.see(self.engine.kv_usage())
        self._publish()
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
            report = self.tick()
            if report.events:
                self._sink.deliver(report.events)
            if not report.did_work and not report.events and not self._inbox:
                self._check_once()
                self._wake.wait(IDLE_WAIT_S)

    def tick(self) -> Tick:
        """One turn: read the mail, then whatever the scheduler does."""
        self._read_mail()
        self._scheduler.set_slots(self.effective_limit())
        if self._hints:
            # First what the disk has done: it may be what they wait for, and nobody wakes the thread for it again.
            self._scheduler.poll()
            self._hints = [hint for hint in self._hints if not self._carried_out(hint)]
        report = self._scheduler.tick()
        self._account(report)
        self._publish()
        self._ahead = self._scheduler.waiting
        self._unchecked = self._unchecked or report.did_work
        return report

    def _read_mail(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, _Submitted):
                self._scheduler.submit(item.generation, queued=item.queued)
            elif isinstance(item, _Stop):
                self._scheduler.stop(item.key, item.how)
            elif isinstance(item, Hint):
                self._hints.append(item)
            else:
                self._scheduler.drop_holder(item.holder)

    def _carried_out(self, hint: Hint) -> bool:
        """Whether the hint has ended, well or not."""
        if self.figures.clock() > hint.expires_s:
            self._holders.abandon(hint)
            result: HintResult | None = hint.expired()
        else:
            result = self._scheduler.apply(hint)
        if result is not None:
            # Who learns of it sees its effect.
            self.figures.see(self.engine.kv_usage())
            self._publish()
            self._desk.close(result)
        return result is not None

    def _publish(self) -> None:
        """Let others see who has what."""
        news = self._holders.news(self.figures.usage)
        if news is not None:
            self._holdings = news

    def _account(self, report: Tick) -> None:
        """Let admission see what has left."""
        if not (report.left or report.unqueued):
            return
        with self._lock:
            self._in_flight -= report.left
            self._queued -= report.unqueued
            for key in report.ended:
                self._known.discard(key)
                self._ended[key] = None
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def _check_once(self) -> None:
        """After work, when there is time. What contradicts itself must not go on: this ends the thread, and with it
        the process."""
        if self._unchecked:
            self.check_integrity()
            self._unchecked = False

    def check_integrity(self) -> None:
        """Raises IntegrityError when books contradict each other. For the engine's thread."""
        self._scheduler.check_integrity()

    def run_to_completion(self, after_tick: Callable[[Sequence[Event]], None] | None = None) -> list[Event]:
        """Tick until all that was submitted has ended; for a loop without a thread. Returns the events. `after_tick`
        sees each tick's, and may cancel.

        Raises RuntimeError, with the number of sessions that are pending, after more ticks than it can honestly take.
        """
        self._read_mail()
        live = self._scheduler.live()
        new_tokens = sum(session.generation.max_tokens for session in live)
        prompts = [session.prompt_tokens for session in live]
        chunks = most_chunks(prompts, self._least_prefill, self.engine.prefill_grid)
        guard = completion_guard(new_tokens + chunks, self._scheduler.active, len(live) - self._scheduler.active)
        events: list[Event] = []
        for _ in range(guard):
            if not self._in_flight:
                self.check_integrity()
                return events
            told = self.tick().events
            events += told
            if after_tick is not None:
                after_tick(told)
        raise RuntimeError(f"{self._in_flight} sessions are still pending after {guard} ticks")

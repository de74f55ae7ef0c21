"""The outlet: the thread that makes a rank's output durable, and that learns which jobs the rank has lost.

The engine's thread drops events here and never waits for the network. The outlet gathers them by job, writes many jobs
in one round trip, hints to waiting nodes, renews leases, and tells the runner to drop what is no longer ours.

Flush policy: a job's first token and its end at once; tokens of a job that somebody follows at once too, but no more
often than a hundred times a second, or four hundred times where no other is followed; else every `flush_idle_ms`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import redis

from pool.errors import StateUnavailable
from pool.rules import jobs
from pool.store.delivery import Delivery
from pool.store.handouts import Ending, Handout, Lease, Write, Written, failed
from pool.store.keys import wants_tokens
from pool.store.log import MAX_ENTRY_TOKENS, LogEntry
from pool.store.placements import Outcome
from pool.store.records import Output
from pool.store.sharing import Sharing
from pool.store.taking import BATCH
from pool.store.trials import survived
from tasks.ports import Event, Finished, GivenBack, Runner, Stopped, Tokens
from workers.bell import Bell

log = logging.getLogger("genpool.outlet")

#: Tokens that may wait to be stored before the runner pauses: when the state server is away, it does not run ahead for
#: ever.
CONGESTION_TOKENS = 8192
#: Between two writes of a job that somebody follows: so long for each such job there is, and never longer than the
#: second. No reader notices, and a fast engine with many readers would spend more on telling than on generating.
FOLLOWED_EACH_S = 0.0025
FOLLOWED_S = 0.01
#: After a failed round trip; well under half a lease, so that a short outage costs no lease.
RETRY_S = 0.2
#: How long a leaving rank tries to hand back what it holds, in leases. Nobody takes a job from it before one has passed
#: since the state server came back, so a deploy during an outage shall not end before that.
HAND_BACK_LEASES = 2

STATE_ERRORS = (redis.exceptions.RedisError, StateUnavailable, OSError)


def spacing_s(followed: int) -> float:
    """Between two writes of a job that somebody follows, where so many are."""
    return min(FOLLOWED_S, FOLLOWED_EACH_S * followed)


@dataclass(slots=True, eq=False)
class Held:
    """A begun job of this rank: its fence, and the log entries that are not yet known to be stored. `opened`: all
    events that came before it have been taken."""

    handout: Handout
    next_seq: int
    watch: str
    entries: list[LogEntry] = field(default_factory=list)
    oldest_s: float = 0.0
    written_s: float = 0.0
    ending: Ending | None = None
    flushed: bool = False
    sent: int = 0
    opened: bool = False
    followed: bool = False

    def __post_init__(self) -> None:
        self.watched_by(self.watch)

    def watched_by(self, watch: str) -> None:
        """Who wants hints now; whoever follows wants the tokens as they come."""
        self.watch = watch
        self.followed = any(map(wants_tokens, watch.split()))

    @property
    def lease(self) -> Lease:
        """Its fence."""
        return self.handout.lease

    def add(self, tokens: Tokens, now_s: float) -> None:
        """Queue tokens, merged into the last entry when that is of the same choice and was never sent: one that was
        sent may be stored although no reply came, so its bounds must stay."""
        if not self.entries:
            self.oldest_s = now_s
        last = self.entries[-1] if len(self.entries) > self.sent else None
        choice, ids, text, logprobs = tokens.choice, tokens.token_ids, tokens.text, tokens.logprobs
        if last is not None and last.choice == choice and len(last.token_ids) + len(ids) <= MAX_ENTRY_TOKENS:
            self.entries[-1] = LogEntry(
                last.seq, choice, last.token_ids + ids, last.text + text, last.logprobs + logprobs
            )
        else:
            self.entries.append(LogEntry(self.next_seq, choice, ids, text, logprobs))
        self.next_seq += len(ids)

    def due_s(self, idle_s: float, followed_s: float = FOLLOWED_S) -> float:
        """When it must be written; infinity while there is nothing to write. `followed_s`: after the last write, where
        somebody follows."""
        if self.ending is not None:
            return 0.0
        if not self.entries:
            return math.inf
        if not self.flushed:
            return 0.0
        return self.written_s + followed_s if self.followed else self.oldest_s + idle_s

    def write(self) -> Write:
        """All that is not yet stored."""
        first = self.entries[0].seq if self.entries else self.next_seq
        self.sent = len(self.entries)
        return Write(self.lease, first, tuple(self.entries), self.ending)


class Watchdog:
    """Tells whether a runner's turn counter has stood still for too long; asked at least once a second by several."""

    def __init__(self, runner: Runner, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._runner = runner
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked_s = clock()
        self._seen = (runner.progress(), self._asked_s)

    def is_stalled(self) -> bool:
        """Whether no turn was made since the timeout. Nobody asking for half of it means that the whole process was
        stopped: then the runner has its time again."""
        turns, now_s = self._runner.progress(), self._clock()
        if turns != self._seen[0] or now_s - self._asked_s > self._timeout_s / 2:
            self._seen = (turns, now_s)
        self._asked_s = now_s
        return now_s - self._seen[1] > self._timeout_s


#: Called in the outlet's thread when a job has left the rank, with its state and, when it ended here, how.
OnLeft = Callable[[Handout, str, Ending | None], None]
#: What a completed job tells of its Program, None for a job of none. In the outlet's thread.
OutcomeOf = Callable[[Handout, Finished], Outcome | None]


class Outlet:
    """An EventSink over a Delivery. `engine`: what endings name as theirs, "" for an engine whose bytes may vary."""

    def __init__(
        self,
        delivery: Delivery,
        runner: Runner,
        *,
        flush_idle_ms: int,
        renew_ms: int,
        stall_timeout_s: float,
        on_left: OnLeft,
        engine: str = "",
        outcome_of: OutcomeOf = lambda *_: None,
        sharing: Sharing | None = None,
    ) -> None:
        self._delivery = delivery
        self._runner = runner
        self._flush_idle_s = flush_idle_ms / 1000
        self._renew_s = renew_ms / 1000
        self._on_left = on_left
        self._engine = engine
        self._outcome_of = outcome_of
        self._sharing = Sharing(delivery.model, delivery.rank) if sharing is None else sharing
        self._events: deque[Event | Held] = deque()
        self._held: dict[str, Held] = {}
        #: Lost to the sweep, while this rank lives.
        self._outlived: deque[Lease] = deque()
        #: Begun here, and to be given back to the queue because this attempt cannot go on.
        self._returned: deque[Lease] = deque()
        self._wake = Bell()
        self._unsent_tokens = 0
        self._nudged = False
        self._stopping = False
        self._failing = False
        self._next_renew_s = time.monotonic() + self._renew_s
        self._watchdog = Watchdog(runner, stall_timeout_s)
        self._thread = threading.Thread(target=self._run, name="genpool-outlet", daemon=True)

    # -- what other threads call -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to run in a thread of its own."""
        self._thread.start()

    def open(self, handout: Handout) -> bool:
        """Hold a begun job; must come before the runner can deliver events of it.

        False: the job goes back to the queue, for the runner still has an attempt of this number and could not tell the
        two apart. A state server that came back with less than it had confirmed counts attempts anew.
        """
        lease = handout.lease
        former = self._held.get(lease.token)
        if former is not None:
            # This rank lost the job, and got it back before it had noticed.
            self._lose(former, jobs.QUEUED)
        if self._runner.cancel(lease.token, lease.attempt, how="failed"):
            self._returned.append(lease)
            self._wake.ring()
            return False
        held = Held(handout, next_seq=handout.logged, watch=handout.watch)
        self._held[lease.token] = held
        # Events of a former attempt of this number may still lie there; its own come behind this.
        self._events.append(held)
        return True

    def refuse(self, handout: Handout) -> None:
        """The runner did not take a job that was opened: it goes back to the queue."""
        held = self._held.get(handout.lease.token)
        if held is not None and held.handout is handout:
            self._leave(held, jobs.QUEUED, None)
        self._returned.append(handout.lease)
        self._wake.ring()

    def deliver(self, events: Sequence[Event]) -> None:
        """Take the runner's events."""
        self._events.extend(events)
        self._wake.ring()

    def congested(self) -> bool:
        """Whether the state server is so far behind that the runner should pause."""
        return len(self._events) + self._unsent_tokens > CONGESTION_TOKENS

    def nudge(self) -> None:
        """Something about a held job has changed (a cancel, a new watcher): look at all of them now."""
        self._nudged = True
        self._wake.ring()

    def holds(self, handout: Handout) -> bool:
        """Whether this very attempt is still held."""
        held = self._held.get(handout.lease.token)
        return held is not None and held.handout is handout

    def is_unproven(self, handout: Handout) -> bool:
        """Whether a held job of this attempt has not yet stored a token: it may still kill its worker."""
        held = self._held.get(handout.lease.token)
        return held is not None and held.handout is handout and not held.flushed

    def has_unproven(self) -> bool:
        """Whether any held job may be the one that kills its worker: it is on trial, or has never shown a token. One
        that showed some in its last attempt, and is only fed them again, is as good as those that show them now."""
        return any(
            not held.flushed and (held.handout.alone or not held.handout.logged) for held in list(self._held.values())
        )

    def held(self) -> list[Held]:
        """The jobs this rank holds now."""
        return list(self._held.values())

    def is_stalled(self) -> bool:
        """Whether the runner has made no turn for the stall timeout. One that was told to stop makes none."""
        return not self._stopping and self._watchdog.is_stalled()

    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Write everything that is left, hand back what has not ended, and end the thread."""
        self._stopping = True
        self._wake.ring()
        if self._thread.is_alive():
            self._thread.join()

    # -- the outlet's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._pause_s())
            self._turn(everything=False)
        deadline_s = time.monotonic() + HAND_BACK_LEASES * self._delivery.lease_ms / 1000
        while not (self._turn(everything=True) and self._hand_back()) and time.monotonic() < deadline_s:
            time.sleep(RETRY_S)

    def _turn(self, *, everything: bool) -> bool:
        """One turn; False when the state server failed it. Nothing is lost then: the same is tried again."""
        try:
            self._gather()
            # Leases first: what one job's write may raise must not cost the others theirs.
            self._renew()
            self._flush(everything)
            self._tell()
            self._give_back()
            self._report_survival()
        except STATE_ERRORS as error:
            if not self._failing:
                log.warning("state server: %s; %d jobs held, writing again", type(error).__name__, len(self._held))
            self._failing = True
            time.sleep(RETRY_S)
            self._wake.ring()
            return False
        self._failing = False
        return True

    def _pause_s(self) -> float:
        now_s = time.monotonic()
        due_s = self._due_s(list(self._held.values()))
        return max(0.0, min([self._next_renew_s, *due_s]) - now_s)

    def _due_s(self, jobs: Sequence[Held]) -> list[float]:
        """When each must be written."""
        followed_s = spacing_s(sum(held.followed for held in jobs))
        return [held.due_s(self._flush_idle_s, followed_s) for held in jobs]

    def _gather(self) -> None:
        now_s = time.monotonic()
        while self._events:
            event = self._events.popleft()
            if isinstance(event, Held):
                event.opened = True
                continue
            held = self._held.get(event.job)
            if held is None or not held.opened or held.lease.attempt != event.attempt:
                continue
            if isinstance(event, Tokens):
                held.add(event, now_s)
                self._unsent_tokens += len(event.token_ids)
            elif isinstance(event, Finished):
                held.ending = _ending(event, self._engine)
                held.ending.outcome = self._outcome_of(held.handout, event)
            elif isinstance(event, GivenBack):
                # What is not stored yet nobody has seen.
                self._returned.append(held.lease)
                self._leave(held, jobs.QUEUED, None)
            else:
                held.ending = failed(event.code, event.message)

    def _flush(self, everything: bool) -> None:
        now_s = time.monotonic()
        jobs = list(self._held.values())
        due = [
            held
            for held, due_s in zip(jobs, self._due_s(jobs), strict=True)
            if due_s <= now_s or (everything and held.entries)
        ]
        for start in range(0, len(due), BATCH):
            part = due[start : start + BATCH]
            answers = self._delivery.write_each(held.write() for held in part)
            news: dict[str, list[str]] = {}
            for held, answer in zip(part, answers, strict=True):
                self._settle(held, answer, news)
            self._delivery.hint(news)

    def _tell(self) -> None:
        """What has ended makes room here; the intake may be blocked in a read."""
        capacity = self._runner.capacity()
        self._sharing.tell(self._delivery.writer, capacity.in_flight, capacity.effective)

    def _give_back(self) -> None:
        while self._returned:
            self._delivery.hand_back([self._returned[0]])
            self._returned.popleft()

    def _report_survival(self) -> None:
        while self._outlived:
            survived(self._delivery.writer, self._delivery.keys, [self._outlived[0]])
            self._outlived.popleft()

    def _settle(self, held: Held, answer: Written, news: dict[str, list[str]]) -> None:
        if answer.code == "stale" and held.ending is not None and answer.detail == held.ending.state:
            # Our own ending had landed, its reply had not.
            self._leave(held, held.ending.state, held.ending)
        elif answer.code == "stale":
            self._lose(held, answer.detail)
        elif answer.code == "ok":
            held.watched_by(answer.watch)
            held.flushed, held.written_s = True, time.monotonic()
            self._drop_entries(held, len(held.entries))
            if held.ending is not None:
                for node in answer.watch.split():
                    news.setdefault(node, []).append(held.lease.token)
                self._leave(held, held.ending.state, held.ending)
        elif answer.log_end < (held.entries[0].seq if held.entries else held.next_seq):
            # The log is shorter than what had been stored: the state server came back with less than it had confirmed.
            # The missing tokens are here no more; a new attempt replays the log and draws them again.
            self._returned.append(held.lease)
            self._lose(held, jobs.QUEUED)
        else:
            # A repeated write had landed after all: keep only what lies behind the log's end, and send that next.
            held.flushed = held.flushed or answer.log_end > held.handout.logged
            self._drop_entries(held, sum(entry.seq < answer.log_end for entry in held.entries))
            self._wake.ring()

    def _drop_entries(self, held: Held, count: int) -> None:
        """The first entries are stored, or nobody wants them any more."""
        self._unsent_tokens -= sum(len(entry.token_ids) for entry in held.entries[:count])
        held.entries = held.entries[count:]
        held.sent = 0

    def _renew(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_renew_s and not self._nudged:
            return
        self._nudged = False
        if self.is_stalled():
            # Progress renews, not life: another worker shall have these jobs.
            return
        held = list(self._held.values())
        for each, answer in zip(held, self._delivery.renew([each.lease for each in held]), strict=True):
            if answer.code == "stale":
                self._lose(each, answer.detail)
            else:
                each.watched_by(answer.watch)
        self._next_renew_s = now_s + self._renew_s

    def _lose(self, held: Held, state: str) -> None:
        """The attempt is over (cancelled, or taken back by the sweep): drop the work."""
        if state in (jobs.QUEUED, jobs.RUNNING) and not self.is_stalled():
            self._outlived.append(held.lease)
            self._wake.ring()
        # In this order: whoever submits it just now looks afterwards whether it is still held.
        self._leave(held, state, None)
        how: Stopped = "cancelled" if state == jobs.CANCELLED else "failed"
        self._runner.cancel(held.lease.token, held.lease.attempt, how=how)

    def _leave(self, held: Held, state: str, ending: Ending | None) -> None:
        self._drop_entries(held, len(held.entries))
        if self._held.get(held.lease.token) is held:
            del self._held[held.lease.token]
        self._on_left(held.handout, state, ending)

    def _hand_back(self) -> bool:
        held = list(self._held.values())
        try:
            self._delivery.hand_back([each.lease for each in held])
        except STATE_ERRORS as error:
            log.warning("hand-back: %s", type(error).__name__)
            return False
        for each in held:
            self._leave(each, jobs.QUEUED, None)
        return True


def _ending(event: Finished, engine: str) -> Ending:
    return Ending(
        state=jobs.state_of(tuple(output.finish_reason for output in event.outputs)),
        outputs=tuple(Output(o.text, o.finish_reason, o.tokens) for o in event.outputs),
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens or 0,
        engine=engine,
    )

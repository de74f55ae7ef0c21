"""All waits of one API process, over one pub/sub connection and one reader thread.

| event | what happens |
|---|---|
| a hint brings a job's new entries | the reader hands them to each waiter that has all that came before them |
| a hint names a job, or entries are missing | the reader reads it for its waiters, all such jobs in one round trip |
| no news of a job for 2 to 3 s | the reader reads it anyway (250 jobs a second): a lost hint costs seconds, no hang |
| the subscription was (re)made | every waiter is read: what was said meanwhile is not lost |
| a third of the orphan grace has passed | the store is told that the jobs waited for here still have a reader |
| the state server is away | the reader backs off and tries again; waiters time out by their own clocks |
| the state server is read-only | the reader goes on reading; what it has to write waits |
| a request could not tell the state server what becomes of its job | the reader tells it as soon as it is back |

A waiter is registered before its job is submitted, so no hint can come too early. The hint is only a hint: what waiters
receive are views of the record and its log, each from the waiter's own cursor, in order and without gaps.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import redis

from pool.errors import GenpoolError, JobNotCancellable, JobUnknown, StateUnavailable
from pool.rules import jobs
from pool.store.connection import Client
from pool.store.hints import Pushed, Subscription, hint_of
from pool.store.ids import JobRef
from pool.store.jobs import JobStore, View
from pool.store.keys import END_ONLY, node_channel
from pool.store.nodes import is_spread
from pool.store.records import JobRecord

log = logging.getLogger("genpool.webapp")

POLL_S = (2.0, 3.0)
BATCH = 100
TURN_S = 0.2
#: Silent waiters are looked for this often, and read so many at a time: what is hinted at meanwhile waits for it.
LOOK_S = 0.1
LOOKED_AT = 25
#: Well below the shortest lease: when the state server is back, readers have that long to say that they are there.
BACKOFF_S = (0.05, 0.4)
#: After a write that the state server did not take.
MUTE_S = 0.3
SETTLE_S = 0.05

#: No news, and none is to be had.
AWAY = StateUnavailable("The state server cannot be reached.")

#: Told how many more (or fewer) there are now; called by several threads.
OnCount = Callable[[int], None]

#: What a waiter can be handed: news, or that its job is gone or unreadable.
News = View | GenpoolError


def no_count(by: int) -> None:
    """An OnCount that nobody looks at."""


class Waiter:
    """One request's wait for one job. Made by `Waits.open`; whoever made it calls `close`."""

    def __init__(self, ref: JobRef, cursor: int, waits: Waits) -> None:
        self.ref = ref
        self.cursor = cursor
        self.armed = False
        self.ended = False
        self.due_s = time.monotonic() + random.uniform(*POLL_S)
        self._inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._waits = waits
        self._heard = ("", 0)
        self._seen = cursor
        #: As it was last read by the reader, while it says that the job runs.
        self._running: JobRecord | None = None

    def arm(self) -> None:
        """The job is stored: from now on, not finding it means that it is gone."""
        self.armed = True

    def saw(self, view: View) -> None:
        """The caller read this by itself: its entries need not come again."""
        self._seen = max(self._seen, view.cursor)

    def next(self, timeout_s: float) -> View | None:
        """The next view, with the entries that follow what was seen, None when there was no news in time.

        Raises JobUnknown when the job is gone.
        """
        try:
            news = self._inbox.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            self._waits.ensure_reader()
            return None
        if isinstance(news, GenpoolError):
            raise news
        fresh = news.cursor - self._seen
        self.saw(news)
        if fresh >= len(news.entries):
            return news
        return View(news.record, news.entries[-fresh:] if fresh > 0 else (), news.cursor)

    def deliver(self, news: News) -> None:
        """Hand over news, unless it is what was heard before; called by the reader alone. An end is the last news."""
        self.due_s = time.monotonic() + random.uniform(*POLL_S)
        if isinstance(news, View):
            heard = (news.record.state, news.cursor)
            if heard == self._heard:
                return
            self._heard, self.cursor = heard, news.cursor
            self.ended = news.record.terminal
            self._running = news.record if news.record.state == jobs.RUNNING else None
        else:
            self.ended = True
        self._inbox.put(news)

    def push(self, pushed: Pushed) -> bool:
        """Hand over entries that came with a hint; called by the reader alone. False: the job must be read, because it
        was not, or because entries before these are missing."""
        entries, known = pushed.entries, self.cursor - pushed.first
        if self._running is None or known < 0:
            return False
        if known < len(entries):
            self.deliver(View(self._running, entries[known:], pushed.first + len(entries)))
        return True

    def close(self) -> None:
        """Stop waiting. Idempotent."""
        self._waits.forget(self)


class Waits:
    """The reader and its waiters. The thread starts with the first waiter of a process, never before a fork."""

    def __init__(self, store: JobStore, client: Client, *, grace_ms: int) -> None:
        self._every_hold_s = grace_ms / 3000
        #: How long a job is held for its reader each time. It dies just before the next time at worst: even then nobody
        #: has waited for the whole grace when this is over.
        self.hold_ms = grace_ms * 4 // 3
        self._next_hold_s = 0.0
        self._mute_until_s = 0.0
        self.on_change: OnCount = no_count
        self._next_look_s = 0.0
        self._more_due = False
        self.node_id = secrets.token_hex(8)
        self._store = store
        self._client = client
        self._lock = threading.Lock()
        self._waiters: dict[str, set[Waiter]] = {}
        self._owed: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._delay_s = BACKOFF_S[0]
        self._stopping = threading.Event()

    def __len__(self) -> int:
        """Waiters registered now."""
        with self._lock:
            return sum(map(len, self._waiters.values()))

    def open(self, ref: JobRef, cursor: int = 0) -> Waiter:
        """Register a waiter that has seen the log up to `cursor`."""
        waiter = Waiter(ref, cursor, self)
        with self._lock:
            self._waiters.setdefault(ref.token, set()).add(waiter)
        self.on_change(1)
        self.ensure_reader()
        return waiter

    def follow(self, ref: JobRef, cursor: int) -> Waiter:
        """Register a waiter for a stored job and have this node told of its news. Raises JobUnknown."""
        waiter = self.open(ref, cursor)
        waiter.arm()
        try:
            self._store.watch(ref, self.node_id, hold_ms=self.hold_ms)
            # What came between the caller's read and the watch is found at once by hinting ourselves.
            self._store.notify(ref.token, watch=self.node_id, rank="")
        except GenpoolError:
            waiter.close()
            raise
        return waiter

    def abandon(self, ref: JobRef) -> None:
        """Cancel a job that nobody will read, now or as soon as the state server is back."""
        try:
            self._cancel(ref)
        except StateUnavailable:
            self.abandon_later(ref)

    def abandon_later(self, ref: JobRef) -> None:
        """Cancel a job that nobody will read, as soon as the state server takes writes again."""
        self._owe(partial(self._store.void, ref))

    def let_go(self, ref: JobRef) -> None:
        """The job goes on without a reader, and is not cancelled for want of one; told to the state server now or as
        soon as it is back."""
        let_go = partial(self._store.read_on, [ref], 0)
        try:
            let_go()
        except StateUnavailable:
            self._owe(let_go)

    def _owe(self, write: Callable[[], None]) -> None:
        """Have the reader do what the state server did not take."""
        self._owed.append(write)
        self.ensure_reader()

    def settle(self, timeout_s: float) -> None:
        """Wait until the state server has taken all that it did not take before, or until the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while self._owed and time.monotonic() < deadline_s:
            time.sleep(SETTLE_S)

    def unwatch(self, waiter: Waiter) -> None:
        """Close a waiter whose job goes on, and stop the hints unless another waiter of this process wants them."""
        ref = waiter.ref
        waiter.close()
        with self._lock:
            wanted = ref.token in self._waiters
        if not wanted:
            try:
                for name in (self.node_id, self.node_id + END_ONLY):
                    self._store.unwatch(ref, name)
            except StateUnavailable:
                log.info("hints for a job go on: the state server is away")

    def close(self) -> None:
        """Stop the reader; for the end of the process."""
        self._stopping.set()
        thread = self._thread
        if thread is not None and self._pid == os.getpid():
            thread.join(timeout=2.0)

    def forget(self, waiter: Waiter) -> None:
        """Deliver nothing more to a waiter. Idempotent."""
        with self._lock:
            waiters = self._waiters.get(waiter.ref.token, set())
            known = waiter in waiters
            waiters.discard(waiter)
            if not waiters:
                self._waiters.pop(waiter.ref.token, None)
        if known:
            self.on_change(-1)

    def _cancel(self, ref: JobRef) -> None:
        try:
            self._store.cancel(ref)
        except (JobUnknown, JobNotCancellable):
            return

    # --- the reader

    def ensure_reader(self) -> None:
        """Start the reader if this process has none."""
        with self._lock:
            if self._thread is None or self._pid != os.getpid() or not self._thread.is_alive():
                self._pid = os.getpid()
                self._thread = threading.Thread(target=self._run, name="genpool-waits", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow_channel()
            except (redis.RedisError, StateUnavailable, OSError) as error:
                if self._delay_s == BACKOFF_S[0]:
                    log.warning("the state server is away (%s); waits go on when it is back", type(error).__name__)
            self._stopping.wait(self._delay_s * random.uniform(0.5, 1.0))
            self._delay_s = min(self._delay_s * 2, BACKOFF_S[1])

    def _follow_channel(self) -> None:
        """Subscribe and serve until the connection fails or the process ends."""
        subscription = Subscription(self._client, node_channel(self.node_id))
        try:
            self._read(self._every())
            self._delay_s = BACKOFF_S[0]
            while not self._stopping.is_set():
                self._read(self._hinted(subscription))
                if time.monotonic() >= self._next_look_s:
                    self._tell()
                    self._read(self._due())
        finally:
            subscription.close()

    def _hinted(self, subscription: Subscription) -> list[Waiter]:
        """Waits for a hint. Entries that came with it are handed over at once; else takes what other hints are there,
        and returns the waiters whose jobs must be read: one round trip for all of them."""
        tokens: set[str] = set()
        message = subscription.message(LOOK_S if self._more_due else TURN_S)
        while message is not None:
            hint = hint_of(message)
            if not isinstance(hint, Pushed):
                tokens.update(hint)
            elif [waiter for waiter in self._of([hint.token]) if not waiter.push(hint)]:
                tokens.add(hint.token)
            more = 0 < len(tokens) < BATCH and subscription.has_more()
            message = subscription.message(TURN_S) if more else None
        return self._of(tokens) if tokens else []

    def _every(self) -> list[Waiter]:
        with self._lock:
            return [waiter for waiters in self._waiters.values() for waiter in waiters if not waiter.ended]

    def _of(self, tokens: Iterable[str]) -> list[Waiter]:
        with self._lock:
            return [waiter for token in tokens for waiter in self._waiters.get(token, ()) if not waiter.ended]

    def _due(self) -> list[Waiter]:
        """Some of those that heard nothing for long: the rest has its turn next time."""
        now_s = time.monotonic()
        self._next_look_s = now_s + LOOK_S
        due = [waiter for waiter in self._every() if waiter.due_s <= now_s]
        self._more_due = len(due) > LOOKED_AT
        return due[:LOOKED_AT]

    def _read(self, waiters: Sequence[Waiter]) -> None:
        for start in range(0, len(waiters), BATCH):
            part = waiters[start : start + BATCH]
            # Before the read: a job that is stored meanwhile, and its waiter armed, is not gone for not being found.
            armed = [waiter.armed for waiter in part]
            for waiter, was_armed, view in zip(part, armed, self._views(part), strict=True):
                if view is AWAY:
                    continue
                if view is not None:
                    waiter.deliver(view)
                elif was_armed:
                    waiter.deliver(self._store.absence(waiter.ref))

    def _views(self, waiters: Sequence[Waiter]) -> Sequence[News | None]:
        """Views of all, in one round trip; if one job cannot be decoded, one by one; if a node of a cluster is away,
        model by model, without its ones' waiters hearing of it."""
        try:
            return self._store.views([(waiter.ref, waiter.cursor) for waiter in waiters])
        except StateUnavailable:
            models = {waiter.ref.tag for waiter in waiters}
            if not is_spread(self._client) or len(models) == 1:
                raise
            return self._views_by_model(waiters, models)
        except ValueError as error:
            if len(waiters) == 1:
                log.error("job %s cannot be decoded (%s)", waiters[0].ref, type(error).__name__)
                return [GenpoolError("This generation's record cannot be read.", code="unreadable_record")]
            return [self._views([waiter])[0] for waiter in waiters]

    def _views_by_model(self, waiters: Sequence[Waiter], models: set[str]) -> Sequence[News | None]:
        found: dict[Waiter, News | None] = {}
        away = AWAY
        for model in models:
            part = [waiter for waiter in waiters if waiter.ref.tag == model]
            try:
                found |= zip(part, self._views(part), strict=True)
            except StateUnavailable as error:
                away = error
        if not found:
            raise away
        return [found.get(waiter, AWAY) for waiter in waiters]

    def _tell(self) -> None:
        """What the reader writes. A server that takes no writes at the moment must not keep it from reading."""
        if time.monotonic() < self._mute_until_s:
            return
        for part in (self._pay, self._read_on):
            try:
                part()
            except StateUnavailable:
                self._mute_until_s = time.monotonic() + MUTE_S
                if not is_spread(self._client):
                    return

    def _read_on(self) -> None:
        """Tell the store, three times a grace, that the jobs waited for here have a reader."""
        now_s = time.monotonic()
        if now_s < self._next_hold_s:
            return
        by_model: dict[str, list[JobRef]] = {}
        for waiter in self._every():
            by_model.setdefault(waiter.ref.tag, []).append(waiter.ref)
        away: StateUnavailable | None = None
        for refs in by_model.values():
            try:
                for start in range(0, len(refs), BATCH):
                    self._store.read_on(refs[start : start + BATCH], self.hold_ms)
            except StateUnavailable as error:
                # In a cluster, the next model may be elsewhere: its readers must not seem to be gone.
                away = error
        if away is not None:
            raise away
        self._next_hold_s = now_s + self._every_hold_s

    def _pay(self) -> None:
        while self._owed:
            try:
                self._owed[0]()
            except StateUnavailable:
                # In a cluster, the next one may be for another node.
                self._owed.rotate(-1)
                raise
            self._owed.popleft()

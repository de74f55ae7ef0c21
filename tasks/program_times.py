"""How long a request of a Program waits at most: what an arrival and its job are told, from the rules of `force.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from pool.rules.programs.facts import Rank
from pool.rules.programs.force import force_ms, give_up_ms
from pool.store.programs import ProgramStore


@dataclass(frozen=True, slots=True)
class ArrivalTimes:
    """All in ms from the arrival on. `force_ms`, `deadline_ms`: as an Arrival has them; `queue_timeout_ms`: as its job
    has it."""

    force_ms: int
    deadline_ms: int
    queue_timeout_ms: int


class Patience:
    """Says how long a Program that begins to wait now is patient. The work that a rank has before it is looked at once
    an interval: it is an estimate, and an arrival shall not cost more than that."""

    def __init__(self, store: ProgramStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._settings = store.settings
        self._clock = clock
        self._seen: dict[str, tuple[float, Rank]] = {}
        self._lock = Lock()

    def times(self, rank: str, deadline_s: float | None) -> ArrivalTimes:
        """For a request that comes to `rank`, with its own deadline, None without one. Raises StateUnavailable."""
        seen = self._rank(rank)
        ahead = len(seen.waiting)
        bound_ms = max(give_up_ms(self._settings, 0, deadline_s), 1)
        is_shorter = deadline_s is not None and deadline_s < self._settings.queue_timeout_seconds
        return ArrivalTimes(
            force_ms=max(force_ms(seen, self._settings, 0, ahead=ahead), 1),
            # A longer one shortens nothing: the force wait is never longer than the queue timeout.
            deadline_ms=bound_ms if is_shorter else 0,
            queue_timeout_ms=bound_ms,
        )

    def _rank(self, rank: str) -> Rank:
        now_s = self._clock()
        with self._lock:
            known = self._seen.get(rank)
        if known is not None and now_s - known[0] < self._settings.metrics_interval_seconds:
            return known[1]
        seen = self._store.snapshot(rank).rank
        with self._lock:
            self._seen[rank] = (now_s, seen)
        return seen

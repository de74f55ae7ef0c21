"""What a rank's engine holds of Programs: the one place that asks the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.loop import BatchingLoop
from workers.outlet import Held


@dataclass(frozen=True, slots=True)
class Resident:
    """What was seen at one moment. `tokens`: of each Program whose KV is there, live sessions included; `waiting`,
    `running`: requests of all kinds that wait inside the engine or before it, and that it runs."""

    tokens: dict[str, int]
    waiting: int
    running: int


class ProgramResidence:
    """Called in the seat's thread; the loop answers by mail and by what it published last. `held`: the jobs that the
    rank holds."""

    def __init__(self, loop: BatchingLoop, held: Callable[[], Sequence[Held]]) -> None:
        self._loop = loop
        self._held = held

    def look(self, sent: int) -> Resident:
        """`sent`: jobs in the rank's stream a moment ago. What is not yet begun of them waits for the engine, unless
        there is room: then it is about to begin."""
        tokens = self._loop.holdings()
        capacity = self._loop.capacity()
        figures = self._loop.telemetry()
        unread = sent - sum(each.lease.placement is not None for each in self._held())
        full = capacity.in_flight >= capacity.effective
        return Resident(
            tokens=dict(tokens),
            waiting=int(figures["queue_depth"]) + (max(unread, 0) if full else 0),
            running=int(figures["active_sessions"]),
        )

    def drop(self, program: str) -> None:
        """Nothing shall be kept of this Program any more."""
        self._loop.drop_holder(program)

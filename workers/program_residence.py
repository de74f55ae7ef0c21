"""What a rank's engine holds of Programs: the one place that asks the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.hints import HintAction, HintAnswer, HintOutcome
from workers.loop import BatchingLoop
from workers.outlet import Held

APPLIED = HintOutcome.APPLIED


@dataclass(frozen=True, slots=True)
class Resident:
    """What was seen at one moment. `tokens`: of each Program whose KV is there, live sessions included; `waiting`,
    `running`: requests of all kinds that wait inside the engine or before it, and that it runs."""

    tokens: dict[str, int]
    waiting: int
    running: int


class ProgramResidence:
    """Called in the seat's thread; the loop answers by mail and by what it published last. `held`: the jobs that the
    rank holds; `on_pause`: what becomes of the KV of a Program that may come back."""

    def __init__(
        self, loop: BatchingLoop, held: Callable[[], Sequence[Held]], *, on_pause: HintAction = "drop"
    ) -> None:
        self._loop = loop
        self._held = held
        self._on_pause = on_pause
        #: Those whose KV could not leave the engine whole.
        self._stuck: set[str] = set()

    def look(self, sent: int) -> Resident:
        """`sent`: jobs in the rank's stream a moment ago. What is not yet begun of them waits for the engine, unless
        there is room: then it is about to begin."""
        results = self._loop.hint_results()
        self._stuck |= {each.holder for each in results if each.action == "offload" and each.outcome is not APPLIED}
        tokens = self._loop.holdings()
        self._stuck &= tokens.keys()
        capacity = self._loop.capacity()
        figures = self._loop.telemetry()
        unread = sent - sum(each.lease.placement is not None for each in self._held())
        full = capacity.in_flight >= capacity.effective
        return Resident(
            tokens=dict(tokens),
            waiting=int(figures["queue_depth"]) + (max(unread, 0) if full else 0),
            running=int(figures["active_sessions"]),
        )

    def leaves(self, program: str, *, paused: bool) -> None:
        """The engine shall hold nothing of this Program any more. Until that is told it holds it; whoever sees it again
        says it again."""
        action: HintAction = self._on_pause if paused and program not in self._stuck else "drop"
        if self._loop.hint(program, action) is HintAnswer.UNSUPPORTED:
            self._loop.drop_holder(program)

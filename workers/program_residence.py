"""What a rank's engine holds of Programs: the one place that asks the runner, and tells it what shall leave."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pool.store.program_views import Snapshot
from tasks.program_log import tell
from workers.hints import HintAnswer, HintOutcome
from workers.loop import BatchingLoop
from workers.outlet import Held


@dataclass(frozen=True, slots=True)
class Resident:
    """What was seen at one moment. `tokens`: of each Program whose KV is in the engine, live sessions included;
    `offloaded`: those of whom there is KV outside it; `waiting`, `running`: requests of all kinds that wait inside the
    engine or before it, and that it runs."""

    tokens: Mapping[str, int]
    offloaded: frozenset[str]
    waiting: int
    running: int
    #: All tokens that Programs have in the engine, None where it does not tell.
    held: int | None

    @property
    def programs(self) -> list[str]:
        """All that there is anything of."""
        return list(dict.fromkeys([*self.tokens, *self.offloaded]))


OnPause = Literal["drop", "offload"]


class Residence(Protocol):
    """What a rank's seat asks of whatever runs its model. Called in the seat's thread."""

    def look(self, sent: int, seen: Snapshot | None) -> Resident:
        """`sent`: jobs in the rank's stream a moment ago; `seen`: the rank as it was read then, None where nothing of
        Programs is there."""
        ...

    def return_seconds_per_token(self) -> float:
        """What a token of KV takes that leaves with its Program's place, and comes back with it; infinity where it does
        not come back."""
        ...

    def pause(self, program: str) -> None:
        """The Program has no place here, and may come back."""
        ...

    def drop(self, program: str) -> None:
        """Nothing shall be kept of this Program any more."""
        ...


class ProgramResidence:
    """Of an engine in this process: the loop answers by mail, and by what it published last. `held`: the jobs that the
    rank holds; `on_pause`: what becomes of a paused Program's KV."""

    def __init__(self, loop: BatchingLoop, held: Callable[[], Sequence[Held]], *, on_pause: OnPause = "drop") -> None:
        self._loop = loop
        self._held = held
        self._on_pause = on_pause
        #: Whose KV could not be moved out of the engine.
        self._stuck: set[str] = set()

    def look(self, sent: int, seen: Snapshot | None = None) -> Resident:  # noqa: ARG002 - the engine knows it all
        """`sent`: jobs in the rank's stream a moment ago. What is not yet begun of them waits for the engine, unless
        there is room: then it is about to begin. So is what the loop was given since its last turn. Who waits shuts the
        rank for a whole interval, and may send Programs elsewhere."""
        self._stuck = self._take_results()
        tokens, offloaded = self._loop.holdings(), self._loop.offloaded()
        capacity = self._loop.capacity()
        figures = self._loop.telemetry()
        unread = sent - sum(each.lease.placement is not None for each in self._held())
        full = capacity.in_flight >= capacity.effective
        return Resident(
            tokens=tokens,
            offloaded=offloaded,
            waiting=self._loop.waiting() + (max(unread, 0) if full else 0),
            running=int(figures["active_sessions"]),
            held=sum(tokens.values()),
        )

    def return_seconds_per_token(self) -> float:
        """By what was moved so far, if it is."""
        return self._loop.return_seconds_per_token() if self._on_pause == "offload" else math.inf

    def pause(self, program: str) -> None:
        """The Program has no place here, and may come back: its KV leaves the engine, as the settings say. It counts
        until it has."""
        leaves = self._on_pause == "offload" and program not in self._stuck
        if not leaves or self._loop.hint(program, "offload") is HintAnswer.UNSUPPORTED:
            self.drop(program)

    def drop(self, program: str) -> None:
        """Nothing shall be kept of this Program any more, in the engine or outside."""
        self._loop.drop_holder(program)

    def _take_results(self) -> set[str]:
        """How hints have ended; those whose KV did not leave by them."""
        results = self._loop.hint_results()
        for each in results:
            tell(
                logging.DEBUG,
                "kv_hint",
                program=each.holder,
                action=each.action,
                outcome=each.outcome,
                freed_tokens=each.freed_tokens,
                reason=each.reason or None,
            )
        return {each.holder for each in results if each.outcome is not HintOutcome.APPLIED}

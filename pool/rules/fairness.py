"""Whose job is next: lanes, and fairness between keys inside a lane.

The verbs do it in Lua, in the script that moves jobs into the stream (lua/lib/feed.lua); this is the same in Python,
small enough to be read, and tests hold the one against the other.

* Three lanes, strictly in order. While a lower lane waits, SHARE of the slot time that higher ones are given is owed to
  it; as soon as that covers what its next job is taken to need, that job goes first. While it may not, because all keys
  of the lane are at their caps, no more is owed.
* Inside a lane the *flow* (one fairness key in one lane) of the least virtual time goes first: slot time it was given,
  divided by its weight. Start-time fair queueing (Goyal, Vin, Cheng 1996), as in virtual token counters for LLMs.
* A job is charged when it is moved, with what a choice of its flow is taken to need; at its end with what it really
  took. One that never began costs nothing.
* A flow that was not served lately begins at the least virtual time of those that wait, or at that which the flow
  served last had before its job was charged, where that is less: those that wait now may all have had much. One that
  rests keeps its own, should that be more.
* A key may hold more than its cap of choices in flight only while nobody below theirs waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Lane = Literal["interactive", "normal", "batch"]
INTERACTIVE: Final = "interactive"
NORMAL: Final = "normal"
BATCH: Final = "batch"
#: The first served first; a lane's digit is its place.
LANES: tuple[Lane, ...] = (INTERACTIVE, NORMAL, BATCH)
#: The names that public clients have for them, as `service_tier`.
TIERS: Mapping[str, str] = {INTERACTIVE: "priority", NORMAL: "default", BATCH: "flex"}
#: What is owed to a lower lane of the slot time that higher ones are given while it waits.
SHARE = 0.1
#: What a choice of a key is taken to need before any has ended, ms.
FIRST_GUESS_MS = 1000
#: Largest weight of a key.
MOST_WEIGHT = 100


def next_guess(guess_ms: float, used_ms: float) -> int:
    """What the next choice of a flow is taken to need, after one that was taken to need `guess_ms` took `used_ms`."""
    return int((3 * guess_ms + used_ms) / 4 + 0.5)


def weighed(ms: float, n: int, weight: int) -> float:
    """What a job is charged with whose choices take `ms` each: in eighths, so that sums are exact."""
    return int(ms * n / weight * 8 + 0.5) / 8


@dataclass(slots=True)
class Waiting:
    """A job that waits. `cap`: choices of its key in flight while others wait, 0: any; `tells`: whether what it takes
    changes what the next are taken to need, though it is not far from that. One in four does."""

    name: str
    n: int = 1
    weight: int = 1
    cap: int = 0
    tells: bool = True


@dataclass(slots=True)
class Moved:
    """A job that was moved: what it was charged with for a choice."""

    job: Waiting
    flow: tuple[int, str]
    guess_ms: int


@dataclass(slots=True)
class Lanes:
    """The lanes of one model. A flow is (lane's place, key); `vt`: virtual time in ms of slot time for weight 1;
    `busy`: choices in flight of keys that have a cap."""

    queues: dict[tuple[int, str], list[Waiting]] = field(default_factory=dict)
    vt: dict[tuple[int, str], float] = field(default_factory=dict)
    guess_ms: dict[tuple[int, str], int] = field(default_factory=dict)
    busy: dict[str, int] = field(default_factory=dict)
    clock: list[float] = field(default_factory=lambda: [0.0] * len(LANES))
    owed_ms: list[float] = field(default_factory=lambda: [0.0] * len(LANES))

    def join(self, flow: tuple[int, str], job: Waiting) -> None:
        """A job begins to wait."""
        if not self.queues.get(flow):
            floor = min([self.clock[flow[0]], *(self.vt[other] for other in self._waiting(flow[0]))])
            self.vt[flow] = max(self.vt.get(flow, 0), floor)
        self.queues.setdefault(flow, []).append(job)

    def withdraw(self, flow: tuple[int, str], job: Waiting) -> None:
        """A job that waits goes without its turn."""
        self.queues[flow].remove(job)
        self._settle(flow[0])

    def feed(self, room: int) -> list[Moved]:
        """Move jobs, in order, until their choices fill `room`."""
        moved: list[Moved] = []
        while room > 0 and (chosen := self._choose(borrow=False) or self._choose(borrow=True)):
            moved.append(self._serve(*chosen))
            room -= moved[-1].job.n
        return moved

    def end(self, moved: Moved, used_ms: int | None) -> None:
        """A moved job has ended; `used_ms`: slot time of each choice, None for one that never began."""
        flow, job = moved.flow, moved.job
        used = 0 if used_ms is None else max(used_ms, 1)
        self.vt[flow] += weighed(used, job.n, job.weight) - weighed(moved.guess_ms, job.n, job.weight)
        if job.cap:
            self.busy[flow[1]] -= job.n
        is_far = used > 2 * moved.guess_ms or 2 * used < moved.guess_ms
        if used_ms is not None and used != moved.guess_ms and (job.tells or is_far):
            self.guess_ms[flow] = next_guess(moved.guess_ms, used)

    def _waiting(self, lane: int) -> Iterator[tuple[int, str]]:
        """The flows of a lane of which something waits."""
        return (flow for flow in sorted(self.queues) if flow[0] == lane and self.queues[flow])

    def _cost_ms(self, flow: tuple[int, str]) -> int:
        return self.guess_ms.get(flow, FIRST_GUESS_MS) * self.queues[flow][0].n

    def _choose(self, *, borrow: bool) -> tuple[tuple[int, str], bool] | None:
        """The flow to be served next, and whether its lane was owed that."""
        first: tuple[int, str] | None = None
        for lane in range(len(LANES)):
            flow = min(
                (flow for flow in self._waiting(lane) if borrow or self._is_below_cap(flow)),
                key=self.vt.__getitem__,
                default=None,
            )
            if flow is not None and first is not None and self.owed_ms[lane] >= self._cost_ms(flow):
                return flow, True
            first = flow if first is None else first
        return None if first is None else (first, False)

    def _is_below_cap(self, flow: tuple[int, str]) -> bool:
        job = self.queues[flow][0]
        return job.cap == 0 or self.busy.get(flow[1], 0) + job.n <= job.cap

    def _serve(self, flow: tuple[int, str], is_owed: bool) -> Moved:
        lane, cost_ms, guess_ms = flow[0], self._cost_ms(flow), self.guess_ms.get(flow, FIRST_GUESS_MS)
        self.clock[lane] = max(self.clock[lane], self.vt[flow])
        for lower in range(lane + 1, len(LANES)):
            first = min(self._waiting(lower), key=self.vt.__getitem__, default=None)
            if first is not None and self.owed_ms[lower] < self._cost_ms(first):
                self.owed_ms[lower] += SHARE * cost_ms
        if is_owed:
            self.owed_ms[lane] -= cost_ms
        job = self.queues[flow].pop(0)
        self.vt[flow] += weighed(cost_ms, 1, job.weight)
        if job.cap:
            self.busy[flow[1]] = self.busy.get(flow[1], 0) + job.n
        self._settle(lane)
        return Moved(job, flow, guess_ms)

    def _settle(self, lane: int) -> None:
        """A lane of which nothing waits is owed nothing."""
        if not any(self._waiting(lane)):
            self.owed_ms[lane] = 0

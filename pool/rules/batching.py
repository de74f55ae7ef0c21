"""Which sessions run in the next engine step: promotion, decode rotation, bounded prefill on the grid, preemption.

Pure: the loop in `workers` shows its sessions, gets a plan, runs it. Units are tokens (positions) and sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

#: How many sessions may pass one head of the queue that does not fit. Then all wait for it, so it cannot starve.
MAX_PASSES = 16
#: How far behind such a head one looks for sessions that may pass it.
LOOK_BEHIND = 32
#: How often a session may find its KV gone, without having got any further, before it is given up.
MAX_MISSES = 32


# -- promotion --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Promotion(Generic[T]):
    """`promoted`, in this order; `head`: the one at the front of the queue that does not fit now, if there is one;
    `passers`: how many of `promoted` passed it."""

    promoted: list[T]
    head: T | None
    passers: int


def promote(
    queue: Sequence[T],
    *,
    free_slots: int,
    begin: Callable[[T], bool],
    is_resident: Callable[[T], bool],
    passes_left: Callable[[T], int],
) -> Promotion[T]:
    """Promote from a lane's queue, oldest first. `begin` gives a session its room, or says that there is none now.

    First come, first served: one that does not fit stops those behind it, so that small ones cannot starve a large one.
    Only residents (their KV is here; waiting would have it given up) may pass it, a bounded number of times.
    """
    promoted: list[T] = []
    head: T | None = None
    passers = left = 0
    for place, session in enumerate(queue):
        if len(promoted) >= free_slots or (head is not None and (passers >= left or place > LOOK_BEHIND)):
            break
        if head is None and not begin(session):
            head, left = session, passes_left(session)
        elif head is None:
            promoted.append(session)
        elif is_resident(session) and begin(session):
            promoted.append(session)
            passers += 1
    return Promotion(promoted, head, passers)


def is_resident(held: int, prompt_tokens: int) -> bool:
    """Whether so much of a prompt is here that beginning it later would be a loss: half of it. Less is what everybody
    shares, as a system prompt."""
    return 2 * held >= prompt_tokens


# -- a step -----------------------------------------------------------------------------------------------------------


def rotate(decoding: Sequence[T], max_batch_size: int) -> tuple[list[T], list[T]]:
    """The sessions that decode now, and the order for next time: whoever ran goes to the back, so none starves."""
    now = list(decoding[:max_batch_size])
    return now, [*decoding[max_batch_size:], *now]


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a session still has to prefill: positions [done, prompt_tokens)."""

    done: int
    prompt_tokens: int


def prefill_stops(pending: Sequence[Prefill], *, budget_tokens: int, grid: int) -> list[int]:
    """For each session in order of arrival, where its chunk of this tick stops (equal to `done`: no chunk).

    Chunks end at absolute multiples of `grid` or at the prompt's end. At least one grid cell always runs, so a budget
    below the grid still makes progress. A session may have begun between two multiples: the few tokens to the next one
    are no chunk of their own.
    """
    to_grid = -pending[0].done % grid if pending else 0
    left = max(budget_tokens, to_grid + grid)
    stops: list[int] = []
    for work in pending:
        reach = min(work.done + left, work.prompt_tokens)
        stop = reach if reach == work.prompt_tokens else reach // grid * grid
        if stop < work.prompt_tokens and stop - work.done < grid:
            stop = work.done
        stops.append(stop)
        left -= stop - work.done
    return stops


# -- room for KV ------------------------------------------------------------------------------------------------------


def first_room(known_tokens: int, peak: int, overcommit: float) -> int:
    """Positions a session asks for when it begins: what is known, and its share of what may follow.

    With an `overcommit` of 1 that is all it can come to need, so it never lacks room later. With more, generations that
    end early leave no room unused, and one that needs more asks for it as it goes, at others' cost if it must be.
    """
    return known_tokens + math.ceil((peak - known_tokens) / overcommit)


def gives_way(arrivals: Iterable[int]) -> int:
    """Whose KV is exported when a running session needs more room: that of the youngest of all active ones, itself
    included. So the oldest never gives way, and some session always runs to its end."""
    return max(arrivals)


def exported_for(
    head: int, outside: Iterable[int], *, lacking: int, freed: Callable[[Sequence[int]], int]
) -> int | None:
    """Whose KV is exported for a head of the queue that does not fit: that of the youngest that passed it and is not in
    the coming batch. None: of nobody, the head waits.

    `outside`: the arrivals of the sessions outside the batch; `lacking`: positions that the head lacks, for which all
    of them together must be enough; `freed`: how many positions some of them leave to others, which is not the sum of
    what each has, as they share.
    """
    passed = [arrival for arrival in outside if arrival > head]
    return max(passed) if passed and freed(passed) >= lacking else None


def most_chunks(prompts: Iterable[int], budget_tokens: int, grid: int) -> int:
    """Ticks that prefill prompts of these lengths at most: a tick that ends none fills its budget as far as the grid
    lets it."""
    chunk = max(budget_tokens // grid, 1) * grid
    return sum(-(-tokens // chunk) for tokens in prompts)


def completion_guard(working_ticks: int, active: int, queued: int) -> int:
    """Ticks within which a loop must have ended so many sessions; more is a bug. `working_ticks`: those that they would
    take one after the other, a new token or a chunk of a prompt each."""
    return 8 * (working_ticks + active + queued + 1)

"""Which sessions run in the next engine step: promotion, decode rotation, and bounded prefill on the grid.

Pure: the loop in `workers` shows its sessions, gets a plan, runs it. Units are tokens (positions) and sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bounds of one rank's loop. `kv_positions`: positions all active sessions may hold together; `prefill_grid`:
    chunks are cut at absolute multiples of it."""

    max_batch_size: int
    max_prefill_tokens_per_tick: int
    kv_positions: int
    prefill_grid: int


def peak_positions(prompt_tokens: int, max_tokens: int) -> int:
    """Positions a session holds at most: prefill emits the first token, the last one is never fed back."""
    return prompt_tokens + max_tokens - 1


def promotable(peaks: Sequence[int], *, free_slots: int, reserved_positions: int, kv_positions: int) -> int:
    """How many sessions from the head of the queue may become active now.

    `peaks`: the queue's peak positions, oldest first. Strictly first come, first served: the first that does not fit
    stops the rest, so that small requests cannot starve a large one.
    """
    promoted = 0
    for peak in peaks[: max(free_slots, 0)]:
        if reserved_positions + peak > kv_positions:
            break
        reserved_positions += peak
        promoted += 1
    return promoted


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
    below the grid still makes progress.
    """
    left = max(budget_tokens, grid)
    stops: list[int] = []
    for work in pending:
        reach = min(work.done + left, work.prompt_tokens)
        stop = reach if reach == work.prompt_tokens else max(reach // grid * grid, work.done)
        stops.append(stop)
        left -= stop - work.done
    return stops

"""Which Programs give way when a rank holds more than it should: as few as reach the low watermark, never all of them.

Idle ones are paused now; one with a request in flight is marked, and pauses when that is done.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pool.program_settings import ProgramSettings
from pool.rules.programs.capacity import usage
from pool.rules.programs.facts import PauseReason, Program, Rank, State, Status
from pool.rules.programs.holds import over_share
from pool.rules.programs.tokens import private_tokens


class Victim(NamedTuple):
    """A Program that may give way, and the tokens which that frees."""

    program: Program
    tokens: int


@dataclass(frozen=True, slots=True)
class Repair:
    """`pauses`: with their reasons, now; `marks`: when their requests are done; `projected_tokens`: what would be used
    soon without them; `lacking_tokens`: what remains above the low watermark in spite of them, because one Program
    always stays; 0 where none does."""

    pauses: tuple[tuple[str, PauseReason], ...] = ()
    marks: tuple[str, ...] = ()
    projected_tokens: int = 0
    lacking_tokens: float = 0.0


def plan_repair(rank: Rank, settings: ProgramSettings, now_ms: int) -> Repair:
    """Ends holds beyond their share, and where what is projected is above the high watermark, frees room down to the
    low one. Cost: n log n in the active Programs, plus n times the number that give way."""
    ended = over_share(rank, settings, now_ms)
    pauses = [(hold.id, PauseReason.TTL_EXPIRED) for hold in ended]
    if rank.capacity_tokens is None:
        return Repair(tuple(pauses))
    projected = projected_tokens(rank, settings, now_ms)
    left = max(projected - sum(hold.tokens for hold in ended), 0)
    if left <= settings.high_watermark_ratio * rank.capacity_tokens:
        return Repair(tuple(pauses), (), projected)
    lacking = left - settings.low_watermark_ratio * rank.capacity_tokens
    ordered = victims(rank, settings, now_ms, without={hold.id for hold in ended})
    chosen = fewest(ordered, lacking, at_most=len(ordered) - 1)
    pauses += [(victim.program.id, PauseReason.CAPACITY_REPAIR) for victim in chosen if not is_running(victim.program)]
    return Repair(
        tuple(pauses),
        tuple(victim.program.id for victim in chosen if is_running(victim.program)),
        projected,
        max(lacking - sum(victim.tokens for victim in chosen), 0.0),
    )


def projected_tokens(rank: Rank, settings: ProgramSettings, now_ms: int) -> int:
    """Tokens that will soon be used: what is used now, and a mean output of each request in flight; without what is
    leaving already, and without the Programs that are marked."""
    output = mean_output_tokens(rank)
    marked = [program for program in rank.programs if is_marked(program)]
    freed = sum(private_tokens(program, settings.decode_buffer_tokens) + output for program in marked)
    used = usage(rank, settings, now_ms).used_tokens
    return max(used + output * rank.reasoning - freed - rank.leaving_tokens, 0)


def mean_output_tokens(rank: Rank) -> int:
    """Mean output of a request, rounded up; 0 while unknown."""
    return math.ceil(rank.means.output_tokens or 0)


def is_running(program: Program) -> bool:
    """Whether it has a request in flight, so that it can only be marked."""
    return program.status is Status.REASONING


def is_marked(program: Program) -> bool:
    """Whether it will pause when its request is done."""
    return program.pause_when_idle and is_running(program)


def victims(rank: Rank, settings: ProgramSettings, now_ms: int, *, without: set[str]) -> list[Victim]:
    """Those that may give way, in the order in which they do: highest score first, then largest, then by id."""
    output = mean_output_tokens(rank)
    found = [
        Victim(program, private_tokens(program, settings.decode_buffer_tokens) + output * is_running(program))
        for program in rank.programs
        if program.state is State.ACTIVE and not is_marked(program) and program.id not in without
    ]
    mean_prompt = rank.means.prompt_tokens
    return sorted(found, key=lambda each: (-score(each.program, mean_prompt, now_ms), -each.tokens, each.program.id))


def score(program: Program, mean_prompt_tokens: float | None, now_ms: int) -> float:
    """How much it is a Program's turn to give way: the seconds it has had its place, less for long prompts, which cost
    more to compute again, down to half; more for short ones."""
    seconds = max(now_ms - program.activated_ms, 0) / 1000
    if not mean_prompt_tokens:
        return seconds
    return seconds * max(1 / math.sqrt(max(program.prompt_tokens / mean_prompt_tokens, 1e-6)), 0.5)


def fewest(ordered: Sequence[Victim], lacking_tokens: float, *, at_most: int) -> list[Victim]:
    """The smallest number of victims that free `lacking_tokens`, and of the sets of that size the one that keeps most
    to the order. Where `at_most` are too few, the first `at_most`.

    Going through the order, one is taken when the largest of those behind it could still make up the rest.
    """
    sizes = sorted(victim.tokens for victim in ordered)
    number = _smallest_number(sizes, lacking_tokens)
    if number > min(at_most, len(ordered)):
        return list(ordered[: max(at_most, 0)])
    chosen: list[Victim] = []
    for victim in ordered:
        if len(chosen) == number:
            break
        del sizes[bisect_left(sizes, victim.tokens)]
        others = number - len(chosen) - 1
        if victim.tokens + sum(sizes[len(sizes) - others :]) >= lacking_tokens:
            chosen.append(victim)
            lacking_tokens -= victim.tokens
    return chosen


def _smallest_number(sizes: Sequence[int], lacking_tokens: float) -> int:
    """How many of the largest are enough; one more than there are where all are not."""
    number = 0
    for size in reversed(sizes):
        if lacking_tokens <= 0:
            break
        lacking_tokens -= size
        number += 1
    return number if lacking_tokens <= 0 else len(sizes) + 1

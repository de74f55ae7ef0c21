"""How far a request's hint may keep its Program's place beyond the automatic TTL.

Clients that never say goodbye would fill a rank with hints. So such holds take a quarter of it at most, they count less
and less against others, and they end when another Program needs the room. The longest held goes first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Program, Rank, State, Status
from pool.rules.programs.tokens import private_tokens

#: Part of a rank that holds beyond the automatic TTL may take together.
SHARE = 0.25
#: After this time such a hold counts half as much in admission.
HALF_LIFE_MS = 10_000


class Hold(NamedTuple):
    """A place that only a hint keeps, since when, and what it takes."""

    since_ms: int
    id: str
    tokens: int


def weight(beyond_ms: int) -> float:
    """How much of its tokens a hold counts for in admission, `beyond_ms` after the automatic TTL: 1 at first."""
    return math.exp2(-max(beyond_ms, 0) / HALF_LIFE_MS)


def held(rank: Rank, settings: ProgramSettings, now_ms: int) -> list[Hold]:
    """The holds of a rank beyond the automatic TTL, longest first."""
    return sorted(
        Hold(program.held_by_hint_ms, program.id, private_tokens(program, settings.decode_buffer_tokens))
        for program in rank.programs
        if program.held_by_hint_ms is not None and program.held_by_hint_ms <= now_ms and is_idle(program)
    )


def is_idle(program: Program) -> bool:
    """Whether it has a place and no request: it can be paused at once."""
    return program.state is State.ACTIVE and program.status is Status.ACTING


def discount_tokens(holds: Sequence[Hold], now_ms: int) -> float:
    """Tokens that are used and do not count in admission, because the holds on them have decayed."""
    return sum(hold.tokens * (1 - weight(now_ms - hold.since_ms)) for hold in holds)


def over_share(rank: Rank, settings: ProgramSettings, now_ms: int) -> list[Hold]:
    """The holds that end because all of them together take more than their share: of the token capacity, or where only
    the number of Programs is bounded, of that."""
    holds = held(rank, settings, now_ms)
    if rank.capacity_tokens is None:
        return holds[: max(len(holds) - int(SHARE * settings.max_active_programs_per_target), 0)]
    return given_up(holds, sum(hold.tokens for hold in holds) - SHARE * rank.capacity_tokens)


def given_up(holds: Sequence[Hold], lacking_tokens: float) -> list[Hold]:
    """The holds that end, longest first, until `lacking_tokens` are free or none is left."""
    ending: list[Hold] = []
    for hold in holds:
        if lacking_tokens <= 0:
            break
        ending.append(hold)
        lacking_tokens -= hold.tokens
    return ending

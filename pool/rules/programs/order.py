"""Who of those that wait comes first, and whom nobody may overtake any more.

The order prefers Programs whose KV may still be there, so alone it would let a stream of small or recent ones pass a
large or old one for ever. The *holder* of a reservation stops that: the one that has waited for at least half of its
force wait, longest overdue. Room it needs is kept for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import Standing, has_reservation, is_forced
from pool.rules.programs.facts import Program, Rank, Waiting
from pool.rules.programs.tokens import private_tokens

#: Tier, then time or its negative, then id: total, as no two Programs share an id.
OrderKey = tuple[bool, int, bool, int, int, str]


def order_key(
    program: Program, waiting: Waiting, settings: ProgramSettings, now_ms: int, *, cross_rank: bool = False
) -> OrderKey:
    """Smallest first: expired force deadlines, larger priority, those that have not yielded, then `resume_order` (the
    one that finished last, or that has waited longest), then by arrival and id. Across ranks: always by arrival."""
    by_recency = settings.resume_order == "mru" and not cross_rank
    return (
        waiting.force_ms > now_ms,
        -waiting.priority,
        program.yielded,
        -program.last_finish_ms if by_recency else waiting.queued_ms,
        waiting.queued_ms,
        program.id,
    )


def ordered(
    programs: Iterable[Program], settings: ProgramSettings, now_ms: int, *, cross_rank: bool = False
) -> list[Program]:
    """Those of `programs` that wait, first come first. Cost: n log n."""
    keyed = [
        (order_key(program, program.waiting, settings, now_ms, cross_rank=cross_rank), program)
        for program in programs
        if program.waiting is not None
    ]
    return [program for _, program in sorted(keyed, key=lambda pair: pair[0])]


def holders(rank: Rank, settings: ProgramSettings, now_ms: int) -> list[Program]:
    """Those with a reservation, first the one that holds it: by expired force deadline, before that by priority, then
    by the deadline. One that could never fit holds nothing. Cost: n log n."""
    keyed = [
        (_holder_key(program, program.waiting, now_ms), program)
        for program in rank.waiting
        if program.waiting is not None
        and has_reservation(program, now_ms)
        and (
            rank.capacity_tokens is None
            or private_tokens(program, settings.decode_buffer_tokens) <= rank.capacity_tokens
        )
    ]
    return [program for _, program in sorted(keyed, key=lambda pair: pair[0])]


def _holder_key(program: Program, waiting: Waiting, now_ms: int) -> tuple[bool, int, int, str]:
    forced = waiting.force_ms <= now_ms
    return not forced, 0 if forced else -waiting.priority, waiting.force_ms, program.id


def overtakes(
    candidate: Program, holder: Program, rank: Rank, standing: Standing, settings: ProgramSettings, now_ms: int
) -> bool:
    """Whether `candidate`, which fits, would take room that `holder` needs. It may where it ranks higher: forced before
    not forced; and of larger priority, until the holder's own deadline."""
    if _outranks(candidate, holder, now_ms):
        return False
    if not is_forced(holder, now_ms) and standing.active + 2 > settings.max_active_programs_per_target:
        return True
    if rank.capacity_tokens is None:
        return False
    needed = private_tokens(holder, settings.decode_buffer_tokens)
    both = needed + private_tokens(candidate, settings.decode_buffer_tokens)
    low = settings.low_watermark_ratio * rank.capacity_tokens
    if is_forced(holder, now_ms) or needed > low:
        return standing.used_tokens + both > rank.capacity_tokens
    return standing.counted_tokens + both > low


def _outranks(candidate: Program, holder: Program, now_ms: int) -> bool:
    if is_forced(holder, now_ms):
        return False
    return is_forced(candidate, now_ms) or _priority(candidate) > _priority(holder)


def _priority(program: Program) -> int:
    return program.waiting.priority if program.waiting is not None else 0

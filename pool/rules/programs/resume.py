"""Which waiting Programs of one rank become active now, and who gives way for those that cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import Decision, Reason, decide, standing_of
from pool.rules.programs.facts import Program, Rank
from pool.rules.programs.holds import is_idle
from pool.rules.programs.order import holders, ordered, overtakes
from pool.rules.programs.repair import is_marked
from pool.rules.programs.room import Pause, make_room
from pool.rules.programs.tokens import private_tokens


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What happens on one rank, in this order: `pauses` with their reasons, `marks` (pause when idle), `admissions`.
    `decisions`: every candidate that was looked at, in order, with its reason and numbers."""

    decisions: tuple[Decision, ...] = ()
    pauses: tuple[Pause, ...] = ()
    marks: tuple[str, ...] = ()

    @property
    def admissions(self) -> tuple[Decision, ...]:
        """Those that become active."""
        return tuple(decision for decision in self.decisions if decision.admitted)


def plan_rank(rank: Rank, settings: ProgramSettings, now_ms: int, limit: int) -> RankPlan:
    """Goes through the waiting Programs of a rank in their order and admits those that may, `limit` at most, each on
    the numbers as the ones before it leave them.

    Room that the holder of a reservation needs is left to it, wherever it stands in the order; once it is admitted, the
    next one holds. So `rank.waiting` must show, beside the first of the order, those whose force deadlines come first.
    Cost: n log n in the snapshot's waiting Programs and linear in its active ones, whatever the number of admissions.
    """
    standing = standing_of(rank, settings, now_ms)
    reserving = iter(holders(rank, settings, now_ms))
    holder = next(reserving, None)
    decisions: list[Decision] = []
    refused: list[tuple[Program, Decision]] = []
    admitted: set[str] = set()
    for candidate in ordered(rank.waiting, settings, now_ms):
        if len(admitted) >= limit:
            break
        decision = decide(candidate, rank, standing, settings, now_ms)
        if (
            decision.admitted
            and holder is not None
            and holder is not candidate
            and overtakes(candidate, holder, rank, standing, settings, now_ms)
        ):
            decision = replace(decision, reason=Reason.OVERTAKING)
        decisions.append(decision)
        if not decision.admitted:
            refused.append((candidate, decision))
            continue
        admitted.add(candidate.id)
        standing = standing.moved_on(candidate, decision.required_tokens, settings)
        while holder is not None and holder.id in admitted:
            holder = next(reserving, None)
    pauses, marks = make_room(rank, refused, holder, settings, now_ms)
    return RankPlan(tuple(decisions), pauses, marks)


def yields(program: Program, rank: Rank, settings: ProgramSettings, now_ms: int) -> bool:
    """Whether a Program that has just completed a request gives its place to one that waits: it is idle, has had
    `max_segment_rounds`, and the first that waits (the holder of a reservation, if there is one) is not admitted now
    and needs more than what marked Programs and those that leave will free. It then ranks behind its equals, once."""
    if not is_idle(program) or program.rounds < settings.max_segment_rounds:
        return False
    others = replace(rank, waiting=tuple(waiter for waiter in rank.waiting if waiter.id != program.id))
    first = next(iter(holders(others, settings, now_ms) or ordered(others.waiting, settings, now_ms)), None)
    if first is None:
        return False
    decision = decide(first, others, standing_of(others, settings, now_ms), settings, now_ms)
    if decision.admitted or decision.reason is Reason.TOO_LARGE:
        return False
    marked = (waiter for waiter in rank.programs if is_marked(waiter))
    freed = rank.leaving_tokens + sum(private_tokens(waiter, settings.decode_buffer_tokens) for waiter in marked)
    return decision.required_tokens > freed

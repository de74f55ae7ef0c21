"""Whether a waiting Program becomes active on another rank than its last, and on which.

Its KV is lost by that, so every gate must open: `global_queue` is on; it has waited for an interval, and its last rank
is known and under pressure; another rank, which no other waiting Program calls its last, has so much more room, and
would admit it. One that was never active has no KV to lose. It may move like others: many that begin on one rank, like
the agents of one session, would else wait there for as long as the first of them keep their places, beside idle ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import Decision, Standing, decide, low_tokens, standing_of
from pool.rules.programs.capacity import engine_waiting
from pool.rules.programs.facts import Means, Program, Rank, Waiting
from pool.rules.programs.order import order_key, ordered
from pool.rules.programs.resume import plan_rank


class Gate(StrEnum):
    """Which gate stayed shut first, as it stands in diagnostics."""

    OFF = "global_queue_off"
    NOT_WAITING = "no_waiting_request"
    COLD_SOURCE = "window_of_last_rank_not_full"
    TOO_SOON = "waited_less_than_an_interval"
    NO_PRESSURE = "last_rank_not_under_pressure"
    NO_DESTINATION = "no_rank_with_room"


@dataclass(frozen=True, slots=True)
class Relocation:
    """A Program that becomes active on `decision.rank`, and no longer on `source`."""

    source: str
    decision: Decision


def plan_relocations(
    ranks: Sequence[Rank], settings: ProgramSettings, now_ms: int, pooled: Means, limit: int
) -> tuple[Relocation, ...]:
    """Relocations after each rank has resumed what it could. Those that it still would, because they came since or it
    has room since, are no candidates: they wait for its next plan.

    Candidates come in their tiers, and then by arrival. `pooled`: the windows of all ranks of the model together, for
    ranks whose own are not full. Cost: waiting Programs times ranks.
    """
    by_id = {rank.id: rank for rank in ranks}
    standings = {rank.id: standing_as_destination(rank, settings, now_ms, pooled) for rank in ranks}
    found: list[Relocation] = []
    waiting = [program for rank in ranks for program in _left_waiting(rank, settings, now_ms)]
    for candidate in ordered(waiting, settings, now_ms, cross_rank=True):
        if len(found) >= limit:
            break
        decision = relocate(candidate, by_id, standings, settings, now_ms)
        if isinstance(decision, Decision):
            found.append(Relocation(candidate.rank, decision))
            standing = standings[decision.rank]
            standings[decision.rank] = standing.moved_on(candidate, decision.required_tokens, settings)
    return tuple(found)


def _left_waiting(rank: Rank, settings: ProgramSettings, now_ms: int) -> list[Program]:
    """Those whose last rank it is, and that it would not admit now."""
    admitted = {decision.program for decision in plan_rank(rank, settings, now_ms, len(rank.waiting)).admissions}
    return [program for program in rank.waiting if program.rank == rank.id and program.id not in admitted]


def standing_as_destination(rank: Rank, settings: ProgramSettings, now_ms: int, pooled: Means) -> Standing:
    """As it stands as a destination: an idle rank never fills its own window."""
    known = rank if rank.means.full else replace(rank, means=pooled)
    return standing_of(known, settings, now_ms)


def relocate(
    candidate: Program,
    ranks: Mapping[str, Rank],
    standings: Mapping[str, Standing],
    settings: ProgramSettings,
    now_ms: int,
) -> Decision | Gate:
    """The admission of `candidate` on the best other rank, or the gate that stayed shut."""
    waiting = candidate.waiting
    source = ranks[candidate.rank]
    if not settings.global_queue:
        return Gate.OFF
    if waiting is None:
        return Gate.NOT_WAITING
    if not source.means.full:
        return Gate.COLD_SOURCE
    if not _has_waited(waiting, settings, now_ms):
        return Gate.TOO_SOON
    if not _is_under_pressure(candidate, waiting, source, settings, now_ms):
        return Gate.NO_PRESSURE
    return _best(candidate, source, ranks, standings, settings, now_ms) or Gate.NO_DESTINATION


def _has_waited(waiting: Waiting, settings: ProgramSettings, now_ms: int) -> bool:
    return now_ms - waiting.queued_ms >= settings.metrics_interval_seconds * 1000


def _is_under_pressure(
    candidate: Program, waiting: Waiting, source: Rank, settings: ProgramSettings, now_ms: int
) -> bool:
    """Whether its last rank has more than it can do: requests wait in the engine, or another Program comes before it
    there and has waited too. Always, where the waiting gate is off."""
    threshold = settings.admission_waiting_request_threshold
    if threshold == 0 or engine_waiting(source, settings, now_ms) >= threshold:
        return True
    own = order_key(candidate, waiting, settings, now_ms)
    return any(
        other.waiting is not None
        and order_key(other, other.waiting, settings, now_ms) < own
        and _has_waited(other.waiting, settings, now_ms)
        for other in source.waiting
    )


def _best(
    candidate: Program,
    source: Rank,
    ranks: Mapping[str, Rank],
    standings: Mapping[str, Standing],
    settings: ProgramSettings,
    now_ms: int,
) -> Decision | None:
    """The admission on the rank with the fewest requests waiting in its engine, then the least projected use, then the
    fewest active Programs."""
    plans: list[tuple[int, float, int, str, Decision]] = []
    needed = (
        _free(source, standings[source.id], settings) + settings.cross_rank_headroom_ratio * candidate.context_tokens
    )
    for rank in ranks.values():
        standing = standings[rank.id]
        if rank.id == source.id or any(other.id != candidate.id for other in rank.waiting):
            continue
        if rank.capacity_tokens is not None and _free(rank, standing, settings) < needed:
            continue
        decision = decide(candidate, rank, standing, settings, now_ms, cross_rank=True)
        if decision.admitted:
            plans.append((standing.waiting, _projected(rank, decision, settings), standing.active, rank.id, decision))
    return min(plans, key=lambda plan: plan[:4])[4] if plans else None


def _free(rank: Rank, standing: Standing, settings: ProgramSettings) -> float:
    """Tokens below the low watermark; 0 without token capacity, where it is not asked."""
    low = low_tokens(rank, settings)
    return max(low - standing.counted_tokens, 0.0) if low is not None else 0.0


def _projected(rank: Rank, decision: Decision, settings: ProgramSettings) -> float:
    """Part of the rank that would be in use with the Program and all reserves."""
    if rank.capacity_tokens is None:
        return (decision.active + 1) / settings.max_active_programs_per_target
    return (decision.used_tokens + decision.required_tokens + decision.reserve_tokens) / rank.capacity_tokens

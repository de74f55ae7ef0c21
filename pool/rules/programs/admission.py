"""Whether one waiting Program may become active on one rank: a decision with its reason and its numbers.

The order of the checks is fixed, so that a reason says which one failed first. What a forced resume may skip: the
engine's waiting gate, the number of Programs, the watermark, and the reserve for growth. What it may never: the KV
there is. So a forced one that lacks KV waits on, and `resume` keeps the room for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pool.program_settings import ProgramSettings
from pool.rules.programs.batch_gain import Gain, Growth, gain_of, growth_of
from pool.rules.programs.capacity import engine_waiting, usage
from pool.rules.programs.facts import Program, Rank, State, Status
from pool.rules.programs.holds import discount_tokens, held
from pool.rules.programs.tokens import private_tokens


class Reason(StrEnum):
    """Why a candidate is admitted, or stays, as it stands in logs and diagnostics."""

    FITS = "fits"
    FORCED = "forced"
    BATCH_GAIN = "batch_gain"
    OTHER_RANK = "bound_to_another_rank"
    NOT_WAITING = "no_waiting_request"
    ENGINE_WAITING = "engine_has_waiting_requests"
    TOO_LARGE = "larger_than_the_capacity"
    ACTIVE_PROGRAMS = "too_many_active_programs"
    WATERMARK = "over_the_low_watermark"
    NO_KV = "kv_in_use"
    GROWTH_RESERVE = "room_reserved_for_growth"
    OVERTAKING = "room_reserved_for_one_that_waits_longer"


#: Reasons that admit.
ADMITTING = frozenset({Reason.FITS, Reason.FORCED, Reason.BATCH_GAIN})
#: Reasons that end when room is freed on the rank.
LACKING_ROOM = frozenset(
    {Reason.ACTIVE_PROGRAMS, Reason.WATERMARK, Reason.NO_KV, Reason.GROWTH_RESERVE, Reason.OVERTAKING}
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a candidate, and the tokens it was decided with. `used_tokens`: all that is used;
    `counted_tokens`: without what decayed holds no longer count for; `limit_tokens`: what it was held against, None
    where only the number of Programs is bounded; `gain`: of a larger batch, where that was asked."""

    program: str
    rank: str
    reason: Reason
    used_tokens: int
    counted_tokens: float
    required_tokens: int
    reserve_tokens: float
    limit_tokens: float | None
    active: int
    gain: Gain | None = None

    @property
    def admitted(self) -> bool:
        """Whether it becomes active."""
        return self.reason in ADMITTING

    @property
    def lacking_tokens(self) -> float:
        """Tokens that would have to be free besides for it to be admitted by the check it failed."""
        if self.limit_tokens is None:
            return 0.0
        reserve = self.reserve_tokens if self.reason is Reason.GROWTH_RESERVE else 0
        used = self.used_tokens if self.reason is Reason.NO_KV else self.counted_tokens
        return max(used + self.required_tokens + reserve - self.limit_tokens, 0.0)


@dataclass(frozen=True, slots=True)
class Standing:
    """What admission to a rank counts with; each admission moves it on, so that a batch is planned like one after
    another. Tokens; `waiting`: requests inside the engine, by a fresh observation."""

    used_tokens: int
    discount_tokens: float
    active: int
    waiting: int
    growth: Growth

    @property
    def counted_tokens(self) -> float:
        """Used tokens, without what decayed holds no longer count for."""
        return max(self.used_tokens - self.discount_tokens, 0.0)

    def moved_on(self, candidate: Program, required_tokens: int, settings: ProgramSettings) -> Standing:
        """After `candidate` was admitted."""
        return replace(
            self,
            used_tokens=self.used_tokens + required_tokens,
            active=self.active + 1,
            growth=self.growth.moved_on(candidate, settings),
        )


def standing_of(rank: Rank, settings: ProgramSettings, now_ms: int) -> Standing:
    """How a rank stands before anything is admitted. Cost: linear in its active Programs."""
    return Standing(
        used_tokens=usage(rank, settings, now_ms).used_tokens,
        discount_tokens=discount_tokens(held(rank, settings, now_ms), now_ms),
        active=rank.active,
        waiting=engine_waiting(rank, settings, now_ms),
        growth=growth_of(rank, settings),
    )


def is_forced(candidate: Program, now_ms: int) -> bool:
    """Whether it has waited so long that it resumes by force."""
    return candidate.waiting is not None and candidate.waiting.force_ms <= now_ms


def has_reservation(candidate: Program, now_ms: int) -> bool:
    """Whether it has waited for half of its force wait: the next room freed on its rank is then kept for it."""
    waiting = candidate.waiting
    return waiting is not None and 2 * (now_ms - waiting.queued_ms) >= waiting.force_ms - waiting.queued_ms


def low_tokens(rank: Rank, settings: ProgramSettings) -> float | None:
    """Up to where Programs are admitted, None where only their number is bounded."""
    return None if rank.capacity_tokens is None else settings.low_watermark_ratio * rank.capacity_tokens


def decide(
    candidate: Program,
    rank: Rank,
    standing: Standing,
    settings: ProgramSettings,
    now_ms: int,
    *,
    cross_rank: bool = False,
) -> Decision:
    """The plan for one candidate on one rank as it stands. `cross_rank`: the rules of `cross_rank` chose the rank, so
    that it need not be the candidate's last. Cost: constant."""
    required = private_tokens(candidate, settings.decode_buffer_tokens)
    reserve = standing.growth.reserve_tokens
    forced = is_forced(candidate, now_ms)
    gain = None
    reason = _barred(candidate, rank, standing, settings, forced=forced, cross_rank=cross_rank)
    if reason is None:
        reason = _by_room(rank, standing, settings, required, forced=forced)
    if reason is Reason.GROWTH_RESERVE and settings.enable_batch_gain_admission:
        room = settings.low_watermark_ratio * (rank.capacity_tokens or 0) - standing.counted_tokens
        gain = gain_of(candidate, standing.growth, settings, room_tokens=room, required_tokens=required)
        reason = Reason.BATCH_GAIN if gain.admits else reason
    return Decision(
        program=candidate.id,
        rank=rank.id,
        reason=reason,
        used_tokens=standing.used_tokens,
        counted_tokens=standing.counted_tokens,
        required_tokens=required,
        reserve_tokens=reserve,
        limit_tokens=rank.capacity_tokens if forced or reason is Reason.NO_KV else low_tokens(rank, settings),
        active=standing.active,
        gain=gain,
    )


def _barred(
    candidate: Program, rank: Rank, standing: Standing, settings: ProgramSettings, *, forced: bool, cross_rank: bool
) -> Reason | None:
    """Why it is not asked how much room there is."""
    if candidate.rank != rank.id and not cross_rank:
        return Reason.OTHER_RANK
    if candidate.state is not State.PAUSED or candidate.status is not Status.REASONING or candidate.waiting is None:
        return Reason.NOT_WAITING
    threshold = settings.admission_waiting_request_threshold
    if threshold and standing.waiting >= threshold and not forced:
        return Reason.ENGINE_WAITING
    return None


def _by_room(rank: Rank, standing: Standing, settings: ProgramSettings, required: int, *, forced: bool) -> Reason:
    """What the number of Programs, the watermark, the KV there is, and the reserve for growth say, in this order."""
    capacity = rank.capacity_tokens
    if capacity is not None and required > capacity:
        return Reason.TOO_LARGE
    if not forced and standing.active + 1 > settings.max_active_programs_per_target:
        return Reason.ACTIVE_PROGRAMS
    reason = Reason.FORCED if forced else Reason.FITS
    if capacity is not None:
        low = settings.low_watermark_ratio * capacity
        if not forced and standing.counted_tokens + required > low:
            reason = Reason.WATERMARK
        elif standing.used_tokens + required > capacity:
            reason = Reason.NO_KV
        elif not forced and standing.counted_tokens + required + standing.growth.reserve_tokens > low:
            reason = Reason.GROWTH_RESERVE
    return reason

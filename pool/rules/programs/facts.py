"""What a snapshot shows of Programs and ranks. Times are the state server's, in ms; lengths are in tokens.

Everything is bounded: a snapshot of a rank holds the Programs that a decision can concern, never all there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Whether a Program owns capacity of a rank."""

    ACTIVE = "active"
    PAUSED = "paused"


class Status(StrEnum):
    """Whether a Program has a request in flight or waiting, or a tool runs."""

    REASONING = "reasoning"
    ACTING = "acting"


class PauseReason(StrEnum):
    """Why a Program lost its capacity."""

    TTL_EXPIRED = "ttl_expired"
    MAX_SEGMENT_YIELD = "max_segment_yield"
    CAPACITY_REPAIR = "capacity_repair"
    REQUEST_FAILED = "request_failed"
    REQUEST_CANCELLED = "request_cancelled"
    HEALTH_FAILOVER = "health_failover"
    MODEL_UNLOADING = "model_unloading"


class CapacitySource(StrEnum):
    """Where the used tokens of a rank come from."""

    OBSERVATION = "backend_observation"
    MISSING = "ledger_missing_observation"
    STALE = "ledger_stale_observation"
    NO_ESTIMATE = "ledger_missing_token_estimate"


@dataclass(frozen=True, slots=True)
class Waiting:
    """The front request of a Program that is not active. `force_ms`: when it resumes by force, fixed at its first
    arrival; `expected_output_tokens`: its hint, None without one."""

    queued_ms: int
    force_ms: int
    priority: int = 0
    expected_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """One Program of a rank. `rank`: where it is, or was last, or is bound to for the first time; `was_active`: whether
    it has ever been active; `reserved_output_tokens`: the stored reservation of its
    request in flight, None without one; `prompt_tokens`: length of its last prompt; `last_finish_ms`: end of its last
    request, 0 before; `rounds`: requests completed since its activation; `activated_ms`: when that was;
    `pause_when_idle`: marked by a repair; `held_by_hint_ms`: when its automatic TTL ends and only the
    hint of its last request keeps its place, None where the hint is not longer; `awaited_by`: ids of its ancestors that
    cannot go on before it ends, nearest first, over blocking links only."""

    id: str
    state: State
    status: Status
    rank: str
    context_tokens: int
    shared_prefix_tokens: int = 0
    reserved_output_tokens: int | None = None
    prompt_tokens: int = 0
    was_active: bool = False
    last_finish_ms: int = 0
    rounds: int = 0
    activated_ms: int = 0
    yielded: bool = False
    pause_when_idle: bool = False
    waiting: Waiting | None = None
    held_by_hint_ms: int | None = None
    awaited_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """What a rank's engine reported. `began_ms`: when the look at it began; `tokens`: resident tokens that Programs
    account for, None where the engine gives no figure; `changed_tokens`: what transitions have added since `began_ms`
    to the ledger and to what is leaving, together, so that a pause alone changes nothing; `waiting`, `running`:
    requests inside the engine."""

    began_ms: int
    tokens: int | None
    changed_tokens: int = 0
    waiting: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class Means:
    """Statistics of a rank's windows, or of a model's pooled ones. None: the window says nothing yet.

    `full`: whether the request window is; `continuity_full`: whether the continuity window is; growth, prompt, output
    and uncached are mean tokens; `end_to_end_s`, `decode_s`: mean seconds of a request; `miss_impact_s`: mean seconds
    that a cache miss of a returning Program costs; `segment_rounds`: mean rounds of a request's Program since its last
    pause by TTL; `throughput_per_s`: completed requests by second of busy time; `intervals_s`: the positive times
    between completion and next arrival, of the continuity window; `pause_rounds`: mean rounds of the segments that
    pauses by TTL ended."""

    full: bool = False
    continuity_full: bool = False
    growth_tokens: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    uncached_tokens: float | None = None
    end_to_end_s: float | None = None
    decode_s: float | None = None
    miss_impact_s: float | None = None
    segment_rounds: float | None = None
    throughput_per_s: float | None = None
    intervals_s: tuple[float, ...] = ()
    pause_rounds: float | None = None


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a model. `capacity_tokens`: KV tokens that Programs may own, None when only their number is bounded;
    `ledger_tokens`: private tokens of its active Programs; `leaving_tokens`: those of Programs that left, until the
    engine reports them gone; `active`, `reasoning`: numbers of active Programs, and of those that have a request in
    flight; `programs`: the active ones a decision may concern: all of them where sums over active ones are to be exact;
    `waiting`: the paused ones that wait for it, in any order."""

    id: str
    capacity_tokens: int | None
    ledger_tokens: int = 0
    leaving_tokens: int = 0
    active: int = 0
    reasoning: int = 0
    observation: Observation | None = None
    means: Means = Means()
    programs: tuple[Program, ...] = ()
    waiting: tuple[Program, ...] = ()

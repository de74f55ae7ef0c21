"""What a completed request tells of its Program, by the rules; and the lines that tell it to people.

Ids in logs are stored ids of Programs, never names from outside.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Means
from pool.rules.programs.tokens import SharedPrefix, shared_prefix_freshness_seconds
from pool.rules.programs.ttl import cache_miss_impact_seconds, place_share, retention
from pool.rules.programs.windows import RequestSample, counts_as_round, growth_tokens, is_continuous
from pool.store.handouts import Handout
from pool.store.placements import Outcome, Placement
from tasks.ports import Finished
from tasks.program_log import tell


@dataclass(frozen=True, slots=True)
class Background:
    """What is known of the rank: what its windows say, how many active Programs have a request in flight, and what a
    token of KV takes to leave the engine and to come back."""

    means: Means = field(default_factory=Means)
    reasoning: int = 0
    return_s_per_token: float = math.inf


@dataclass(frozen=True, slots=True)
class Completed:
    """A Program's request that ended by itself at `finish_ms`, by the state server's clock. `created_ms`: its arrival,
    by the same; `attempt`: how often it was begun."""

    placement: Placement
    finished: Finished
    created_ms: int
    finish_ms: int
    attempt: int = 1

    @classmethod
    def of(cls, handout: Handout, placement: Placement, finished: Finished, finish_ms: int) -> Completed:
        """From what the outlet holds of it."""
        return cls(placement, finished, handout.created_ms, finish_ms, handout.lease.attempt)

    @property
    def cached_tokens(self) -> int | None:
        """How much of its prompt was found cached, None where that is not known: what a later attempt found may be its
        own earlier one's."""
        return self.finished.cached_tokens if self.attempt == 1 else None

    @property
    def previous_prompt_tokens(self) -> int | None:
        """Length of the Program's prompt before, None for its first."""
        return self.placement.previous_prompt_tokens or None

    @property
    def completion_tokens(self) -> int:
        """Output of all choices together."""
        return sum(output.tokens for output in self.finished.outputs)

    @property
    def context_tokens(self) -> int:
        """Prompt and output. Of several choices the longest: the Program goes on from one of them."""
        return self.finished.prompt_tokens + max((output.tokens for output in self.finished.outputs), default=0)

    @property
    def is_round(self) -> bool:
        """Whether it prolongs its Program's segment."""
        return counts_as_round(self.cached_tokens, self.previous_prompt_tokens)

    @property
    def interval_s(self) -> float | None:
        """From the end of the Program's request before to this one's arrival; None for the first, and for one that came
        before that end."""
        interval_ms = self.created_ms - self.placement.last_finish_ms
        return interval_ms / 1000 if self.placement.last_finish_ms and interval_ms >= 0 else None

    def sample(self) -> RequestSample:
        """As the window of requests has it."""
        dispatched_ms = self.placement.dispatched_ms or self.created_ms
        return RequestSample(
            prompt_tokens=self.finished.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            growth_tokens=growth_tokens(self.finished.prompt_tokens, self.previous_prompt_tokens),
            end_to_end_s=max(self.finish_ms - self.created_ms, 0) / 1000,
            decode_s=self.finished.decode_s,
            queue_s=max(dispatched_ms - self.created_ms, 0) / 1000,
            rounds=self.placement.segment_rounds + self.is_round,
            finish_ms=self.finish_ms,
        )


def outcome_of(request: Completed, settings: ProgramSettings, background: Background) -> Outcome:
    """What the request tells of its Program. `settings`: of its model."""
    placement = request.placement
    before = SharedPrefix(placement.shared_tokens, placement.fresh_until_ms)
    shared = _shared_prefix(request, before, settings, background)
    # What nobody else keeps would have to be computed again.
    private_tokens = max(request.context_tokens - shared.tokens, 0)
    impact_s = cache_miss_impact_seconds(settings.prefill_cost_model, private_tokens)
    hint_s = None if placement.retention_ms is None else placement.retention_ms / 1000
    # A place that is lost costs no more than to put its KV back, where that is done.
    lost_s = min(impact_s, private_tokens * background.return_s_per_token) if private_tokens else 0.0
    share = place_share(settings, private_tokens + settings.decode_buffer_tokens)
    kept = retention(settings, background.means, lost_s / share, hint_s)
    return Outcome(
        prompt_tokens=request.finished.prompt_tokens,
        context_tokens=request.context_tokens,
        ttl_ms=round(kept.ttl_s * 1000),
        automatic_ms=round(kept.automatic_s * 1000),
        impact_s=impact_s,
        is_round=request.is_round,
        shared_tokens=None if shared is before else shared.tokens,
        fresh_until_ms=None if shared is before else shared.fresh_until_ms,
        sample=request.sample(),
    )


def _shared_prefix(
    request: Completed, before: SharedPrefix, settings: ProgramSettings, background: Background
) -> SharedPrefix:
    return before.observed(
        cached_tokens=request.cached_tokens,
        prompt_tokens=request.finished.prompt_tokens,
        previous_prompt_tokens=request.previous_prompt_tokens,
        is_first_of_segment=request.placement.is_first,
        now_ms=request.finish_ms,
        freshness_seconds=shared_prefix_freshness_seconds(
            settings,
            background.means,
            capacity_tokens=settings.token_capacity_per_dp_rank,
            reasoning=background.reasoning,
        ),
    )


# --- lines


def is_broken(request: Completed) -> bool:
    """Whether the Program's KV is known to be gone though its place was kept: backend eviction, or too little room
    reserved. A prompt that became shorter could not find it, and says nothing."""
    cached, previous = request.cached_tokens, request.previous_prompt_tokens
    return (
        not request.placement.is_first
        and cached is not None
        and previous is not None
        and request.finished.prompt_tokens >= previous
        and not is_continuous(cached, previous)
    )


def tell_dispatch(handout: Handout, placement: Placement) -> None:
    """A request of a Program begins."""
    tell(
        logging.DEBUG,
        "request_dispatch",
        **_where(placement),
        generation=placement.generation,
        attempt=handout.lease.attempt,
        queue_s=max(placement.dispatched_ms - handout.created_ms, 0) / 1000,
    )


def tell_end(request: Completed, outcome: Outcome) -> None:
    """It has ended."""
    where, cache = _where(request.placement), _cache(request)
    if is_broken(request):
        tell(logging.INFO, "unexpected_cache_discontinuity", **where, **cache)
    shared = request.placement.shared_tokens if outcome.shared_tokens is None else outcome.shared_tokens
    tell(logging.DEBUG, "cache_observation", **where, **cache, shared_tokens=shared)
    if request.interval_s is not None:
        tell(logging.DEBUG, "continuity_sample", **where, interval_s=request.interval_s)
    tell(
        logging.DEBUG,
        "ttl_armed",
        **where,
        ttl_ms=outcome.ttl_ms,
        automatic_ms=outcome.automatic_ms,
        impact_s=outcome.impact_s,
    )


def _where(placement: Placement) -> dict[str, Any]:
    return {"program": placement.program, "rank": placement.rank, "epoch": placement.epoch}


def _cache(request: Completed) -> dict[str, Any]:
    return {
        "cached_tokens": "unknown" if request.cached_tokens is None else request.cached_tokens,
        "prompt_tokens": request.finished.prompt_tokens,
        "previous_prompt_tokens": request.placement.previous_prompt_tokens,
    }

"""What the growth of running Programs needs, and when a larger batch is worth more than keeping that room free.

Tokens and seconds. Nothing here looks at whether a candidate fits now: only the reserve for growth can be outweighed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Means, Program, Rank, State, Status
from pool.rules.programs.tokens import private_context_tokens
from pool.rules.programs.ttl import cache_miss_impact_seconds, decode_throughput
from pool.rules.programs.windows import target_rounds


@dataclass(frozen=True, slots=True)
class Growth:
    """The running Programs of a rank, as far as their growth and their batch go. `target`: rounds that a place is
    reserved for, 0 while the windows are cold; `protected_rounds`: rounds that active Programs have left of them;
    `protected`, `protected_impact_s`: how many have some left, and what a cache miss of each would cost, in sum;
    `batch`, `context_tokens`: those with a request in flight, and their full contexts."""

    means: Means
    target: int
    protected_rounds: int
    protected: int
    protected_impact_s: float
    batch: int
    context_tokens: int

    @property
    def growth_tokens(self) -> float:
        """Mean growth of a Program in a round; 0 while unknown."""
        return self.means.growth_tokens or 0.0

    @property
    def reserve_tokens(self) -> float:
        """Room for the growth of one more Program and of those that run; 0 while the windows are cold."""
        return self.growth_tokens * (self.target + self.protected_rounds) if self.target else 0.0

    def moved_on(self, admitted: Program, settings: ProgramSettings) -> Growth:
        """With one more that runs, at the beginning of its rounds."""
        return replace(
            self,
            protected_rounds=self.protected_rounds + self.target,
            protected=self.protected + bool(self.target),
            protected_impact_s=self.protected_impact_s + (miss_impact_s(admitted, settings) if self.target else 0.0),
            batch=self.batch + 1,
            context_tokens=self.context_tokens + admitted.context_tokens,
        )


def miss_impact_s(program: Program, settings: ProgramSettings) -> float:
    """Seconds it costs when the KV that is the Program's own has to be computed again."""
    return cache_miss_impact_seconds(settings.prefill_cost_model, private_context_tokens(program))


def growth_of(rank: Rank, settings: ProgramSettings) -> Growth:
    """As a rank's snapshot shows it. Cost: linear in its active Programs."""
    target = target_rounds(rank.means, settings.max_segment_rounds)
    active = [program for program in rank.programs if program.state is State.ACTIVE]
    running = [program for program in active if program.status is Status.REASONING]
    protected = [program for program in active if program.rounds < target]
    return Growth(
        means=rank.means,
        target=target,
        protected_rounds=sum(target - program.rounds for program in protected),
        protected=len(protected),
        protected_impact_s=sum(miss_impact_s(program, settings) for program in protected),
        batch=len(running),
        context_tokens=sum(program.context_tokens for program in running),
    )


@dataclass(frozen=True, slots=True)
class Gain:
    """Seconds that a larger batch gains, that the candidate's own prefill costs, and that running ones are set back."""

    gain_s: float
    impact_s: float
    loss_s: float

    @property
    def admits(self) -> bool:
        """Whether the gain covers both costs."""
        return self.gain_s >= self.impact_s + self.loss_s


def gain_of(
    candidate: Program, growth: Growth, settings: ProgramSettings, *, room_tokens: float, required_tokens: int
) -> Gain:
    """What one more in the batch gains and costs. `room_tokens`: free below the low watermark."""
    return Gain(
        gain_s=_gain_s(candidate, growth, settings),
        impact_s=miss_impact_s(candidate, settings),
        loss_s=_loss_s(growth, room_tokens=room_tokens, required_tokens=required_tokens),
    )


def _gain_s(candidate: Program, growth: Growth, settings: ProgramSettings) -> float:
    """Mean decode seconds times the relative gain in throughput. Where nothing runs and nobody is protected, any batch
    is infinitely better than none: an idle rank is never kept idle for growth to come."""
    model = settings.decode_throughput_model
    before = decode_throughput(model, growth.batch, growth.context_tokens)
    if not before:
        return 0.0 if growth.protected else math.inf
    after = decode_throughput(model, growth.batch + 1, growth.context_tokens + candidate.context_tokens)
    return (growth.means.decode_s or 0.0) * max(after / before - 1, 0.0)


def _loss_s(growth: Growth, *, room_tokens: float, required_tokens: int) -> float:
    """What it costs that the rounds which are left to running Programs no longer all fit. Infinite where they had room
    for some and would have none."""
    each = growth.growth_tokens
    if each <= 0 or not growth.protected:
        return 0.0
    before = min(growth.protected_rounds, max(room_tokens, 0.0) / each)
    after = min(growth.protected_rounds, max(room_tokens - required_tokens - each * growth.target, 0.0) / each)
    if after > 0:
        return (before - after) / after * growth.protected_impact_s / growth.protected
    return math.inf if before > 0 else 0.0

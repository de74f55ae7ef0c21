"""How long a Program keeps its place between two requests, and what a cache miss costs. Durations are in seconds.

Keeping a place costs its rank the time it is kept; giving it up costs the prefill of the next request and what that
takes from the decoding beside it. With the times that tools took so far, the best time to keep it can be computed
(Progress-TTL of the program-scheduling page; the utility is that of renting versus buying with a known distribution).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pool.program_settings import DecodeThroughputModel, PrefillCostModel, ProgramSettings
from pool.rules.programs.facts import Means

#: Shorter holds than this are not worth their bookkeeping.
LEAST_TTL_SECONDS = 0.05
#: TTLs that are tried between the shortest and the longest, evenly in their logarithm.
STEPS = 32
#: Identical intervals have no spread; this much keeps the formulas finite.
LEAST_SIGMA = 1e-6


# --- costs


def prefill_seconds(model: PrefillCostModel, uncached_tokens: float) -> float:
    """Seconds a cold prefill of so many tokens takes: a + b x + c x^2, x in thousands of tokens. 0 for none."""
    if uncached_tokens <= 0:
        return 0.0
    thousands = uncached_tokens / 1000
    return (
        model.intercept_seconds
        + model.linear_seconds_per_1k_tokens * thousands
        + model.quadratic_seconds_per_1k_tokens_squared * thousands**2
    )


def cache_miss_impact_seconds(model: PrefillCostModel, uncached_tokens: float) -> float:
    """What it costs everybody when so many tokens have to be computed again: the prefill itself, and the part of the
    decoding beside it that is lost, alpha being the part that is left."""
    return prefill_seconds(model, uncached_tokens) * (2 - model.decode_throughput_alpha)


def decode_throughput(model: DecodeThroughputModel, batch: int, context_tokens: float) -> float:
    """Tokens per second of all `batch` requests together, with `context_tokens` of full contexts in sum. 0 for none."""
    if batch <= 0:
        return 0.0
    step_seconds = (
        model.fixed_step_seconds
        + model.batch_step_seconds_per_request * batch
        + model.context_step_seconds_per_token * context_tokens
    )
    return batch / step_seconds


# --- the automatic TTL


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A distribution of times: their logarithm is normal with this mean and deviation."""

    mu: float
    sigma: float

    @classmethod
    def fitted(cls, times_s: Sequence[float]) -> LogNormal:
        """The most likely one for these times, all > 0 and at least one: mean and population deviation of their
        logarithms."""
        logs = [math.log(time) for time in times_s]
        mu = math.fsum(logs) / len(logs)
        variance = math.fsum((log - mu) ** 2 for log in logs) / len(logs)
        return cls(mu, max(math.sqrt(variance), LEAST_SIGMA))

    def below(self, time_s: float) -> float:
        """P(T < time), for a time > 0."""
        return _standard_normal((math.log(time_s) - self.mu) / self.sigma)

    def above(self, time_s: float) -> float:
        """P(T >= time), for a time > 0; exact also where it is tiny."""
        return _standard_normal((self.mu - math.log(time_s)) / self.sigma)

    def partial_mean(self, time_s: float) -> float:
        """E[T; T < time] = exp(mu + sigma^2 / 2) Phi((ln time - mu - sigma^2) / sigma), for a time > 0."""
        weight = _standard_normal((math.log(time_s) - self.mu) / self.sigma - self.sigma)
        exponent = self.mu + self.sigma**2 / 2
        # It is never more than time x P(T < time), also where the product of something huge and nothing is no number.
        mean = math.exp(exponent) if exponent < 700 else math.inf
        return min(mean * weight, time_s * self.below(time_s)) if weight > 0 else 0.0


def _standard_normal(z: float) -> float:
    """Phi(z): exact in both tails, unlike 1 + erf."""
    return math.erfc(-z / math.sqrt(2)) / 2


def utility_seconds(times: LogNormal, miss_impact_s: float, ttl_s: float) -> float:
    """Seconds that keeping a place for at most `ttl_s` saves on average: C F(d) - E[T; T < d] - d (1 - F(d)): the miss
    saved by who returns in time, less the time kept for them, less the whole TTL for all others."""
    if ttl_s <= 0:
        return 0.0
    return miss_impact_s * times.below(ttl_s) - times.partial_mean(ttl_s) - ttl_s * times.above(ttl_s)


def acting_ttl_seconds(settings: ProgramSettings, means: Means, miss_impact_s: float) -> float:
    """The automatic TTL of a Program whose cache miss would cost `miss_impact_s`, by its `place_share`: 0 until the
    continuity window is full, else that of the candidates with the most utility, of equals the longest; at most
    `max_acting_ttl_seconds` and `miss_impact_s`, since keeping a place for longer than its miss costs never pays."""
    longest = min(settings.max_acting_ttl_seconds, miss_impact_s)
    if not means.continuity_full or not means.intervals_s or longest <= 0:
        return 0.0
    times = LogNormal.fitted(means.intervals_s)
    return max(_candidates(longest), key=lambda ttl: (utility_seconds(times, miss_impact_s, ttl), ttl))


def _candidates(longest: float) -> list[float]:
    """0, the shortest and the longest TTL, and STEPS from one to the other."""
    shortest = min(LEAST_TTL_SECONDS, longest)
    ratio = longest / shortest
    between = (shortest * ratio ** (step / (STEPS - 1)) for step in range(STEPS))
    return [0.0, shortest, longest, *(min(ttl, longest) for ttl in between)]


def place_share(settings: ProgramSettings, private_tokens: int) -> float:
    """The part of its rank, > 0 to 1, for which a Program that keeps its place has to pay: of the rank's tokens or of
    its number of Programs, whichever is more. All of it as `place_cost` says.

    Not in the published formula: there a second of a place costs as much as a second of the whole rank, so that any gap
    longer than the prefill of one context ends a hold. But a miss stops all of the rank, and a place keeps others from
    a part of it. With U divided by the share, its C becomes C / share, and nothing else changes.
    """
    if settings.place_cost == "rank":
        return 1.0
    capacity = settings.token_capacity_per_dp_rank
    of_tokens = 0.0 if capacity is None else private_tokens / capacity
    return min(max(of_tokens, 1 / settings.max_active_programs_per_target), 1.0)


# --- what a request asks for


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a Program keeps its place after a request. `automatic_s`: the part of `ttl_s` that the statistics would
    give it, too; beyond it the place is held by the request's hint alone."""

    ttl_s: float
    automatic_s: float


def retention(settings: ProgramSettings, means: Means, miss_impact_s: float, hint_s: float | None) -> Retention:
    """How long the place is kept after a request. Its hint `kv_retention_ttl_seconds` replaces the automatic TTL,
    shorter or longer, up to `max_kv_retention_ttl_seconds`."""
    automatic_s = acting_ttl_seconds(settings, means, miss_impact_s)
    if hint_s is None:
        return Retention(automatic_s, automatic_s)
    ttl_s = min(hint_s, settings.max_kv_retention_ttl_seconds)
    return Retention(ttl_s, min(automatic_s, ttl_s))


# --- coefficients that nobody measured

#: The loads of the two reference figures: a cold prefill, and a batch with the sum of its contexts.
REFERENCE_PREFILL_TOKENS = 50_000
REFERENCE_BATCH, REFERENCE_CONTEXT_TOKENS = 4, 200_000


@dataclass(frozen=True, slots=True)
class ReferenceCalibration:
    """Coefficients that are still those of a reference machine, with what all of them together say about two loads.
    `fields`: their names as in the settings."""

    fields: tuple[str, ...]
    prefill_seconds: float
    decode_tokens_per_s: float


def reference_calibration(settings: ProgramSettings) -> ReferenceCalibration | None:
    """What to warn of at start-up: None when every coefficient was given, or none has an effect. A value counts as
    given also where it equals the default."""
    models = {
        "prefill_cost_model": settings.prefill_cost_model,
        "decode_throughput_model": settings.decode_throughput_model,
    }
    missing = tuple(
        f"{name}.{field}"
        for name, model in models.items()
        for field in type(model).model_fields
        if field not in model.model_fields_set
    )
    if not settings.enabled or settings.binding_only or not missing:
        return None
    return ReferenceCalibration(
        missing,
        prefill_seconds(settings.prefill_cost_model, REFERENCE_PREFILL_TOKENS),
        decode_throughput(settings.decode_throughput_model, REFERENCE_BATCH, REFERENCE_CONTEXT_TOKENS),
    )

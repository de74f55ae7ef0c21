"""How long a Program keeps its place between two requests, and what a cache miss costs. Durations are in seconds.

The models and the utility are those of `shared/seeds/program_scheduling.md`; how they were derived stands in
docs/programs.md.
"""

from __future__ import annotations

from pool.program_settings import DecodeThroughputModel, PrefillCostModel


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

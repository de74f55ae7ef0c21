"""How many tokens a Program needs of a rank, and how sure we are of it.

Nobody reports a Program's context: it is estimated when a request arrives, known when it has completed, and may be
smaller afterwards, when an agent compacts its history.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Means, Program
from pool.rules.programs.windows import is_continuous

#: Tokens a byte of a request's body is taken for before anything was measured.
FIRST_COEFFICIENT = 0.25
#: Bounds of one measurement: a prompt that was mostly templates, or mostly base64, moves the average little.
LEAST_COEFFICIENT, MOST_COEFFICIENT = 0.01, 4.0
#: How much of the average one measurement is.
COEFFICIENT_SHARE = 0.1
#: An estimate of how long an observed prefix holds is never longer than a day.
MAX_FRESHNESS_SECONDS = 86_400.0


# --- a request that arrives


def arrival_tokens(body_bytes: int, coefficient: float, exact: int | None = None) -> int:
    """Prompt tokens of a request of so many bytes: `exact` where a tokenizer has counted them, else an estimate."""
    return exact if exact is not None else max(1, math.ceil(body_bytes * coefficient))


def next_coefficient(coefficient: float, body_bytes: int, prompt_tokens: int) -> float:
    """Tokens per byte, as a moving average, after a success whose prompt had `prompt_tokens`. Kept by model and
    endpoint."""
    if body_bytes <= 0:
        return coefficient
    measured = min(max(prompt_tokens / body_bytes, LEAST_COEFFICIENT), MOST_COEFFICIENT)
    return (1 - COEFFICIENT_SHARE) * coefficient + COEFFICIENT_SHARE * measured


# --- a Program's context


@dataclass(frozen=True, slots=True)
class ContextEstimate:
    """A Program's full context. `was_smaller`: whether the last authoritative observation was smaller than `tokens`."""

    tokens: int = 0
    was_smaller: bool = False

    def observed(self, tokens: int, *, is_authoritative: bool) -> ContextEstimate:
        """The estimate after an observation. It rises at once, and falls only to the second of two smaller
        authoritative observations in a row: a single short request beside the long conversation is no compaction. A
        guess that is smaller says nothing."""
        if tokens > self.tokens or (tokens == self.tokens and is_authoritative):
            return ContextEstimate(tokens)
        if not is_authoritative:
            return self
        return ContextEstimate(tokens) if self.was_smaller else ContextEstimate(self.tokens, was_smaller=True)


def private_context_tokens(program: Program) -> int:
    """Tokens of the Program's context that are in nobody else's: what it costs to compute them again is its miss."""
    return max(program.context_tokens - program.shared_prefix_tokens, 0)


def private_tokens(program: Program, decode_buffer_tokens: int, expected_output_tokens: int | None = None) -> int:
    """Tokens of KV that the Program needs for itself: its private context, and its next output.

    The output is the first that is known of `expected_output_tokens`, the hint of its waiting request, the stored
    reservation of its request in flight, and `decode_buffer_tokens`.
    """
    hints = (
        expected_output_tokens,
        program.waiting.expected_output_tokens if program.waiting is not None else None,
        program.reserved_output_tokens,
        decode_buffer_tokens,
    )
    return private_context_tokens(program) + next(tokens for tokens in hints if tokens is not None)


# --- the prefix a Program shares with others


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """How much of a Program's context others have too. `fresh_until_ms`: until when the observation counts, None before
    there was one."""

    tokens: int = 0
    fresh_until_ms: int | None = None

    def observed(
        self,
        *,
        cached_tokens: int | None,
        prompt_tokens: int,
        previous_prompt_tokens: int | None,
        is_first_of_segment: bool,
        now_ms: int,
        freshness_seconds: float,
    ) -> SharedPrefix:
        """The prefix after a completed request.

        What the first request of a segment found cached is what others have too, unless the Program found its own KV
        again, which says nothing; nor does an unknown count. A fresh observation is kept.
        """
        is_due = self.fresh_until_ms is None or now_ms >= self.fresh_until_ms
        if cached_tokens is None or not is_first_of_segment or not is_due:
            return self
        if previous_prompt_tokens and is_continuous(cached_tokens, previous_prompt_tokens):
            return self
        return SharedPrefix(min(cached_tokens, prompt_tokens), now_ms + math.ceil(freshness_seconds * 1000))


def shared_prefix_freshness_seconds(
    settings: ProgramSettings, means: Means, *, capacity_tokens: int | None, reasoning: int
) -> float:
    """How long an observed prefix counts: the time in which the `reasoning` active Programs of a rank replace its whole
    KV `shared_prefix_freshness_kv_turnovers` times. Each of them computes the mean uncached tokens per mean request.

    While the request window is not full, or a figure is unknown: `shared_prefix_freshness_warmup_seconds`.
    """
    seconds, uncached = means.end_to_end_s, means.uncached_tokens
    if not means.full or not capacity_tokens or not reasoning or not seconds or not uncached:
        return settings.shared_prefix_freshness_warmup_seconds
    turnover_seconds = capacity_tokens * seconds / reasoning / uncached
    return min(settings.shared_prefix_freshness_kv_turnovers * turnover_seconds, MAX_FRESHNESS_SECONDS)

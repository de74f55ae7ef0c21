"""Tokens: estimates of arrivals and contexts, private tokens, and what is known of shared prefixes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Means, Program, State, Status, Waiting
from pool.rules.programs.tokens import (
    FIRST_COEFFICIENT,
    LEAST_COEFFICIENT,
    MAX_FRESHNESS_SECONDS,
    MOST_COEFFICIENT,
    ContextEstimate,
    SharedPrefix,
    arrival_tokens,
    next_coefficient,
    private_context_tokens,
    private_tokens,
    shared_prefix_freshness_seconds,
)

# --- arrivals


@pytest.mark.parametrize(
    ("body_bytes", "coefficient", "exact", "tokens"),
    [(400, 0.25, None, 100), (401, 0.25, None, 101), (0, 0.25, None, 1), (400, 0.25, 7, 7), (0, 4.0, 0, 0)],
)
def test_arrivals(body_bytes: int, coefficient: float, exact: int | None, tokens: int) -> None:
    """Rounded up, at least one; a count is better than any estimate."""
    assert arrival_tokens(body_bytes, coefficient, exact) == tokens


@pytest.mark.parametrize(
    ("body_bytes", "prompt_tokens", "coefficient"),
    [
        (1000, 500, 0.9 * 0.25 + 0.1 * 0.5),
        (1000, 0, 0.9 * 0.25 + 0.1 * 0.01),
        (1, 1000, 0.9 * 0.25 + 0.1 * 4),
        (0, 1000, 0.25),
    ],
)
def test_the_coefficient_follows_what_was_measured(body_bytes: int, prompt_tokens: int, coefficient: float) -> None:
    """By a tenth of it, within bounds; an empty body measures nothing."""
    assert next_coefficient(FIRST_COEFFICIENT, body_bytes, prompt_tokens) == pytest.approx(coefficient)


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), max_size=50))
def test_the_coefficient_stays_within_its_bounds(measured: list[tuple[int, int]]) -> None:
    """Whatever is measured."""
    coefficient = FIRST_COEFFICIENT
    for body_bytes, prompt_tokens in measured:
        coefficient = next_coefficient(coefficient, body_bytes, prompt_tokens)
        assert LEAST_COEFFICIENT <= coefficient <= MOST_COEFFICIENT


# --- contexts


def context_after(*observed: int) -> int:
    """The estimate after these authoritative observations of a context that was 100."""
    estimate = ContextEstimate(100)
    for tokens in observed:
        estimate = estimate.observed(tokens, is_authoritative=True)
    return estimate.tokens


def test_a_context_rises_at_once_and_falls_at_the_second_sign() -> None:
    """The second of two smaller observations in a row is the new length; anything else between them starts anew."""
    assert context_after(150) == 150
    assert context_after(50) == 100
    assert context_after(50, 70) == 70
    assert context_after(70, 50) == 50
    assert context_after(50, 100, 50) == 100
    assert context_after(50, 120, 50) == 120
    assert context_after(50, 70, 60) == 70
    assert context_after(50, 70, 60, 60) == 60


def test_a_guess_only_raises_a_context() -> None:
    """A smaller or equal estimate neither lowers it nor breaks a row of observations."""
    once = ContextEstimate(100).observed(50, is_authoritative=True)
    assert once == ContextEstimate(100, was_smaller=True)
    assert once.observed(60, is_authoritative=False) == once
    assert once.observed(100, is_authoritative=False) == once
    assert once.observed(110, is_authoritative=False) == ContextEstimate(110)


@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), max_size=30))
def test_a_context_is_never_less_than_the_last_two_say(observed: list[tuple[int, bool]]) -> None:
    """After any history the estimate is at least the smaller of the last two authoritative observations."""
    estimate = ContextEstimate()
    said: list[int] = []
    for tokens, is_authoritative in observed:
        before = estimate
        estimate = estimate.observed(tokens, is_authoritative=is_authoritative)
        assert estimate.tokens >= min(tokens, before.tokens)
        said += [tokens] if is_authoritative else []
        assert not said[-2:] or estimate.tokens >= min(said[-2:])


# --- private tokens

PROGRAM = Program(
    id="p", state=State.PAUSED, status=Status.REASONING, rank="r", context_tokens=100, waiting=Waiting(0, 0)
)


def test_a_hint_replaces_the_reserved_output() -> None:
    """The reference figure: a context of 100 tokens with a hint of 200 needs 300."""
    assert private_tokens(PROGRAM, 100, 200) == 300


@pytest.mark.parametrize(
    ("hint", "waiting", "reserved", "tokens"),
    [(None, None, None, 107), (None, None, 30, 130), (None, 20, 30, 120), (10, 20, 30, 110), (0, 20, 30, 100)],
)
def test_the_output_is_the_first_that_is_known(
    hint: int | None, waiting: int | None, reserved: int | None, tokens: int
) -> None:
    """The hint given, the waiting request's, the stored reservation, the buffer; 0 is known."""
    program = replace(PROGRAM, reserved_output_tokens=reserved, waiting=Waiting(0, 0, expected_output_tokens=waiting))
    assert private_tokens(program, 7, hint) == tokens
    assert private_tokens(replace(program, waiting=None), 7, hint if hint is not None else waiting) == tokens


@pytest.mark.parametrize(("shared", "private"), [(0, 100), (40, 60), (100, 0), (150, 0)])
def test_what_others_have_too_counts_for_nobody(shared: int, private: int) -> None:
    """Down to nothing, never below."""
    program = replace(PROGRAM, shared_prefix_tokens=shared)
    assert private_context_tokens(program) == private
    assert private_tokens(program, 5) == private + 5


# --- shared prefixes


def after(prefix: SharedPrefix, cached: int | None, *, previous: int | None = None, first: bool = True,
          now_ms: int = 1000) -> SharedPrefix:  # fmt: skip
    """The prefix after a request with a prompt of 500 tokens; an observation holds for 2.5 s."""
    return prefix.observed(
        cached_tokens=cached,
        prompt_tokens=500,
        previous_prompt_tokens=previous,
        is_first_of_segment=first,
        now_ms=now_ms,
        freshness_seconds=2.5,
    )


def test_the_first_request_of_a_segment_shows_the_shared_prefix() -> None:
    """What it found cached, at most its prompt, for as long as that is fresh; 0 is an observation, too."""
    assert after(SharedPrefix(), 64) == SharedPrefix(64, 3500)
    assert after(SharedPrefix(), 900) == SharedPrefix(500, 3500)
    assert after(SharedPrefix(), 0) == SharedPrefix(0, 3500)
    assert after(SharedPrefix(), 64, previous=0) == SharedPrefix(64, 3500)


def test_what_is_no_evidence_changes_nothing() -> None:
    """An unknown count, a later request of the segment, and a Program that found its own KV again."""
    old = SharedPrefix(32, 900)
    assert after(old, None) == old
    assert after(old, 64, first=False) == old
    assert after(old, 360, previous=400) == old
    assert after(old, 359, previous=400) == SharedPrefix(359, 3500)


def test_a_fresh_observation_is_kept() -> None:
    """It is replaced when it is past, not before."""
    fresh = SharedPrefix(32, 2000)
    assert after(fresh, 64, now_ms=1999) == fresh
    assert after(fresh, 64, now_ms=2000) == SharedPrefix(64, 4500)


MATURE = Means(full=True, end_to_end_s=2.0, uncached_tokens=100.0)
SETTINGS = ProgramSettings(enabled=True, shared_prefix_freshness_warmup_seconds=77)


def test_freshness_is_the_time_of_two_turnovers() -> None:
    """4 Programs that compute 100 tokens each in 2 s replace 10,000 tokens in 50 s."""
    assert shared_prefix_freshness_seconds(SETTINGS, MATURE, capacity_tokens=10_000, reasoning=4) == 100.0
    thrice = SETTINGS.model_copy(update={"shared_prefix_freshness_kv_turnovers": 3.0})
    assert shared_prefix_freshness_seconds(thrice, MATURE, capacity_tokens=10_000, reasoning=4) == 150.0


@pytest.mark.parametrize(
    ("means", "capacity_tokens", "reasoning"),
    [
        (replace(MATURE, full=False), 10_000, 4),
        (replace(MATURE, end_to_end_s=None), 10_000, 4),
        (replace(MATURE, uncached_tokens=None), 10_000, 4),
        (replace(MATURE, uncached_tokens=0.0), 10_000, 4),
        (MATURE, None, 4),
        (MATURE, 10_000, 0),
    ],
)
def test_freshness_without_a_figure_is_the_warm_up(means: Means, capacity_tokens: int | None, reasoning: int) -> None:
    """An immature window, a missing figure, and one that nothing can be divided by."""
    found = shared_prefix_freshness_seconds(SETTINGS, means, capacity_tokens=capacity_tokens, reasoning=reasoning)
    assert found == 77


def test_freshness_has_an_end() -> None:
    """Next to nothing is computed, and still the prefix is looked at again some day."""
    idle = replace(MATURE, uncached_tokens=1e-9)
    found = shared_prefix_freshness_seconds(SETTINGS, idle, capacity_tokens=10_000, reasoning=1)
    assert found == MAX_FRESHNESS_SECONDS

"""Progress-TTL: the cost models, the utility against a numerical integral, the choice among candidates, and hints."""

from __future__ import annotations

import math
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pool.program_settings import DecodeThroughputModel, PrefillCostModel, ProgramSettings
from pool.rules.programs.facts import Means
from pool.rules.programs.ttl import (
    LEAST_SIGMA,
    LogNormal,
    ReferenceCalibration,
    Retention,
    acting_ttl_seconds,
    cache_miss_impact_seconds,
    decode_throughput,
    prefill_seconds,
    reference_calibration,
    retention,
    utility_seconds,
)

SETTINGS = ProgramSettings(enabled=True)
PREFILL = PrefillCostModel()
DECODE = DecodeThroughputModel()


def mature(*intervals_s: float) -> Means:
    """A full continuity window with these intervals."""
    return Means(continuity_full=True, intervals_s=intervals_s)


# --- costs


def test_reference_figures() -> None:
    """50,000 uncached tokens take 13.93 s, and 4 requests with 200,000 tokens of context get 98.23 tokens/s."""
    assert round(prefill_seconds(PREFILL, 50_000), 2) == 13.93
    assert round(decode_throughput(DECODE, 4, 200_000), 2) == 98.23


def test_a_miss_costs_the_prefill_and_the_decoding_beside_it() -> None:
    """Twice the prefill, less what decoding goes on beside it: the less goes on, the more it costs."""
    seconds = prefill_seconds(PREFILL, 8000)
    assert cache_miss_impact_seconds(PREFILL, 8000) == pytest.approx(seconds * 1.85)
    none_left = PREFILL.model_copy(update={"decode_throughput_alpha": 0.0})
    all_left = PREFILL.model_copy(update={"decode_throughput_alpha": 1.0})
    assert cache_miss_impact_seconds(none_left, 8000) == pytest.approx(2 * seconds)
    assert cache_miss_impact_seconds(all_left, 8000) == pytest.approx(seconds)


@pytest.mark.parametrize("tokens", [0, -5])
def test_nothing_costs_nothing(tokens: float) -> None:
    """Not even the fixed part."""
    assert prefill_seconds(PREFILL, tokens) == cache_miss_impact_seconds(PREFILL, tokens) == 0.0
    assert decode_throughput(DECODE, int(tokens), 0) == 0.0


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_longer_prefills_cost_more(fewer: int, more: int) -> None:
    """Strictly, and in proportion to the model's three parts."""
    assume(fewer < more)
    assert prefill_seconds(PREFILL, fewer) < prefill_seconds(PREFILL, more)
    quadratic = PrefillCostModel(
        intercept_seconds=0, linear_seconds_per_1k_tokens=0, quadratic_seconds_per_1k_tokens_squared=2.0
    )
    assert prefill_seconds(quadratic, more) == pytest.approx(2 * (more / 1000) ** 2)


@given(st.integers(1, 500), st.integers(0, 10**7), st.integers(1, 10**6))
def test_throughput_grows_with_the_batch_and_falls_with_its_context(batch: int, context: int, more: int) -> None:
    """For the same sum of contexts a larger batch gets more in all; a longer context less."""
    assert decode_throughput(DECODE, batch, context) < decode_throughput(DECODE, batch + 1, context)
    assert decode_throughput(DECODE, batch, context + more) < decode_throughput(DECODE, batch, context)


# --- the distribution


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=50))
def test_the_fit_is_that_of_the_logarithms(times: list[float]) -> None:
    """Their mean and population deviation, or a spread so small that it only keeps the formulas finite."""
    found = LogNormal.fitted(times)
    logs = [math.log(time) for time in times]
    assert found.mu == pytest.approx(fmean(logs), abs=1e-9)
    assert found.sigma == pytest.approx(max(pstdev(logs), LEAST_SIGMA), rel=1e-6, abs=1e-7)
    assert found.sigma >= LEAST_SIGMA


def quadrature(times: LogNormal, miss_impact_s: float, ttl_s: float) -> float:
    """The utility by Gauss-Legendre quadrature over z = (ln T - mu) / sigma: what a return at T saves is C - T before
    the TTL; after it, the TTL is lost."""
    edge = (math.log(ttl_s) - times.mu) / times.sigma
    nodes, weights = np.polynomial.legendre.leggauss(200)
    low, high = -12.0, 12.0

    def integral(begin: float, end: float, saved: Any) -> float:
        if begin >= end:
            return 0.0
        z = (end - begin) / 2 * nodes + (end + begin) / 2
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        return float(np.sum(weights * density * saved(z)) * (end - begin) / 2)

    before = integral(low, min(edge, high), lambda z: miss_impact_s - np.exp(times.mu + times.sigma * z))
    return before + integral(max(edge, low), high, lambda z: np.full_like(z, -ttl_s))


@settings(max_examples=300)
@given(
    mu=st.floats(-5, 5),
    sigma=st.floats(0.01, 2.5),
    miss_impact_s=st.floats(0.01, 100),
    share=st.floats(0.001, 3),
)
def test_the_utility_is_its_integral(mu: float, sigma: float, miss_impact_s: float, share: float) -> None:
    """The closed form agrees with a numerical integral of what each return saves."""
    times = LogNormal(mu, sigma)
    ttl_s = share * miss_impact_s
    scale = miss_impact_s + ttl_s
    assert utility_seconds(times, miss_impact_s, ttl_s) == pytest.approx(
        quadrature(times, miss_impact_s, ttl_s), abs=1e-6 * scale
    )


@given(
    mu=st.floats(-1000, 1000),
    sigma=st.floats(LEAST_SIGMA, 700),
    time_s=st.floats(1e-300, 1e300),
)
def test_the_distribution_stays_within_its_bounds(mu: float, sigma: float, time_s: float) -> None:
    """Whatever the parameters: no overflow, probabilities that sum to 1, and a partial mean of at most T x P."""
    times = LogNormal(mu, sigma)
    assert times.below(time_s) + times.above(time_s) == pytest.approx(1.0)
    assert 0 <= times.partial_mean(time_s) <= time_s * times.below(time_s)


def test_a_tail_is_exact_where_it_is_tiny() -> None:
    """1 - F would be 0 there, and a long TTL would look free."""
    tail = LogNormal(0.0, 1.0).above(math.exp(9.0))
    assert tail == pytest.approx(1.1285884059538405e-19, rel=1e-9)


def test_no_ttl_saves_and_costs_nothing() -> None:
    """The candidate that is always there."""
    assert utility_seconds(LogNormal(0.0, 1.0), 5.0, 0.0) == 0.0


# --- the choice


def test_a_cold_window_keeps_no_place() -> None:
    """Until it is full, and where nobody ever returned after any time."""
    assert acting_ttl_seconds(SETTINGS, Means(intervals_s=(0.1,)), 5.0) == 0.0
    assert acting_ttl_seconds(SETTINGS, mature(), 5.0) == 0.0


def test_nothing_to_lose_keeps_no_place() -> None:
    """Without a miss to avoid, or with TTLs switched off."""
    assert acting_ttl_seconds(SETTINGS, mature(0.1), 0.0) == 0.0
    assert acting_ttl_seconds(SETTINGS.model_copy(update={"max_acting_ttl_seconds": 0.0}), mature(0.1), 5.0) == 0.0


def test_quick_tools_are_waited_for_and_slow_ones_are_not() -> None:
    """A tool that takes a fraction of what its miss costs, and one that takes many times that."""
    quick = acting_ttl_seconds(SETTINGS, mature(0.1, 0.2, 0.3), 5.0)
    assert 0.3 < quick <= 5.0
    assert acting_ttl_seconds(SETTINGS, mature(100.0, 200.0, 300.0), 5.0) == 0.0


def test_of_equals_the_longest_is_taken() -> None:
    """All intervals are 1 s: every TTL beyond it saves the same, and the longest forgives most."""
    assert acting_ttl_seconds(SETTINGS, mature(1.0, 1.0), 5.0) == 5.0
    assert acting_ttl_seconds(SETTINGS, mature(1.0, 1.0), 50.0) == 10.0


def test_the_least_ttl_is_tried_and_never_more_than_the_miss_costs() -> None:
    """A miss that costs less than the shortest TTL makes that shorter."""
    assert acting_ttl_seconds(SETTINGS, mature(0.001, 0.001), 0.02) == 0.02


def test_between_quick_and_slow_tools_only_the_quick_ones_are_waited_for() -> None:
    """The best TTL is an inner one: longer would pay for tools that rarely return in time."""
    intervals = (0.05, 0.06, 0.07, 0.08, 0.09, 40.0)
    found = acting_ttl_seconds(SETTINGS, mature(*intervals), 2.0)
    assert 0.05 < found < 2.0


@settings(max_examples=200)
@given(
    intervals=st.lists(st.floats(0.001, 1000), min_size=1, max_size=20),
    miss_impact_s=st.floats(0.001, 100),
    longest_s=st.floats(0.001, 100),
)
def test_the_choice_is_the_best_of_its_candidates(
    intervals: list[float], miss_impact_s: float, longest_s: float
) -> None:
    """Within its bounds, never worse than no TTL, and nearly as good as the best of a much finer search."""
    capped = SETTINGS.model_copy(update={"max_acting_ttl_seconds": longest_s})
    found = acting_ttl_seconds(capped, mature(*intervals), miss_impact_s)
    most = min(longest_s, miss_impact_s)
    times = LogNormal.fitted(intervals)
    least = min(0.05, most)
    assert found == 0.0 or least <= found <= most
    best = utility_seconds(times, miss_impact_s, found)
    assert best >= 0.0
    candidates = [least, most, *(math.exp(t) for t in np.linspace(math.log(least), math.log(most), 32))]
    assert best >= max(utility_seconds(times, miss_impact_s, ttl) for ttl in candidates) - 1e-9 * miss_impact_s


@given(
    intervals=st.lists(st.floats(0.01, 100), min_size=1, max_size=20),
    miss_impact_s=st.floats(0.01, 50),
    more=st.floats(0, 50),
)
def test_a_dearer_miss_never_shortens_the_wait(intervals: list[float], miss_impact_s: float, more: float) -> None:
    """With the same candidates, more to lose keeps the place at least as long."""
    capped = SETTINGS.model_copy(update={"max_acting_ttl_seconds": 0.01})
    cheap = acting_ttl_seconds(capped, mature(*intervals), miss_impact_s)
    dear = acting_ttl_seconds(capped, mature(*intervals), miss_impact_s + more)
    assert cheap <= dear


@given(
    intervals=st.lists(st.floats(0.01, 100), min_size=1, max_size=20),
    miss_impact_s=st.floats(0.01, 5),
    share=st.floats(0.01, 1),
)
def test_a_place_costs_its_part_of_the_rank(intervals: list[float], miss_impact_s: float, share: float) -> None:
    """The TTL has the most of C F(d) - share x (E[T; T < d] + d (1 - F(d))), of all up to C / share."""
    times = LogNormal.fitted(intervals)

    def saved(ttl_s: float) -> float:
        if ttl_s == 0:
            return 0.0
        kept_s = times.partial_mean(ttl_s) + ttl_s * times.above(ttl_s)
        return miss_impact_s * times.below(ttl_s) - share * kept_s

    longest = min(SETTINGS.max_acting_ttl_seconds, miss_impact_s / share)
    found = acting_ttl_seconds(SETTINGS, mature(*intervals), miss_impact_s / share)
    assert 0 <= found <= longest
    assert saved(found) >= max(saved(longest * part / 8) for part in range(1, 9)) - 0.2 * miss_impact_s
    assert saved(found) >= -1e-9


# --- hints


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (None, Retention(5.0, 5.0)),
        (20.0, Retention(20.0, 5.0)),
        (2.0, Retention(2.0, 2.0)),
        (0.0, Retention(0.0, 0.0)),
        (1000.0, Retention(300.0, 5.0)),
    ],
)
def test_a_hint_replaces_the_automatic_ttl_up_to_its_cap(hint: float | None, expected: Retention) -> None:
    """Shorter or longer; what goes beyond the automatic part is the hint's alone."""
    assert retention(SETTINGS, mature(1.0, 1.0), 5.0, hint) == expected


def test_a_hint_counts_before_the_window_is_full() -> None:
    """Then all of it is the hint's; a cap of 0 switches hints off."""
    assert retention(SETTINGS, Means(), 5.0, 20.0) == Retention(20.0, 0.0)
    off = SETTINGS.model_copy(update={"max_kv_retention_ttl_seconds": 0.0})
    assert retention(off, mature(1.0, 1.0), 5.0, 20.0) == Retention(0.0, 0.0)


# --- coefficients that nobody measured

ALL_FIELDS = (
    "prefill_cost_model.intercept_seconds",
    "prefill_cost_model.linear_seconds_per_1k_tokens",
    "prefill_cost_model.quadratic_seconds_per_1k_tokens_squared",
    "prefill_cost_model.decode_throughput_alpha",
    "decode_throughput_model.fixed_step_seconds",
    "decode_throughput_model.batch_step_seconds_per_request",
    "decode_throughput_model.context_step_seconds_per_token",
)


def test_defaults_are_named_with_the_reference_figures() -> None:
    """All seven, and what they say of the two reference loads."""
    found = reference_calibration(SETTINGS)
    assert found is not None
    assert found.fields == ALL_FIELDS
    assert (round(found.prefill_seconds, 2), round(found.decode_tokens_per_s, 2)) == (13.93, 98.23)


def test_only_what_was_left_out_is_named() -> None:
    """A value that equals the default was given all the same; the figures are those in force."""
    some = ProgramSettings.model_validate(
        {
            "enabled": True,
            "prefill_cost_model": {
                "intercept_seconds": 1.0,
                "linear_seconds_per_1k_tokens": 0.0,
                "quadratic_seconds_per_1k_tokens_squared": 0.0,
                "decode_throughput_alpha": 0.15,
            },
            "decode_throughput_model": {"fixed_step_seconds": 2.0, "context_step_seconds_per_token": 0.0},
        }
    )
    assert reference_calibration(some) == ReferenceCalibration(
        ("decode_throughput_model.batch_step_seconds_per_request",), 1.0, 4 / (2 + 4 * 0.0004192803698834784)
    )


def test_nobody_is_warned_of_what_has_no_effect() -> None:
    """Without Programs, with binding alone, and when everything was measured."""
    assert reference_calibration(ProgramSettings()) is None
    assert reference_calibration(ProgramSettings(enabled=True, binding_only=True)) is None
    measured = ProgramSettings(
        enabled=True,
        prefill_cost_model=PrefillCostModel(**PREFILL.model_dump()),
        decode_throughput_model=DecodeThroughputModel(**DECODE.model_dump()),
    )
    assert reference_calibration(measured) is None


def test_one_models_measurements_count_for_it() -> None:
    """What a model's own table gives is not missing for that model."""
    settings_of_all = ProgramSettings.model_validate(
        {
            "enabled": True,
            "prefill_cost_model": PREFILL.model_dump(),
            "models": {"m": {"decode_throughput_model": DECODE.model_dump()}},
        }
    )
    assert reference_calibration(settings_of_all.of_model("m")) is None
    assert reference_calibration(settings_of_all) is not None

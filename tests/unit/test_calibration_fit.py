"""From points to coefficients: what made the points is found again, with errors that say how well."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.errors import InvalidRequest
from pool.program_settings import DecodeThroughputModel, PrefillCostModel
from pool.rules.programs.ttl import decode_throughput, prefill_seconds
from workers.calibration.fit import (
    LEAST_FIXED_SHARE,
    DecodePoint,
    MixedPoint,
    PrefillPoint,
    bounded_fit,
    decode_model,
    fit_alpha,
    fit_decode,
    fit_prefill,
    prefill_model,
)

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 8192, 32_768)
CELLS = [(batch, context * batch) for batch in (1, 2, 4, 8) for context in (64, 512, 4096)]


def prefills(model: PrefillCostModel, noise: float = 0.0, seed: int = 0) -> list[PrefillPoint]:
    """What a machine of this model would show; `noise`: deviation, as a part."""
    draw = np.random.default_rng(seed)
    return [
        PrefillPoint(length, prefill_seconds(model, length) * math.exp(noise * draw.standard_normal()))
        for length in LENGTHS
    ]


def decodes(model: DecodeThroughputModel, noise: float = 0.0, seed: int = 0) -> list[DecodePoint]:
    """The same for decode steps."""
    draw = np.random.default_rng(seed)
    return [
        DecodePoint(
            batch, context, batch / decode_throughput(model, batch, context) * math.exp(noise * draw.standard_normal())
        )
        for batch, context in CELLS
    ]


def test_exact_points_give_back_their_coefficients() -> None:
    """Those of the reference machine, to rounding, and nothing left to explain."""
    prefill, decode = fit_prefill(prefills(PrefillCostModel())), fit_decode(decodes(DecodeThroughputModel()))
    assert prefill_model(prefill, None).model_dump() == pytest.approx(PrefillCostModel().model_dump(), rel=1e-6)
    assert decode_model(decode).model_dump() == pytest.approx(DecodeThroughputModel().model_dump(), rel=1e-6)
    for fit in (prefill, decode):
        assert fit.r_squared == pytest.approx(1)
        assert fit.max_relative_residual < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_noisy_points_give_coefficients_within_their_errors(seed: int) -> None:
    """With 3 % of noise, what made the points is within four standard errors, and those are no excuse: predictions are
    within 10 %."""
    true_prefill, true_decode = PrefillCostModel(), DecodeThroughputModel()
    prefill = fit_prefill(prefills(true_prefill, 0.03, seed))
    decode = fit_decode(decodes(true_decode, 0.03, seed))
    for fit, model in ((prefill, true_prefill), (decode, true_decode)):
        for found, error, true in zip(fit.coefficients, fit.standard_errors, model.model_dump().values(), strict=False):
            assert error is None or abs(found - true) <= 4 * error
        assert 0 < fit.max_relative_residual < 0.15
        assert fit.r_squared > 0.9
    assert prefill_seconds(prefill_model(prefill, None), 5000) == pytest.approx(
        prefill_seconds(true_prefill, 5000), rel=0.1
    )
    assert decode_throughput(decode_model(decode), 6, 9000) == pytest.approx(
        decode_throughput(true_decode, 6, 9000), rel=0.1
    )


def test_a_noisier_machine_has_larger_errors() -> None:
    """In proportion."""
    quiet = fit_prefill(prefills(PrefillCostModel(), 0.001)).standard_errors
    noisy = fit_prefill(prefills(PrefillCostModel(), 0.01)).standard_errors
    for less, more in zip(quiet, noisy, strict=True):
        assert less is not None and more is not None
        assert more == pytest.approx(10 * less, rel=0.3)


@given(
    st.lists(st.floats(0.001, 10), min_size=3, max_size=12),
    st.lists(st.integers(1, 50_000), min_size=12, max_size=12, unique=True),
)
def test_no_coefficient_is_negative_and_no_other_choice_is_better(seconds: list[float], lengths: list[int]) -> None:
    """Whatever was measured. Moving any coefficient a little, within its bounds, makes it no better: the sum of squares
    has one minimum."""
    points = [PrefillPoint(length, second) for length, second in zip(lengths, seconds, strict=False)]
    fit = fit_prefill(points)
    assert min(fit.coefficients) >= 0

    def badness(coefficients: list[float]) -> float:
        a, b, c = coefficients
        return sum(
            (1 - (a + b * x + c * x * x) / point.seconds) ** 2 for point in points for x in [point.prompt_tokens / 1000]
        )

    best = badness(list(fit.coefficients))
    for place in range(3):
        for factor, step in ((0.99, 0.0), (1.01, 0.0), (1.0, 1e-6)):
            moved = list(fit.coefficients)
            moved[place] = moved[place] * factor + step
            assert badness(moved) >= best * (1 - 1e-6) - 1e-12


def test_what_would_be_negative_is_nothing() -> None:
    """Times that grow more slowly than in proportion have no quadratic part, and its error is not known."""
    fit = fit_prefill([PrefillPoint(length, math.sqrt(length)) for length in LENGTHS])
    assert fit.coefficients[2] == 0
    assert fit.standard_errors[2] is None
    assert fit.coefficients[0] > 0


def test_a_decode_step_always_has_a_fixed_part() -> None:
    """The settings ask for more than 0; where the points say none, a thousandth of the shortest step."""
    fit = fit_decode([DecodePoint(batch, context, 0.01 * batch) for batch, context in CELLS])
    assert fit.coefficients[0] == pytest.approx(LEAST_FIXED_SHARE * 0.01)
    assert decode_model(fit).batch_step_seconds_per_request == pytest.approx(0.01, rel=0.01)


def test_one_batch_alone_has_no_part_for_each_request() -> None:
    """It cannot be told from the fixed part."""
    fit = fit_decode([DecodePoint(1, context, 0.01 + 1e-6 * context) for context in (64, 512, 4096, 8192)])
    assert fit.coefficients == pytest.approx((0.01, 0, 1e-6))


def test_relative_residuals_count() -> None:
    """A long prompt that took twice as long does not spoil the short ones more than a short one would."""
    points = prefills(PrefillCostModel(intercept_seconds=0.001, quadratic_seconds_per_1k_tokens_squared=0))
    spoilt = [*points[:-1], PrefillPoint(points[-1].prompt_tokens, 2 * points[-1].seconds)]
    model = prefill_model(fit_prefill(spoilt), None)
    assert prefill_seconds(model, 64) == pytest.approx(points[1].seconds, rel=0.25)


def test_as_many_points_as_coefficients_have_no_errors() -> None:
    """There is nothing to estimate them from; and equal values have nothing to explain."""
    assert fit_prefill(prefills(PrefillCostModel())[::4]).standard_errors == (None, None, None)
    assert fit_prefill([PrefillPoint(length, 1.0) for length in LENGTHS]).r_squared == 1


def test_bounds_may_be_all_there_is() -> None:
    """Where every addition makes it worse, each coefficient lies at its bound."""
    fit = bounded_fit(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0.5, 0.5]), (2.0, 1.0))
    assert fit.coefficients == (2.0, 1.0)
    assert fit.standard_errors == (None, None)


# --- alpha


def test_alpha_is_the_part_of_decoding_that_is_left() -> None:
    """In the time of all prefills together: the long one counts most."""
    points = [MixedPoint(2, 64, 0.1, 0.05), MixedPoint(2, 8192, 9.9, 0.95)]
    assert [point.retained for point in points] == pytest.approx([0.5, 0.096], rel=0.01)
    fit = fit_alpha(points)
    assert fit.coefficients == pytest.approx((0.1,))
    assert fit.max_relative_residual == pytest.approx(0.4)
    assert prefill_model(fit_prefill(prefills(PrefillCostModel())), fit).decode_throughput_alpha == pytest.approx(0.1)


def test_alpha_has_an_error_from_two_points_on() -> None:
    """None of points that agree, more of those that do not."""
    assert fit_alpha([MixedPoint(1, 64, 1.0, 0.5)]).standard_errors == (None,)
    assert fit_alpha([MixedPoint(1, 64, 1.0, 0.5), MixedPoint(1, 128, 2.0, 1.0)]).standard_errors == pytest.approx((0,))
    (error,) = fit_alpha([MixedPoint(1, 64, 1.0, 0.4), MixedPoint(1, 64, 1.0, 0.6)]).standard_errors
    assert error == pytest.approx(0.1)


def test_alpha_is_at_most_one() -> None:
    """An engine that is not slowed down at all, timed a little unluckily."""
    fit = fit_alpha([MixedPoint(1, 64, 1.0, 1.1)])
    assert fit.coefficients == (1.0,)
    assert fit.r_squared == 1


# --- too little


def test_too_few_points_are_refused_by_name() -> None:
    """Three coefficients need three lengths, or three points."""
    with pytest.raises(InvalidRequest, match="three lengths") as refused:
        fit_prefill([PrefillPoint(64, 0.1), PrefillPoint(64, 0.2), PrefillPoint(128, 0.3)])
    assert refused.value.param == "prompt_tokens"
    with pytest.raises(InvalidRequest, match="three points"):
        fit_decode([DecodePoint(1, 64, 0.1), DecodePoint(2, 64, 0.1)])
    with pytest.raises(InvalidRequest, match="beside decoding"):
        fit_alpha([])

"""From measured points to the coefficients of the two cost models, with their errors. Pure; times are in seconds.

Each model is linear in its coefficients, none of which may be negative: a negative part would promise that more work
takes less time. Residuals count as parts of what was measured, since timings scatter in proportion to their length and
decisions are made at every length; plain ones would leave all but the longest prompts to chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from pool.errors import InvalidRequest
from pool.program_settings import DecodeThroughputModel, PrefillCostModel

Floats = npt.NDArray[np.float64]

#: A decode step's fixed part is more than nothing: at least this part of the shortest step that was measured.
LEAST_FIXED_SHARE = 1e-3
#: Two fits whose sums of squares differ by less than this part are equally good; the one with fewer terms is taken.
SAME_SUM = 1e-9

PREFILL_FIELDS = ("intercept_seconds", "linear_seconds_per_1k_tokens", "quadratic_seconds_per_1k_tokens_squared")
DECODE_FIELDS = ("fixed_step_seconds", "batch_step_seconds_per_request", "context_step_seconds_per_token")


# --- points


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A cold prompt of so many tokens, alone, from its arrival to its first token."""

    prompt_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A decode step of `batch` requests with `context_tokens` of context in sum."""

    batch: int
    context_tokens: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class MixedPoint:
    """A prompt that was prefilled while `batch` others decoded. `seconds`: from its arrival to its first token;
    `decode_seconds`: what the decode steps made in that time take when no prefill is beside them."""

    batch: int
    prompt_tokens: int
    seconds: float
    decode_seconds: float

    @property
    def retained(self) -> float:
        """The part of the decode throughput that was left."""
        return self.decode_seconds / self.seconds


# --- fits


@dataclass(frozen=True, slots=True)
class Fit:
    """`coefficients` (K,), in the order of the design's columns; `standard_errors` (K,): None where there are no more
    points than free coefficients, and of one that lies at its bound; `r_squared`: 1 - residuals² / deviations²;
    `max_relative_residual`: of all points, as a part of what was measured."""

    coefficients: tuple[float, ...]
    standard_errors: tuple[float | None, ...]
    r_squared: float
    max_relative_residual: float


def bounded_fit(design: Floats, measured: Floats, least: Sequence[float]) -> Fit:
    """The coefficients, none below its `least` (K,), whose predictions `design @ coefficients` have the smallest sum of
    squared relative residuals. `design` (N, K), `measured` (N,) > 0.

    Least squares under bounds has its optimum where some coefficients lie at their bounds and the others are an
    unbounded fit of the rest (Lawson and Hanson, Solving Least Squares Problems, chapter 23). With three of them every
    choice can be tried. Columns that others make up add nothing, and stay at their bounds.
    """
    bounds = np.asarray(least, np.float64)
    rows = design / measured[:, None]
    rest = 1 - rows @ bounds
    best_sum, best = float(rest @ rest), np.zeros(len(bounds))
    freed: tuple[int, ...] = ()
    for count in range(1, len(bounds) + 1):
        for free in combinations(range(len(bounds)), count):
            columns = rows[:, free]
            above, _, rank, _ = np.linalg.lstsq(columns / _sizes(columns), rest, rcond=None)
            above = above / _sizes(columns)
            if rank < count or (above < 0).any():
                continue
            residuals = rest - columns @ above
            square = float(residuals @ residuals)
            if square < best_sum * (1 - SAME_SUM):
                best_sum, freed, best = square, free, np.zeros(len(bounds))
                best[list(free)] = above
    found = bounds + best
    residuals = measured - design @ found
    deviations = measured - measured.mean()
    spread = float(deviations @ deviations)
    return Fit(
        tuple(found.tolist()),
        _standard_errors(rows, freed, best_sum),
        1 - float(residuals @ residuals) / spread if spread > 0 else 1.0,
        float(np.abs(residuals / measured).max()),
    )


def _sizes(columns: Floats) -> Floats:
    """The length of each column: divided by it, columns of different units are of one size."""
    lengths = np.linalg.norm(columns, axis=0)
    return np.where(lengths > 0, lengths, 1.0)


def _standard_errors(rows: Floats, free: Sequence[int], square: float) -> tuple[float | None, ...]:
    """Of the free coefficients: the roots of the diagonal of sigma² (XᵀX)⁻¹, sigma² from the residuals."""
    errors: list[float | None] = [None] * rows.shape[1]
    spare = len(rows) - len(free)
    if free and spare > 0:
        columns = rows[:, list(free)]
        sizes = _sizes(columns)
        scaled = columns / sizes
        variances = np.diag(np.linalg.inv(scaled.T @ scaled)) * (square / spare)
        for place, variance, size in zip(free, variances, sizes, strict=True):
            errors[place] = math.sqrt(max(float(variance), 0.0)) / float(size)
    return tuple(errors)


def fit_prefill(points: Sequence[PrefillPoint]) -> Fit:
    """a + b x + c x², x in thousands of tokens, all >= 0. Raises InvalidRequest for fewer than three lengths."""
    thousands = np.array([point.prompt_tokens / 1000 for point in points])
    if len(set(thousands.tolist())) < 3:
        raise InvalidRequest("A prefill model needs prompts of three lengths.", param="prompt_tokens")
    design = np.column_stack([np.ones_like(thousands), thousands, thousands**2])
    return bounded_fit(design, np.array([point.seconds for point in points]), (0, 0, 0))


def fit_decode(points: Sequence[DecodePoint]) -> Fit:
    """f + b B + c C of a step's seconds, f > 0, b and c >= 0. Where all batches are of one size, b cannot be told from
    f and is 0. Raises InvalidRequest for fewer than three points."""
    if len(points) < 3:
        raise InvalidRequest("A decode model needs three points.", param="batch")
    design = np.array([[1.0, point.batch, point.context_tokens] for point in points])
    steps = np.array([point.step_seconds for point in points])
    return bounded_fit(design, steps, (LEAST_FIXED_SHARE * float(steps.min()), 0, 0))


def fit_alpha(points: Sequence[MixedPoint]) -> Fit:
    """The part of decode throughput that is left in the time in which prompts are prefilled, all points together: their
    decode seconds by their seconds, so that long prefills, which cost most, count most. Between 0 and 1. Raises
    InvalidRequest without a point.

    The error is that of a ratio estimator (Cochran, Sampling Techniques, chapter 6); residuals are parts of the
    undisturbed throughput here.
    """
    if not points:
        raise InvalidRequest("Alpha needs a prefill beside decoding.", param="batch")
    seconds = np.array([point.seconds for point in points])
    decoding = np.array([point.decode_seconds for point in points])
    alpha = min(float(decoding.sum() / seconds.sum()), 1.0)
    residuals = decoding - alpha * seconds
    square = float(residuals @ residuals)
    count = len(points)
    error = math.sqrt(square / (count * (count - 1))) / float(seconds.mean()) if count > 1 else None
    spread = float(((decoding - decoding.mean()) ** 2).sum())
    return Fit(
        (alpha,),
        (error,),
        1 - square / spread if spread > 0 else 1.0,
        float(np.abs(residuals / seconds).max()),
    )


def prefill_model(prefill: Fit, alpha: Fit | None) -> PrefillCostModel:
    """The settings' section of these fits; without alpha it keeps its default."""
    given = dict(zip(PREFILL_FIELDS, prefill.coefficients, strict=True))
    return PrefillCostModel(**given, **({} if alpha is None else {"decode_throughput_alpha": alpha.coefficients[0]}))


def decode_model(decode: Fit) -> DecodeThroughputModel:
    """The settings' section of this fit."""
    return DecodeThroughputModel(**dict(zip(DECODE_FIELDS, decode.coefficients, strict=True)))

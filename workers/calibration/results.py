"""A calibration: the coefficients that fit what was measured, their errors, and how well they say what no fit saw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pool.program_settings import DecodeThroughputModel, PrefillCostModel
from pool.rules.programs.ttl import cache_miss_impact_seconds, decode_throughput, prefill_seconds
from workers.calibration.fit import (
    Fit,
    decode_model,
    fit_alpha,
    fit_decode,
    fit_prefill,
    prefill_model,
)
from workers.calibration.measuring import Measurement, Samples
from workers.calibration.plan import Cell

PREFILL, DECODE, MISS = "prefill", "decode", "cache miss"


@dataclass(frozen=True, slots=True)
class Check:
    """One point against its model. `kind`: PREFILL and MISS are seconds, DECODE is tokens per second of all requests
    together; `batch`, `tokens`: of the decoding requests (0: none), and of the prompt or of all contexts in sum;
    `held_out`: whether no fit saw it."""

    kind: str
    batch: int
    tokens: float
    measured: float
    predicted: float
    held_out: bool

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1

    @property
    def what(self) -> str:
        """The point in words."""
        if self.kind == PREFILL:
            return f"prefill of {self.tokens:.0f} tokens"
        beside = f"{self.batch} request{'s' if self.batch > 1 else ''}"
        if self.kind == MISS:
            return f"cache miss of {self.tokens:.0f} tokens beside {beside}"
        return f"decode of {beside} with {self.tokens:.0f} tokens of context"


@dataclass(frozen=True, slots=True)
class Calibration:
    """`alpha`: None where nothing ever decodes beside a prefill, as only one request runs at a time."""

    prefill: Fit
    decode: Fit
    alpha: Fit | None
    checks: tuple[Check, ...]
    measurement: Measurement

    @property
    def prefill_cost_model(self) -> PrefillCostModel:
        """The settings' section."""
        return prefill_model(self.prefill, self.alpha)

    @property
    def decode_throughput_model(self) -> DecodeThroughputModel:
        """The settings' section."""
        return decode_model(self.decode)

    def held_out(self) -> list[Check]:
        """The points that no fit saw."""
        return [check for check in self.checks if check.held_out]

    def missed(self, tolerance: float) -> list[Check]:
        """Those of them whose error is larger than this part, the worst first."""
        return sorted(
            (check for check in self.held_out() if abs(check.error) > tolerance), key=lambda check: -abs(check.error)
        )


def calibrated(measurement: Measurement) -> Calibration:
    """Fit the models to what was not held out, and look at all points with them."""
    plan, samples = measurement.plan, measurement.samples
    prefill = fit_prefill(
        [samples.prefill_point(length) for length in samples.prefill if length not in plan.held_prefill]
    )
    decode = fit_decode([samples.decode_point(cell) for cell in samples.decode if cell not in plan.held_decode])
    mixed = [samples.mixed_point(cell) for cell in samples.mixed if cell not in plan.held_mixed]
    alpha = fit_alpha(mixed) if mixed else None
    costs, speeds = prefill_model(prefill, alpha), decode_model(decode)
    checks = [
        *_prefill_checks(samples, costs, plan.held_prefill),
        *_decode_checks(samples, speeds, plan.held_decode),
        *_miss_checks(samples, costs, plan.held_mixed),
    ]
    return Calibration(prefill, decode, alpha, tuple(checks), measurement)


def _prefill_checks(samples: Samples, model: PrefillCostModel, held: frozenset[int]) -> Iterator[Check]:
    for length in sorted(samples.prefill):
        point = samples.prefill_point(length)
        yield Check(PREFILL, 0, length, point.seconds, prefill_seconds(model, length), length in held)


def _decode_checks(samples: Samples, model: DecodeThroughputModel, held: frozenset[Cell]) -> Iterator[Check]:
    for cell in sorted(samples.decode):
        point = samples.decode_point(cell)
        predicted = decode_throughput(model, point.batch, point.context_tokens)
        yield Check(
            DECODE, point.batch, point.context_tokens, point.batch / point.step_seconds, predicted, cell in held
        )


def _miss_checks(samples: Samples, model: PrefillCostModel, held: frozenset[Cell]) -> Iterator[Check]:
    """What a miss costs: alone, alpha is no quantity that anybody needs. Measured: the cold prefill of that length, and
    the part of it that decoding beside a prefill lost."""
    for cell in sorted(samples.mixed):
        point = samples.mixed_point(cell)
        measured = samples.prefill_point(point.prompt_tokens).seconds * (2 - min(point.retained, 1.0))
        predicted = cache_miss_impact_seconds(model, point.prompt_tokens)
        yield Check(MISS, point.batch, point.prompt_tokens, measured, predicted, cell in held)

"""The figures of a batching loop: names, ratios, sliding rates, histograms."""

from __future__ import annotations

import json

import pytest

from pool.rules.admission import Budgets, Reason
from tasks.ports import KVUsage
from workers.telemetry import RATE_WINDOW_S, Histogram, Rate, Telemetry

#: Section by section what the heartbeat promises.
NAMES = {
    "active_sessions",
    "queue_depth",
    "batch_occupancy_last",
    "batch_occupancy_avg",
    "batch_occupancy_max",
    "weight_bytes",
    "kv_total_bytes",
    "kv_budget_bytes",
    "kv_pressure",
    "scratch_used_bytes",
    "scratch_budget_bytes",
    "scratch_pressure",
    "prefill_tokens_total",
    "decode_tokens_total",
    "prefill_tokens_per_sec",
    "decode_tokens_per_sec",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "rejected_admissions_total",
    "rejected_by_reason",
    "completed_sessions",
    "cancelled_sessions",
    "failed_sessions",
    "preempted_total",
    "cache_misses_total",
    "ticks",
    "step_seconds",
}


class Clock:
    """Tells what it is told."""

    now_s = 1000.25

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def figures(clock: Clock) -> Telemetry:
    """Of a rank with 1000 positions of 10 bytes."""
    budgets = Budgets(weight_bytes=77, scratch_bytes_per_session=3, scratch_budget_bytes=9)
    return Telemetry(budgets, 10, KVUsage(1000, 0, 0, 0, 0), clock)


def test_every_name_is_there_and_json_safe(clock: Clock) -> None:
    """Also before anything has happened: ratios of nothing are 0."""
    data = figures(clock).data(active=0, waiting=0)
    assert data.keys() >= NAMES
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["batch_occupancy_avg"], data["kv_pressure"], data["decode_tokens_per_sec"]) == (0, 0, 0)


def test_budgets_and_pressures(clock: Clock) -> None:
    """Bytes of what is held, and its part of the budget to four places."""
    telemetry = figures(clock)
    telemetry.see(KVUsage(total=1000, held=333, pinned=100, cached=50, evictions=4))
    data = telemetry.data(active=2, waiting=5)
    assert (data["active_sessions"], data["queue_depth"], data["weight_bytes"]) == (2, 5, 77)
    assert (data["kv_total_bytes"], data["kv_budget_bytes"], data["kv_pressure"]) == (3330, 10_000, 0.333)
    assert (data["kv_pinned_bytes"], data["kv_cached_bytes"], data["kv_evictions_total"]) == (1000, 500, 4)
    assert (data["scratch_used_bytes"], data["scratch_budget_bytes"], data["scratch_pressure"]) == (6, 9, 0.6667)


def test_occupancy_counts_ticks_that_decode(clock: Clock) -> None:
    """The average is over non-empty batches, and the last is 0 after a tick without one."""
    telemetry = figures(clock)
    for rows in (3, 8, 0, 4, 0):
        telemetry.planned(rows)
    data = telemetry.data(active=0, waiting=0)
    occupancy = [data[f"batch_occupancy_{what}"] for what in ("last", "avg", "max")]
    assert (occupancy, data["decode_batches_total"]) == ([0, 5.0, 8], 3)
    assert data["batch_occupancy"] == {
        "le": [1, 2, 4, 8, 16, 32, 64, 128, 256],
        "counts": [0, 0, 2, 3, 3, 3, 3, 3, 3, 3],
        "sum": 15,
    }


def test_refusals_by_reason(clock: Clock) -> None:
    """Counted under the words of the wire."""
    telemetry = figures(clock)
    for reason in (Reason.QUEUE_FULL, Reason.DUPLICATE, Reason.QUEUE_FULL):
        telemetry.rejected_for(reason)
    data = telemetry.data(active=0, waiting=0)
    assert data["rejected_admissions_total"] == 3
    assert data["rejected_by_reason"] == {"rejected-queue-full": 2, "rejected-duplicate": 1}


def test_rates_slide(clock: Clock) -> None:
    """They follow the last seconds and fall to nothing when nothing happens; totals stay."""
    telemetry = figures(clock)
    for _ in range(30):
        clock.now_s += 1
        telemetry.prefilled(50, clock.now_s)
        telemetry.decoded(clock.now_s)
    data = telemetry.data(active=0, waiting=0)
    assert 50 <= data["prefill_tokens_per_sec"] <= 55
    assert 1 <= data["decode_tokens_per_sec"] <= 1.1
    clock.now_s += RATE_WINDOW_S + 1
    data = telemetry.data(active=0, waiting=0)
    assert (data["prefill_tokens_per_sec"], data["decode_tokens_per_sec"]) == (0, 0)
    assert (data["prefill_tokens_total"], data["decode_tokens_total"]) == (1500, 30)


def test_a_rate_of_a_young_loop_is_of_its_own_time() -> None:
    """Not of ten seconds that never were, nor of so short a time that one event is a thousand a second."""
    rate = Rate(5.0)
    rate.add(10, 5.001)
    assert rate.per_second(5.001) == 10
    rate.add(10, 8.9)
    assert rate.per_second(9.0) == 5


def test_an_old_bucket_is_used_again() -> None:
    """A second that shares its place with one long ago counts from nothing."""
    rate = Rate(0.0)
    rate.add(1000, 3.5)
    rate.add(18, 3.5 + RATE_WINDOW_S + 1)
    assert rate.per_second(3.5 + RATE_WINDOW_S + 1) == pytest.approx(18 / 9.5)


def test_a_histogram_counts_up_to_its_bounds() -> None:
    """A value on a bound belongs to its bucket; the last count is of all."""
    histogram = Histogram((0.1, 0.5))
    for value in (0.05, 0.1, 0.1001, 0.5, 7.0):
        histogram.observe(value)
    assert histogram.data() == {"le": [0.1, 0.5], "counts": [2, 4, 5], "sum": 7.7501}


def test_steps_and_gaps_are_histograms(clock: Clock) -> None:
    """Seconds a step took, and seconds between two tokens of a session."""
    telemetry = figures(clock)
    telemetry.stepped(0.003)
    telemetry.stepped(0.2)
    telemetry.gap(0.004)
    data = telemetry.data(active=0, waiting=0)
    assert (data["ticks"], data["step_seconds_total"], data["step_seconds"]["counts"][-1]) == (2, 0.203, 2)
    assert data["inter_token_seconds"]["counts"][-1] == 1
    assert data["inter_token_seconds"]["sum"] == 0.004

"""Figures of one batching loop: totals, rates over a sliding window, histograms with fixed buckets.

Written by the loop's thread alone and cheap for it; read by any. No session content.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pool.rules.admission import Budgets, Reason
from tasks.ports import KVUsage
from workers.offload import OffloadStore

RATE_WINDOW_S = 10
#: Upper bounds of the histograms' buckets; one without bound follows.
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
INTER_TOKEN_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
OCCUPANCY_SESSIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass
class Histogram:
    """How often a value fell into each bucket. `bounds`: the buckets' upper bounds, which belong to them."""

    bounds: Sequence[float]
    total: float = 0.0

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def data(self) -> dict[str, Any]:
        """`le`: upper bounds; `counts`: values up to each of them, and last of all values; `sum` of the values."""
        counts: list[int] = []
        for count in list(self._counts):
            counts.append(count + (counts[-1] if counts else 0))
        return {"le": list(self.bounds), "counts": counts, "sum": round(self.total, 4)}


class Rate:
    """Events a second over the last RATE_WINDOW_S seconds, in one bucket a second."""

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._buckets = [(-1, 0)] * (RATE_WINDOW_S + 1)

    def add(self, count: int, now_s: float) -> None:
        """Count events that happened now."""
        second = int(now_s)
        at = second % len(self._buckets)
        former, counted = self._buckets[at]
        self._buckets[at] = (second, counted + count if former == second else count)

    def per_second(self, now_s: float) -> float:
        """The average over the window, or over the time since the start where that is less, but not over less than a
        second."""
        first = int(now_s) - RATE_WINDOW_S
        events = sum(count for second, count in list(self._buckets) if second > first)
        return events / max(1.0, min(now_s - self._began_s, RATE_WINDOW_S - 1 + now_s % 1))


@dataclass
class Telemetry:
    """`occupancy_sum` adds up the rows of each decode batch; `usage` is the engine's, as of the last tick."""

    budgets: Budgets
    bytes_per_token: int
    usage: KVUsage
    clock: Callable[[], float]
    ticks: int = 0
    decode_batches: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    occupancy_last: int = 0
    occupancy_max: int = 0
    occupancy_sum: int = 0
    completed_sessions: int = 0
    cancelled_sessions: int = 0
    failed_sessions: int = 0
    preempted: int = 0
    cache_misses: int = 0
    held_positions_max: int = 0
    offloads: int = 0
    offload_failures: int = 0
    restores: int = 0
    restored_tokens: int = 0
    restore_failures: int = 0
    offloaded_memory_bytes: int = 0
    offloaded_disk_bytes: int = 0
    offloads_dropped: int = 0
    offloads_unreadable: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        now_s = self.clock()
        self._prefill_rate = Rate(now_s)
        self._decode_rate = Rate(now_s)
        self._steps = Histogram(STEP_SECONDS)
        self._gaps = Histogram(INTER_TOKEN_SECONDS)
        self._occupancies = Histogram(OCCUPANCY_SESSIONS)

    def rejected_for(self, reason: Reason) -> None:
        """A job was not taken. The caller sees to it that this runs in one thread at a time."""
        self.rejected[str(reason)] += 1

    def planned(self, occupancy: int) -> None:
        """A tick decodes so many sessions; 0: it has no decode batch."""
        self.occupancy_last = occupancy
        if occupancy:
            self.decode_batches += 1
            self.occupancy_sum += occupancy
            self.occupancy_max = max(self.occupancy_max, occupancy)
            self._occupancies.observe(occupancy)

    def stepped(self, took_s: float) -> None:
        """The engine made a step."""
        self.ticks += 1
        self._steps.observe(took_s)

    def prefilled(self, tokens: int, now_s: float) -> None:
        """Prompt tokens were computed."""
        self.prefill_tokens += tokens
        self._prefill_rate.add(tokens, now_s)

    def decoded(self, now_s: float) -> None:
        """A decode row gave a token."""
        self.decode_tokens += 1
        self._decode_rate.add(1, now_s)

    def gap(self, took_s: float) -> None:
        """So long after its session's last token came the next."""
        self._gaps.observe(took_s)

    def began(self, prompt_tokens: int, cached: int) -> None:
        """A session began for the first time, with so much of its prompt computed already."""
        self.prompt_tokens += prompt_tokens
        self.prompt_tokens_cached += cached

    def see(self, usage: KVUsage) -> None:
        """What the engine holds now."""
        self.usage = usage
        self.held_positions_max = max(self.held_positions_max, usage.held)

    def see_offloaded(self, store: OffloadStore) -> None:
        """What is outside the engine now."""
        self.offloaded_memory_bytes, self.offloaded_disk_bytes = store.memory_bytes, store.disk_bytes
        self.offloads_dropped, self.offloads_unreadable = store.dropped, store.unreadable

    def data(self, *, active: int, waiting: int) -> dict[str, Any]:
        """All of it, JSON-safe; ratios and rates to 4 places."""
        budgets, usage, now_s = self.budgets, self.usage, self.clock()
        scratch = active * budgets.scratch_bytes_per_session
        # Once, so that the total is that of its parts.
        rejected = dict(self.rejected)
        return {
            "active_sessions": active,
            "queue_depth": waiting,
            "batch_occupancy_last": self.occupancy_last,
            "batch_occupancy_avg": _ratio(self.occupancy_sum, self.decode_batches),
            "batch_occupancy_max": self.occupancy_max,
            "weight_bytes": budgets.weight_bytes,
            "kv_total_bytes": usage.held * self.bytes_per_token,
            "kv_pinned_bytes": usage.pinned * self.bytes_per_token,
            "kv_cached_bytes": usage.cached * self.bytes_per_token,
            "kv_budget_bytes": usage.total * self.bytes_per_token,
            "kv_pressure": _ratio(usage.held, usage.total),
            "kv_evictions_total": usage.evictions,
            "kv_offloaded_memory_bytes": self.offloaded_memory_bytes,
            "kv_offloaded_disk_bytes": self.offloaded_disk_bytes,
            "kv_offloads_total": self.offloads,
            "kv_offload_failures_total": self.offload_failures,
            "kv_offloads_dropped_total": self.offloads_dropped,
            "kv_restores_total": self.restores,
            "kv_restored_tokens_total": self.restored_tokens,
            "kv_restore_failures_total": self.restore_failures + self.offloads_unreadable,
            "scratch_used_bytes": scratch,
            "scratch_budget_bytes": budgets.scratch_budget_bytes,
            "scratch_pressure": _ratio(scratch, budgets.scratch_budget_bytes),
            "prefill_tokens_total": self.prefill_tokens,
            "decode_tokens_total": self.decode_tokens,
            "decode_batches_total": self.decode_batches,
            "prefill_tokens_per_sec": round(self._prefill_rate.per_second(now_s), 4),
            "decode_tokens_per_sec": round(self._decode_rate.per_second(now_s), 4),
            "prompt_tokens_total": self.prompt_tokens,
            "prompt_tokens_cached_total": self.prompt_tokens_cached,
            "rejected_admissions_total": sum(rejected.values()),
            "rejected_by_reason": rejected,
            "completed_sessions": self.completed_sessions,
            "cancelled_sessions": self.cancelled_sessions,
            "failed_sessions": self.failed_sessions,
            "preempted_total": self.preempted,
            "cache_misses_total": self.cache_misses,
            "ticks": self.ticks,
            "step_seconds_total": round(self._steps.total, 4),
            "step_seconds": self._steps.data(),
            "inter_token_seconds": self._gaps.data(),
            "batch_occupancy": self._occupancies.data(),
        }


def _ratio(part: float, whole: float) -> float:
    """Of nothing, none."""
    return round(part / whole, 4) if whole else 0.0

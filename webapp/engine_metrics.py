"""The families of /metrics about batching loops: what each live rank last told in its heartbeat.

A family is named after the figure (`workers.telemetry`) it shows, counters with `_total` behind. Series are of a rank,
also counters: a sum over ranks would fall whenever one of them leaves, and `rate()` takes a fall for a restart. A rank
that restarts begins at 0; one that is gone has no series. A figure that a rank does not tell, being of another version,
is missing for that rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from pool.rules.admission import Reason
from pool.store.ranks import Rank

PREFIX = "genpool_engine_"
LABELS = ("model", "rank")
#: Reasons of refusals that are shown; another one is `other`.
REASONS = tuple(reason.value for reason in Reason if reason not in (Reason.ADMITTED, Reason.QUEUED))
OTHER = "other"

GAUGES = {
    "runtime_inflight": "Generations handed to the loop that have not ended.",
    "configured_target_inflight": "Generations it is configured to run at once.",
    "effective_target_inflight": "Generations it runs at once: what is configured, as far as it can.",
    "active_sessions": "Sessions that hold a slot.",
    "queue_depth": "Sessions taken that wait for a slot or for room.",
    "batch_occupancy_last": "Rows of the last tick's decode batch; 0 when it had none.",
    "batch_occupancy_avg": "Rows of a decode batch on average.",
    "batch_occupancy_max": "Most rows of a decode batch.",
    "weight_bytes": "Bytes of the weights, as configured.",
    "kv_total_bytes": "Bytes of KV that sessions or holders have, each once.",
    "kv_pinned_bytes": "The part of them that is kept for holders.",
    "kv_cached_bytes": "Bytes of KV that later sessions may begin with, given up when room is needed.",
    "kv_offloaded_memory_bytes": "Bytes of KV outside the engine, in memory.",
    "kv_offloaded_disk_bytes": "Bytes of KV outside the engine, on disk.",
    "kv_budget_bytes": "Bytes of KV the engine holds in all.",
    "kv_pressure": "Part of the KV budget that sessions or holders have.",
    "scratch_used_bytes": "Bytes of working memory counted for the active sessions.",
    "scratch_budget_bytes": "Bytes of working memory they may take.",
    "scratch_pressure": "Part of that in use.",
    "prefill_tokens_per_sec": "Prompt tokens computed a second, over the last seconds.",
    "decode_tokens_per_sec": "Tokens decoded a second, over the last seconds.",
    "upstream_up": "Whether the server that runs the model takes requests.",
}
COUNTERS = {
    "prefill_tokens_total": "Prompt tokens computed.",
    "decode_tokens_total": "Tokens decoded, without each session's first.",
    "decode_batches_total": "Decode batches.",
    "prompt_tokens_total": "Prompt tokens of sessions that began.",
    "prompt_tokens_cached_total": "The part of them that was there already.",
    "completed_sessions": "Sessions that ended by themselves.",
    "cancelled_sessions": "Sessions that were cancelled.",
    "failed_sessions": "Sessions that failed.",
    "preempted_total": "Times a session gave its room to others.",
    "cache_misses_total": "Times a session's KV was gone and was computed again.",
    "kv_evictions_total": "Units of KV given up for room.",
    "kv_offloads_total": "Times KV left the engine for memory or disk.",
    "kv_offload_failures_total": "Times it was to leave, and could not.",
    "kv_offloads_dropped_total": "Times it was given up outside the engine, for others or for its age.",
    "kv_restores_total": "Times it came back.",
    "kv_restored_tokens_total": "Prompt tokens that did not have to be computed for that.",
    "kv_restore_failures_total": "Times it could not come back, and its prompt was computed again.",
    "ticks": "Steps of the engine.",
    "upstream_requests_total": "Requests sent to the server that runs the model.",
    "upstream_retries_total": "Times one was sent again because the server had broken it.",
    "upstream_given_back_total": "Sessions that went back to the queue because the server was away for too long.",
    "upstream_restarts_total": "Times the server was started again because it had ended.",
}
HISTOGRAMS = {
    "step_seconds": "Seconds a step of the engine took.",
    "inter_token_seconds": "Seconds between two tokens of a session.",
    "batch_occupancy": "Rows of a decode batch.",
}
#: The one figure that is a mapping.
BY_REASON = "rejected_by_reason"

#: A rank's labels, and the figures it told.
Told: TypeAlias = tuple[tuple[str, str], Mapping[str, Any]]


def engine_families(found: Mapping[str, list[Rank]]) -> Iterable[Metric]:
    """All families, for the live ranks of each model."""
    told = [((model, rank.id), rank.facts) for model, ranks in found.items() for rank in ranks]
    return [
        *(_plain(GaugeMetricFamily(PREFIX + name, text, labels=LABELS), name, told) for name, text in GAUGES.items()),
        *(
            _plain(CounterMetricFamily(PREFIX + name, text, labels=LABELS), name, told)
            for name, text in COUNTERS.items()
        ),
        _rejected(told),
        *(_histogram(name, text, told) for name, text in HISTOGRAMS.items()),
    ]


def _plain(family: GaugeMetricFamily | CounterMetricFamily, name: str, told: Iterable[Told]) -> Metric:
    for labels, facts in told:
        if name in facts:
            family.add_metric(labels, facts[name])
    return family


def _rejected(told: Iterable[Told]) -> Metric:
    text = "Jobs that were not taken: handed back, or failed by name where they can never run."
    family = CounterMetricFamily(PREFIX + "rejected_admissions", text, labels=(*LABELS, "reason"))
    for labels, facts in told:
        if BY_REASON in facts:
            counts = facts[BY_REASON]
            for reason in REASONS:
                family.add_metric((*labels, reason), counts.get(reason, 0))
            others = sum(count for reason, count in counts.items() if reason not in REASONS)
            family.add_metric((*labels, OTHER), others)
    return family


def _histogram(name: str, text: str, told: Iterable[Told]) -> Metric:
    """Ranks tell cumulative counts already, the last one of all values."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
    for labels, facts in told:
        if name in facts:
            bounds = [*(f"{bound:g}" for bound in facts[name]["le"]), "+Inf"]
            buckets = list(zip(bounds, facts[name]["counts"], strict=True))
            family.add_metric(labels, buckets, facts[name]["sum"])
    return family

"""The families of /metrics about Programs: what the state server counts itself, and ranks as they stand at the scrape.

Everything is read from the state server, so every node and process says the same. Labels are models of the catalogue,
ids of ranks, and fixed words; never a Program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import Reason
from pool.rules.programs.capacity import is_fresh, usage
from pool.rules.programs.facts import CapacitySource, PauseReason
from pool.store.program_figures import UPPER, Distribution, ProgramSurvey, RankFigures
from webapp.engine_metrics import OTHER

PREFIX = "genpool_program_"
LABELS = ("model", "rank")
TRANSITIONS = ("create", "bind", "admit", "continue", "rest", "mark", "pause", "release")
#: Why something happened to a Program; another word is `other`.
REASONS = frozenset(
    {
        *(reason.value for reason in PauseReason),
        *(reason.value for reason in Reason),
        "arrival", "bound", "successor", "completed", "finished", "retention", "failover", "relocation",
    }
)  # fmt: skip
GAUGES = {
    "rank_active_programs": "Programs that have a place on the rank.",
    "rank_reasoning_programs": "Those of them that have a request in flight.",
    "rank_queue_size": "Programs that wait for the rank.",
    "rank_up": "Whether a process is the rank.",
    "rank_capacity_tokens": "KV tokens of the rank that Programs may own.",
    "rank_used_tokens": "Tokens counted as used.",
    "rank_ledger_tokens": "Tokens that the active Programs need for themselves, by our own ledger.",
    "rank_leaving_tokens": "Tokens of Programs that have left, until the engine reports them gone.",
    "observation_age_seconds": "Age of what the engine last reported.",
    "observation_fresh": "Whether that counts.",
    "engine_running_requests": "Requests that the engine ran, as it last reported.",
    "engine_waiting_requests": "Requests that waited inside the engine, as it last reported.",
    "admission_used_tokens": "Tokens that were used at the last admission.",
    "admission_required_tokens": "Tokens that the Program admitted last needed.",
    "admission_reserve_tokens": "Tokens that were reserved for growth at the last admission.",
    "admission_capacity_pressure": "Used tokens of the capacity, at the last admission.",
    "admission_projected_pressure": "The same with what was admitted and the reserve.",
}
HISTOGRAMS = {
    "queue_wait_ms": ("queue_wait_seconds", "From a request's arrival to when it was sent to its rank."),
    "request_interval_ms": ("request_interval_seconds", "From a completed request to the Program's next."),
    "cache_miss_impact_ms": ("cache_miss_impact_seconds", "What it would cost if a Program's KV were lost."),
    "armed_ttl_ms": ("armed_ttl_seconds", "How long a place is kept after a completed request."),
    "context_growth_tokens": ("context_growth_tokens", "Growth of a prompt over the one before."),
    "shared_prefix_tokens": ("shared_prefix_tokens", "Prefixes that were seen to be shared with others."),
}


def program_families(found: Mapping[str, tuple[ProgramSurvey, ProgramSettings]]) -> Iterable[Metric]:
    """All families, of each model."""
    yield from _models(found)
    yield from _gauges(found)
    yield _sources(found)
    for name, (family, text) in HISTOGRAMS.items():
        yield _histogram(name, HistogramMetricFamily(PREFIX + family, text, labels=LABELS), found)


def _models(found: Mapping[str, tuple[ProgramSurvey, ProgramSettings]]) -> Iterable[Metric]:
    held = GaugeMetricFamily(PREFIX + "programs", "Programs that are known.", labels=["model"])
    text = "What happened to Programs, and why."
    passed = CounterMetricFamily(PREFIX + "transitions", text, labels=["model", "transition", "reason"])
    for model, (survey, _) in found.items():
        held.add_metric([model], survey.programs)
        counts: dict[tuple[str, str], int] = {}
        for (what, why), count in survey.transitions.items():
            words = (what if what in TRANSITIONS else OTHER, why if why in REASONS else OTHER)
            counts[words] = counts.get(words, 0) + count
        for words, count in counts.items():
            passed.add_metric([model, *words], count)
    return [held, passed]


def _gauges(found: Mapping[str, tuple[ProgramSurvey, ProgramSettings]]) -> Iterable[Metric]:
    families = {name: GaugeMetricFamily(PREFIX + name, text, labels=LABELS) for name, text in GAUGES.items()}
    for model, (survey, settings) in found.items():
        for figures in survey.ranks:
            for name, value in _values(figures, settings, survey.at_ms):
                families[name].add_metric([model, figures.rank.id], value)
    return families.values()


def _values(figures: RankFigures, settings: ProgramSettings, now_ms: int) -> Iterable[tuple[str, float]]:
    """The gauges of a rank; one that has no value now is missing, never a zero."""
    rank, seen, capacity = figures.rank, figures.rank.observation, figures.rank.capacity_tokens
    used = usage(rank, settings, now_ms)
    yield "rank_active_programs", rank.active
    yield "rank_reasoning_programs", rank.reasoning
    yield "rank_queue_size", figures.waiting
    yield "rank_up", int(figures.is_up)
    yield "rank_used_tokens", used.used_tokens
    yield "rank_ledger_tokens", rank.ledger_tokens
    yield "rank_leaving_tokens", rank.leaving_tokens
    if capacity is not None:
        yield "rank_capacity_tokens", capacity
    if seen is not None and used.age_ms is not None:
        yield "observation_age_seconds", used.age_ms / 1000
        yield "observation_fresh", int(is_fresh(seen, settings, now_ms))
        yield "engine_running_requests", seen.running
        yield "engine_waiting_requests", seen.waiting
    if figures.admission is not None:
        at_admission, required, reserve = figures.admission
        yield "admission_used_tokens", at_admission
        yield "admission_required_tokens", required
        yield "admission_reserve_tokens", reserve
        if capacity is not None:
            yield "admission_capacity_pressure", at_admission / capacity
            yield "admission_projected_pressure", (at_admission + required + reserve) / capacity


def _sources(found: Mapping[str, tuple[ProgramSurvey, ProgramSettings]]) -> Metric:
    text = "1 for the source of the rank's used tokens, 0 for the others."
    family = GaugeMetricFamily(PREFIX + "capacity_accounting_source", text, labels=(*LABELS, "source"))
    for model, (survey, settings) in found.items():
        for figures in survey.ranks:
            now = usage(figures.rank, settings, survey.at_ms).source
            for source in CapacitySource:
                family.add_metric([model, figures.rank.id, source.value], int(source is now))
    return family


def _histogram(
    name: str, family: HistogramMetricFamily, found: Mapping[str, tuple[ProgramSurvey, ProgramSettings]]
) -> Metric:
    unit = name.rpartition("_")[2]
    scale = 1000 if unit == "ms" else 1
    for model, (survey, _) in found.items():
        for figures in survey.ranks:
            seen = figures.figures[name]
            family.add_metric([model, figures.rank.id], _buckets(seen, UPPER[unit], scale), seen.total / scale)
    return family


def _buckets(seen: Distribution, upper: tuple[int, ...], scale: int) -> list[tuple[str, float]]:
    """Cumulative counts with their upper bounds, as Prometheus wants them."""
    bounds = [f"{bound / scale:.15g}" for bound in upper] + ["+Inf"]
    return [(bound, float(sum(seen.counts[: at + 1]))) for at, bound in enumerate(bounds)]

"""The families of /metrics that are read from the state server at scrape time: the same on every node and process.

Gauges are looked up, counters are sums that the server itself keeps (`pool.store.totals`), so neither a killed process
nor a restarted node changes them. What ranks tell of themselves is in `webapp.engine_metrics`. Labels are bounded:
models of the catalogue, states, known codes and reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pool.errors import StateUnavailable
from pool.program_settings import ProgramSettings
from pool.rules.model_states import RANK_STATES, STATES
from pool.store.executors import executors
from pool.store.memory import Memory, memories
from pool.store.program_figures import ProgramSurvey, program_survey
from pool.store.ranks import Rank, serving
from pool.store.totals import BOUNDS_MS, Histogram, Survey
from tasks.model_rows import ModelRow, model_row
from webapp.engine_metrics import OTHER, engine_families
from webapp.node import Node
from webapp.program_metrics import program_families

#: Codes of failed jobs that are shown; another one is `other`.
CODES = (
    "content_filter", "context_length_exceeded", "deadline_exceeded", "engine_error", "generation_failed", "input_lost",
    "invalid_request", "kv_budget_exceeded", "logprobs_unavailable", "model_unloading", "poison", "queue_timeout",
    "run_timeout", "unsupported_parameter", "upstream_error", "upstream_invalid_answer", "upstream_lost",
    "upstream_rejected", "upstream_stalled",
)  # fmt: skip


class StateCollector(Collector):
    """Families of all models there are or were, disabled ones included: what they hold must end too."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterable[Metric]:
        """All families; without a state server only that it is away."""
        up = GaugeMetricFamily("genpool_state_up", "Whether the state server answered this scrape.")
        client, models = self._node.services.client, list(self._node.services.catalogue.known)
        try:
            executing = executors(client, models)
            memory = memories(client)
            programs = self._programs()
        except StateUnavailable:
            up.add_metric([], 0)
            return [up]
        up.add_metric([], 1)
        found = {model: executor.survey for model, executor in executing.items()}
        ranks = {model: serving(executor.ranks) for model, executor in executing.items()}
        state = (
            *_memory(memory),
            *_held(found),
            *_ranks(ranks),
            *_replicas(
                model_row(model, self._node.services.catalogue.last(model), executor)
                for model, executor in executing.items()
            ),
            *_passed(found),
            *_times(found),
        )
        return [up, *state, *engine_families(ranks), *(program_families(programs) if programs else ())]

    def _programs(self) -> dict[str, tuple[ProgramSurvey, ProgramSettings]]:
        """Of all models, where Programs are on. Raises StateUnavailable."""
        settings, client = self._node.settings, self._node.services.client
        if not settings.programs.enabled:
            return {}
        of_models = {model: settings.programs.of_model(model) for model in self._node.services.catalogue.known}
        return {model: (program_survey(client, model, own), own) for model, own in of_models.items()}


def _memory(memory: Sequence[Memory]) -> Iterable[Metric]:
    used_bytes = sum(server.used_bytes for server in memory)
    yield GaugeMetricFamily("genpool_state_memory_bytes", "Memory the state server uses, all nodes of it.", used_bytes)
    shares = [server.share for server in memory if server.share is not None]
    if shares:
        text = "Part of the state server's maxmemory in use, of its fullest node; above 0.85 new jobs are refused."
        yield GaugeMetricFamily("genpool_state_memory_share", text, max(shares))


def _held(found: Mapping[str, Survey]) -> Iterable[Metric]:
    queued = GaugeMetricFamily("genpool_jobs_queued", "Jobs waiting for a worker.", labels=["model"])
    running = GaugeMetricFamily("genpool_jobs_running", "Jobs begun by a worker.", labels=["model"])
    text = "How long ago the oldest job that waits for a worker was submitted; 0 when none waits."
    oldest = GaugeMetricFamily("genpool_oldest_queued_seconds", text, labels=["model"])
    letters = GaugeMetricFamily("genpool_dead_letters", "Dead letters kept.", labels=["model"])
    for model, survey in found.items():
        queued.add_metric([model], survey.queued)
        running.add_metric([model], survey.running)
        oldest.add_metric([model], survey.oldest_ms / 1000)
        letters.add_metric([model], survey.dead_letters)
    return [queued, running, oldest, letters]


def _ranks(found: Mapping[str, list[Rank]]) -> Iterable[Metric]:
    live = GaugeMetricFamily("genpool_ranks", "Live worker processes that serve the model.", labels=["model"])
    text = "Generations that the live ranks run at once, all together."
    slots = GaugeMetricFamily("genpool_slots", text, labels=["model"])
    for model, ranks in found.items():
        live.add_metric([model], len(ranks))
        slots.add_metric([model], sum(rank.slots for rank in ranks))
    return [live, slots]


def _replicas(rows: Iterable[ModelRow]) -> Iterable[Metric]:
    states = GaugeMetricFamily("genpool_model_state", "1 for the state the model is in.", labels=["model", "state"])
    text = "Live ranks by what they do with the model."
    replicas = GaugeMetricFamily("genpool_replicas", text, labels=["model", "state"])
    text = "Generations that the loaded replicas are configured to run at once, all together."
    configured = GaugeMetricFamily("genpool_configured_slots", text, labels=["model"])
    for row in rows:
        for state in STATES:
            states.add_metric([row.id, state], row.state == state)
        for state in RANK_STATES:
            replicas.add_metric([row.id, state], sum(rank.state == state for rank in row.ranks))
        configured.add_metric([row.id], row.configured_target_inflight)
    return [states, replicas, configured]


def _passed(found: Mapping[str, Survey]) -> Iterable[Metric]:
    submitted = CounterMetricFamily("genpool_jobs_submitted", "Jobs accepted.", labels=["model"])
    ended = CounterMetricFamily("genpool_jobs_ended", "Jobs ended, each once.", labels=["model", "state"])
    failed = CounterMetricFamily("genpool_jobs_failed", "Failed jobs by error code.", labels=["model", "code"])
    text = "Returns of jobs to the queue."
    requeued = CounterMetricFamily("genpool_jobs_requeued", text, labels=["model", "reason"])
    text = "Jobs whose record was deleted or evicted before they ended."
    vanished = CounterMetricFamily("genpool_jobs_vanished", text, labels=["model"])
    text = "Prompt tokens of ended jobs that had begun."
    prompt = CounterMetricFamily("genpool_prompt_tokens", text, labels=["model"])
    output = CounterMetricFamily("genpool_output_tokens", "Tokens generated for ended jobs.", labels=["model"])
    for model, survey in found.items():
        totals = survey.totals
        submitted.add_metric([model], totals.submitted)
        for state, count in totals.ended.items():
            ended.add_metric([model, state], count)
        for code in CODES:
            failed.add_metric([model, code], totals.failed.get(code, 0))
        failed.add_metric([model, OTHER], sum(count for code, count in totals.failed.items() if code not in CODES))
        for reason, count in totals.requeued.items():
            requeued.add_metric([model, reason], count)
        vanished.add_metric([model], totals.vanished)
        prompt.add_metric([model], totals.prompt_tokens)
        output.add_metric([model], totals.output_tokens)
    return [submitted, ended, failed, requeued, vanished, prompt, output]


def _times(found: Mapping[str, Survey]) -> Iterable[Metric]:
    text = "Ended jobs: time from submit to the first begin."
    wait = HistogramMetricFamily("genpool_queue_wait_seconds", text, labels=["model"])
    text = "Ended jobs: time from the first begin to the end, time between two workers included."
    run = HistogramMetricFamily("genpool_run_seconds", text, labels=["model"])
    for model, survey in found.items():
        wait.add_metric([model], _buckets(survey.totals.wait), survey.totals.wait.sum_ms / 1000)
        run.add_metric([model], _buckets(survey.totals.run), survey.totals.run.sum_ms / 1000)
    return [wait, run]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts with their upper bounds in seconds, as Prometheus wants them."""
    bounds = [f"{bound_ms / 1000:g}" for bound_ms in BOUNDS_MS] + ["+Inf"]
    return [(bound, float(sum(histogram.counts[: at + 1]))) for at, bound in enumerate(bounds)]

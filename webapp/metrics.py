"""/metrics: HTTP figures of all API processes, and what the state server knows (`webapp.state_metrics`).

The exporter counts requests; under gunicorn its values live in files of PROMETHEUS_MULTIPROC_DIR, which every process
can sum up. Its own endpoint builds a fresh registry for each scrape, in which a collector of ours would be missing, so
the view is ours.

Labels are bounded: routes are the rules of the URL map (anything else is `other`), methods the served ones, models
those of the catalogue. Requests that are refused are counted by method and status, and not timed: a histogram for each
way to be wrong would be dozens of series for any curious caller. A stream counts when it begins: its duration is the
time to the first byte.
"""

from __future__ import annotations

import http
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flask import Flask, Request, Response, request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_flask_exporter import PrometheusMetrics
from prometheus_flask_exporter.multiprocess import GunicornInternalPrometheusMetrics

from webapp.node import Node
from webapp.state_metrics import StateCollector
from webapp.waits import OnCount

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

#: The library's function has no types: metrics from the files of several processes.
_sum_up: Any = MultiProcessCollector.merge

METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS"})
#: The method of what was no request; no token of HTTP has parentheses.
NO_METHOD = "(none)"
#: Upper bounds of the durations, in seconds.
BUCKETS = (0.01, 0.1, 0.5, 1, 5, 10, 60, 600)
MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def route(asked: Request) -> str:
    """The URL rule that matched, as a label."""
    return str(asked.url_rule) if asked.url_rule is not None else "other"


class ProcessesCollector(Collector):
    """The figures of all API processes, those that have died included."""

    def collect(self) -> Iterable[Metric]:
        """The library's own collector fails on the file of a process that is just starting: it is empty for a moment.
        Gauges of single processes are left out; they would be new series with every process."""
        files = [
            str(path)
            for path in Path(os.environ[MULTIPROCESS_VARIABLE]).glob("*.db")
            if not path.name.startswith("gauge_all_") and not _is_empty(path)
        ]
        found: Iterable[Metric] = _sum_up(files, accumulate=True)
        return found


def _is_empty(path: Path) -> bool:
    """Whether nothing is in the file, or it has gone."""
    try:
        return path.stat().st_size == 0
    except FileNotFoundError:
        return True


class KnownMethods:
    """WSGI middleware: a method that nothing here serves becomes OTHER, so that callers cannot invent label values."""

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        if environ["REQUEST_METHOD"].upper() not in METHODS:
            environ["REQUEST_METHOD"] = "OTHER"
        return self._app(environ, start_response)


def register_metrics(app: Flask, node: Node) -> None:
    """Count requests from now on, and serve /metrics."""
    registry = CollectorRegistry()
    shared = MULTIPROCESS_VARIABLE in os.environ
    exporter = GunicornInternalPrometheusMetrics if shared else PrometheusMetrics
    exporter(
        None,
        path=None,
        registry=registry,
        group_by=route,
        buckets=BUCKETS,
        defaults_prefix="genpool",
        excluded_paths="^/metrics$",
    ).init_app(app)
    if shared:
        node.on_raw_answer = _raw_answers()
    app.after_request(_leave_untimed)  # runs before the exporter's own
    state = StateCollector(node)
    node.places.on_change = _gauge("genpool_requests_waiting", "Requests and streams that hold a place.", registry).inc
    node.waits.on_change = _gauge("genpool_waiters", "Waits for news of a job.", registry).inc

    @app.get("/metrics")
    def metrics() -> Response:
        """Figures for Prometheus, listed in docs/metrics.md."""
        return Response(b"".join(_parts(None if shared else registry, state)), content_type=CONTENT_TYPE_LATEST)

    app.wsgi_app = KnownMethods(app.wsgi_app)  # type: ignore[method-assign]  # Flask's documented way


def _leave_untimed(response: Response) -> Response:
    """Take the beginning away from what is only counted; the exporter then has nothing to time."""
    refused = response.status_code >= http.HTTPStatus.BAD_REQUEST
    if (refused or request.method == "OPTIONS") and hasattr(request, "prom_start_time"):
        del request.prom_start_time
    return response


def _raw_answers() -> OnCount:
    """Counts answers to what never became a request, in the exporter's own family: that keeps its counter to itself,
    but the figures of all processes are summed up by name, and no request has this method."""
    total = Counter(
        "genpool_http_request", "Total number of HTTP requests", ("method", "status"), registry=CollectorRegistry()
    )
    return lambda status: total.labels(NO_METHOD, str(status)).inc()


def _gauge(name: str, text: str, registry: CollectorRegistry) -> Gauge:
    """A gauge that is the sum over the processes that live."""
    return Gauge(name, text, registry=registry, multiprocess_mode="livesum")


def _parts(own: CollectorRegistry | None, state: StateCollector) -> Iterator[bytes]:
    """The HTTP figures (of this process alone, or summed up from all), then the state server's."""
    if own is None:
        own = CollectorRegistry()
        own.register(ProcessesCollector())
    yield generate_latest(own)
    live = CollectorRegistry()
    live.register(state)
    yield generate_latest(live)

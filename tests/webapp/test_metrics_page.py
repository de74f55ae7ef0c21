"""docs/metrics.md lists every family of /metrics, and no other; what live ranks tell is on the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, Response, request

from pool.program_settings import ProgramSettings
from pool.rules.admission import Budgets, Reason
from pool.store.connection import Client
from pool.store.program_upkeep import Look
from tasks.ports import KVUsage
from tests.webapp.playing_worker import MODEL, PlayingWorker
from webapp import engine_metrics
from workers.telemetry import Telemetry

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
#: What a unit says that a name says too.
UNIT_OF_SUFFIX = {"bytes": "bytes", "seconds": "seconds", "tokens": "tokens", "pressure": "part of 1"}


@pytest.fixture
def limited(client: Client) -> Iterator[Client]:
    """The state server with a limit of 1 GiB."""
    client.config_set("maxmemory", 2**30)
    yield client
    client.config_set("maxmemory", 0)


def families(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Types and label names of the families of a scrape. That a histogram has buckets is part of its type."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    labels: dict[str, set[str]] = {name: set() for name in kinds}
    for name, held in re.findall(r"^(genpool_\w+)(?:{(.*)})? \S+$", text, re.MULTILINE):
        family = name if name in kinds else re.sub("_(bucket|sum|count)$", "", name)
        labels[family] |= set(re.findall(r'(\w+)="', held)) - {"le"}
    return {name: (kind, frozenset(labels[name])) for name, kind in kinds.items()}


def listed() -> dict[str, tuple[str, frozenset[str]]]:
    """The same, as the page has it."""
    rows = re.findall(r"^\| `(genpool_\w+)` \| (\w+) \| ([a-z, ]*)\|", PAGE.read_text(), re.MULTILINE)
    return {name: (kind, frozenset(labels.replace(",", " ").split())) for name, kind, labels in rows}


def told() -> dict[str, Any]:
    """What a loop tells that has made two steps."""
    telemetry = Telemetry(Budgets(weight_bytes=77), 10, KVUsage(1000, 333, 100, 50, 4), lambda: 1000.0)
    for rows, took_s in ((3, 0.003), (8, 0.2)):
        telemetry.planned(rows)
        telemetry.stepped(took_s)
        for _ in range(rows):
            telemetry.decoded(1000.0)
            telemetry.gap(took_s)
    telemetry.prefilled(40, 1000.0)
    telemetry.began(50, 10)
    for reason in (Reason.QUEUE_FULL, Reason.KV_BUDGET, Reason.QUEUE_FULL):
        telemetry.rejected_for(reason)
    limits = {"configured_target_inflight": 8, "effective_target_inflight": 4, "runtime_inflight": 9}
    upstream = {name: 1 for name in (*engine_metrics.GAUGES, *engine_metrics.COUNTERS) if name.startswith("upstream_")}
    return telemetry.data(active=8, waiting=1) | limits | upstream


def beat(worker: PlayingWorker, rank: str, facts: dict[str, Any]) -> None:
    """A heartbeat of a rank."""
    assert worker.registry.beat(rank, "life-1", lease_ms=60_000, facts=facts)


def engine_samples(app: Flask) -> dict[str, float]:
    """Samples of batching loops, by name and labels, without the prefix."""
    text = app.test_client().get("/metrics").get_data(as_text=True)
    return {name: float(value) for name, value in re.findall(r"^genpool_engine_(\S+) (\S+)$", text, re.MULTILINE)}


def run_a_program(app: Flask) -> None:
    """A rank that has been looked at, and a Program that was admitted there."""
    programs = app.extensions["genpool"].services.programs
    store, upkeep = programs.store(MODEL), programs.upkeep(MODEL)
    upkeep.join("rank-a", "life-1")
    asked = {"model": MODEL, "input": "x", "background": True, "vllm_xargs": {"agentic_context": {"program_id": "p"}}}
    assert app.test_client().post("/v1/responses", json=asked).status_code == 200
    programs.turn([MODEL], set())
    seen = store.snapshot("rank-a")
    assert upkeep.observe("rank-a", "life-1", Look(seen.now_ms, seen.rank_set, seen.moved_tokens, 100))


@pytest.mark.usefixtures("limited")
def test_the_page_lists_every_family(make_app: Callable[..., Flask], worker: PlayingWorker, client: Client) -> None:
    """With its type and the names of its labels; `genpool_..._created` is left out."""
    app = make_app(programs=ProgramSettings(enabled=True, token_capacity_per_dp_rank=10_000))
    beat(worker, worker.rank, told())

    @app.after_request
    def break_one(response: Response) -> Response:
        if request.path == "/broken":  # a view's own error is answered, and no exception to the exporter
            raise RuntimeError
        return response

    run_a_program(app)
    http = app.test_client()
    for path in ("/v1/models", "/broken"):
        http.get(path)
    shown = families(http.get("/metrics").get_data(as_text=True))
    assert {name: found for name, found in shown.items() if not name.endswith("_created")} == listed()
    client.flushall()


def test_every_family_has_a_unit() -> None:
    """The one that its name says, where that says one."""
    rows = re.findall(
        r"^\| `(genpool_\w+)` \|[^|]*\|[^|]*\|[^|]*\| ([^|]+) \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE
    )
    assert {name for name, _ in rows} == listed().keys()
    for name, unit in rows:
        suffix = name.removesuffix("_total").rpartition("_")[2]
        assert unit == UNIT_OF_SUFFIX.get(suffix, unit), name


def test_every_figure_of_a_loop_is_a_family() -> None:
    """But for those that are the sum of one."""
    shown = {*engine_metrics.GAUGES, *engine_metrics.COUNTERS, *engine_metrics.HISTOGRAMS, engine_metrics.BY_REASON}
    assert told().keys() - shown == {"rejected_admissions_total", "step_seconds_total"}
    assert shown <= told().keys()


def test_a_rank_is_shown_as_it_told(app: Flask, worker: PlayingWorker) -> None:
    """Each with series of its own, and cumulative buckets. One that tells nothing yet, or is of another version, lacks
    what it does not tell, and takes nothing from the others."""
    beat(worker, "rank-a", told())
    beat(worker, "rank-b", {"active_sessions": 2, "rejected_by_reason": {"rejected-for-tomorrow": 5}})
    found = engine_samples(app)
    a, b = (f'model="{MODEL}",rank="rank-{name}"' for name in "ab")
    assert found[f"active_sessions{{{a}}}"] == 8
    assert (found[f"kv_total_bytes{{{a}}}"], found[f"kv_pressure{{{a}}}"]) == (3330, 0.333)
    assert (found[f"prompt_tokens_total{{{a}}}"], found[f"prompt_tokens_cached_total{{{a}}}"]) == (50, 10)
    assert found[f'step_seconds_bucket{{le="0.0025",{a}}}'] == 0
    assert found[f'step_seconds_bucket{{le="0.005",{a}}}'] == 1
    assert found[f'step_seconds_bucket{{le="+Inf",{a}}}'] == found[f"step_seconds_count{{{a}}}"] == 2
    assert found[f"step_seconds_sum{{{a}}}"] == 0.203
    assert found[f'batch_occupancy_bucket{{le="4",{a}}}'] == 1
    assert (found[f"batch_occupancy_count{{{a}}}"], found[f"batch_occupancy_sum{{{a}}}"]) == (2, 11)
    assert found[f"inter_token_seconds_count{{{a}}}"] == 11
    rejected = {
        re.findall('reason="(.*)"', name)[0]: value
        for name, value in found.items()
        if name.startswith("rejected") and "rank-a" in name
    }
    assert rejected == {
        "rejected-queue-full": 2,
        "rejected-kv-budget": 1,
        "rejected-scratch-budget": 0,
        "rejected-duplicate": 0,
        "rejected-invalid": 0,
        "other": 0,
    }
    assert found[f'rejected_admissions_total{{{b},reason="other"}}'] == 5
    assert {name.partition("{")[0] for name in found if b in name} == {"active_sessions", "rejected_admissions_total"}
    assert not [name for name in found if worker.rank in name]


def test_the_memory_share_is_that_of_the_limit(make_app: Callable[..., Flask], limited: Client) -> None:
    """Without a limit there is no share."""
    http = make_app().test_client()

    def figure(name: str) -> list[float]:
        text = http.get("/metrics").get_data(as_text=True)
        return [float(value) for value in re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)]

    (share,), (used,) = figure("genpool_state_memory_share"), figure("genpool_state_memory_bytes")
    assert share * 2**30 == pytest.approx(used, rel=0.2)
    limited.config_set("maxmemory", 0)
    assert figure("genpool_state_memory_share") == []


def test_a_failure_without_a_name_of_its_own_is_other(make_app: Callable[..., Flask], worker: PlayingWorker) -> None:
    """Codes come from workers, perhaps of another version: they add no series."""
    http = make_app().test_client()
    for code in ("engine_error", "a_code_of_tomorrow", "another"):
        http.post("/v1/responses", json={"model": MODEL, "input": "x", "background": True})
        worker.fail(worker.take(), code)
    text = http.get("/metrics").get_data(as_text=True)
    counts = dict(re.findall(rf'^genpool_jobs_failed_total{{code="(\w+)",model="{MODEL}"}} (\S+)$', text, re.MULTILINE))
    assert {code: count for code, count in counts.items() if count != "0.0"} == {"engine_error": "1.0", "other": "2.0"}

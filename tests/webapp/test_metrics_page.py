"""docs/metrics.md lists every family of /metrics, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flask import Flask, Response, request

from pool.store.connection import Client
from tests.webapp.playing_worker import MODEL, PlayingWorker

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


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


@pytest.mark.usefixtures("limited")
def test_the_page_lists_every_family(make_app: Callable[..., Flask]) -> None:
    """With its type and the names of its labels; `genpool_..._created` is left out."""
    app = make_app()

    @app.after_request
    def break_one(response: Response) -> Response:
        if request.path == "/broken":  # a view's own error is answered, and no exception to the exporter
            raise RuntimeError
        return response

    http = app.test_client()
    for path in ("/v1/models", "/broken"):
        http.get(path)
    shown = families(http.get("/metrics").get_data(as_text=True))
    assert {name: found for name, found in shown.items() if not name.endswith("_created")} == listed()


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

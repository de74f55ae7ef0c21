"""Grafana's dashboard: each panel says what it shows, and each query has data of a system that works."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.images.monitoring import DOCKER, ROOT, Query, panels, prometheus, queries
from tests.system import TINY, System
from tests.waiting import wait_until

#: Families that may stay at 0 on a system that works: what they count is trouble, or KV that is moved.
QUIET = re.compile(
    r"genpool_(dead_letters|jobs_vanished|jobs_failed|jobs_requeued|oldest_queued|jobs_queued|engine_queue_depth"
    r"|engine_preempted|engine_cache_misses|engine_kv_(evictions|offload|restore)|engine_rejected|engine_failed"
    r"|program_rank_(queue_size|leaving|reasoning)|program_queue_wait|waiters|requests_waiting|jobs_running|engine_cancelled)"
)
SHARED = "You have tools: read, write, run. " * 25


def test_every_panel_says_what_it_shows() -> None:
    """A title of its own, a unit, and a sentence."""
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert re.fullmatch(r"[A-Z0-9].{20,}\.", panel["description"]), panel["title"]
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)


def test_every_query_is_of_documented_families() -> None:
    """docs/metrics.md names them; nothing else is asked for."""
    documented = set(re.findall(r"^\| `(genpool_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    for query in queries():
        asked = set(re.findall(r"genpool_\w+", query.expression))
        bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
        assert asked and bare <= documented, query


def test_no_two_panels_lie_on_each_other() -> None:
    """Grafana would move them, and the page would look otherwise than it is written."""
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of secrets that docker/secrets.sh makes, and the API key that it prints."""
    folder = tmp_path_factory.mktemp("secrets")
    made = subprocess.run(
        [DOCKER / "secrets.sh", folder],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
        stdin=subprocess.DEVNULL,
    )
    return folder, made.stdout.rpartition(" ")[2].strip()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, str]) -> Iterator[System]:
    """Two nodes and one worker that run Programs, behind the keys of docker/secrets.sh."""
    folder, key = keys
    with System(
        tmp_path_factory.mktemp("system"),
        apis=2,
        workers=1,
        serves=TINY,
        key=key,
        server_args=("--maxmemory", "512mb"),
        sections={
            "server": {"keys_file": str(folder / "api_keys")},
            "worker": {"renew_seconds": 0.3},
            "programs": {"enabled": True, "metrics_interval_seconds": 0.2},
            f"programs.models.{TINY}": {"token_capacity_per_dp_rank": 20_000},
        },
    ) as system:
        system.start()
        yield system


def work(system: System, turn: int) -> None:
    """One round: a long generation in the background, a plain request, a streamed one, two turns of an agent whose
    place is kept briefly, and a refused request."""
    url = system.api_url(system.apis[turn % 2])
    queued = {"model": TINY, "input": "hi", "background": True, "max_output_tokens": 200, "ignore_eos": True}
    assert system.http.post(f"{url}/v1/responses", json=queued).status_code == 200
    plain: dict[str, Any] = {"model": TINY, "prompt": f"{turn} " * 100, "max_tokens": 6, "temperature": 0}
    assert system.http.post(f"{url}/v1/completions", json=plain).status_code == 200
    with system.http.stream("POST", f"{url}/v1/completions", json=plain | {"stream": True}) as answer:
        assert list(answer.iter_lines())
    context = {"program_id": f"agent-{turn}", "kv_retention_ttl_seconds": 0.1}
    for more in ("", " and " * (turn + 1)):
        asked = plain | {"prompt": SHARED + more, "vllm_xargs": {"agentic_context": context}}
        assert system.http.post(f"{url}/v1/completions", json=asked).status_code == 200
    assert system.http.post(f"{url}/v1/completions", json={"model": TINY}).status_code == 400


def test_every_query_has_live_data(system: System, keys: tuple[Path, str], tmp_path: Path) -> None:
    """Scraped by a real Prometheus with the compose file's configuration and the scraper's own key, from two nodes: no
    query is empty or without a number, and what is no trouble is above 0."""
    nodes = [system.api_url(api).removeprefix("http://") for api in system.apis]
    with prometheus(tmp_path, nodes, keys[0] / "metrics_key") as server:
        missing = queries()
        seen: dict[Query, list[float]] = {}
        turns = itertools.count()

        def all_live() -> bool:
            work(system, next(turns))
            for query in missing:
                seen[query] = [value for value in server.values(query.filled) if math.isfinite(value)]
            missing[:] = [query for query in missing if not is_live(query, seen[query])]
            return not missing

        try:
            wait_until(all_live, description="data of every query", timeout_s=80)
        except AssertionError:
            raise AssertionError([(query.title, query.legend, seen[query]) for query in missing]) from None

        def both_up() -> bool:
            return [target["health"] for target in server.targets()] == ["up", "up"]

        wait_until(both_up, description="both nodes to answer their scrapers", timeout_s=30)
        # They say the same of the state server: nothing is counted twice.
        assert server.values(f'max by (model) (genpool_ranks{{model="{TINY}"}})') == [1]


def is_live(query: Query, values: list[float]) -> bool:
    """Whether these are what a panel of a working system shows."""
    return bool(values) and (max(values) > 0 or bool(QUIET.search(query.expression)))

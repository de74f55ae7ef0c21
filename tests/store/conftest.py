"""Store tests run against a server in cluster mode: scripts that touch an undeclared slot fail there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pool.store.connection import Client, connect
from pool.store.delivery import Delivery
from pool.store.jobs import JobStore
from pool.store.nodes import nodes
from pool.store.scripts import all_scripts
from pool.store.server import StateServer
from tests import builders
from tests.clusters import StateCluster
from tests.program_scene import Scene, settings
from tests.program_site import Site


@pytest.fixture(scope="session")
def state_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateCluster | StateServer]:
    """A one-node cluster that owns every slot; with STATE=cluster in the environment, one of three nodes."""
    folder = tmp_path_factory.mktemp("cluster")
    if os.environ.get("STATE") == "cluster":
        with StateCluster(folder) as cluster:
            yield cluster
    else:
        with StateCluster(folder, primaries=1) as cluster:
            yield cluster.primaries[0].server


@pytest.fixture(scope="session")
def verbs_run() -> Iterator[set[str]]:
    """Names of the verbs that tests ran. With EVERY_VERB in the environment all of them must be there in the end."""
    names: set[str] = set()
    yield names
    if os.environ.get("EVERY_VERB"):
        assert {verb.name for verb in all_scripts()} - names == set(), "verbs that no test ran on this server"


@pytest.fixture(autouse=True)
def note_verbs(request: pytest.FixtureRequest, client: Client, verbs_run: set[str]) -> Iterator[None]:
    """A verb is loaded when it is first run; the emptied server of a test knows none."""
    yield
    if request.path.name != "test_scripts.py":  # there they are loaded without being run
        for node in nodes(client):
            loaded = node.script_exists(*(verb.sha for verb in all_scripts()))
            verbs_run |= {verb.name for verb, known in zip(all_scripts(), loaded, strict=True) if known}


@pytest.fixture
def store(client: Client) -> JobStore:
    """A job store on the emptied server."""
    return builders.job_store(client)


@pytest.fixture
def rank_a(redis_url: str) -> Iterator[Delivery]:
    """A worker's side."""
    yield from _delivery(redis_url, "rank-a")


@pytest.fixture
def rank_b(redis_url: str) -> Iterator[Delivery]:
    """Another worker's side."""
    yield from _delivery(redis_url, "rank-b")


@pytest.fixture
def without_index(redis_url: str, client: Client) -> Iterator[Client]:
    """A client that the server lets read no index: a rebuild is cut short there."""
    client.acl_setuser(
        "cut-short", enabled=True, passwords=["+x"], categories=["+@all"], commands=["-zscan"], keys=["*"]
    )
    limited = connect(redis_url.replace("://", "://cut-short:x@", 1))
    yield limited
    limited.connection_pool.disconnect()
    client.acl_deluser("cut-short")


def _delivery(url: str, rank: str) -> Iterator[Delivery]:
    made = builders.delivery(url, rank)
    yield made
    made.reader.connection_pool.disconnect()
    made.writer.connection_pool.disconnect()


@pytest.fixture
def site(request: pytest.FixtureRequest, client: Client, redis_url: str) -> Iterator[Site]:
    """Rank `a` with a thousand tokens, and one process."""
    fields = {"token_capacity_per_dp_rank": 1000, "stats_window_size": 2} | getattr(request, "param", {})
    made = Site(Scene(client, redis_url, settings(**fields)))
    made.process()
    made.join("a", "first")
    yield made
    for process in made.programs:
        process.stop()
    made.scene.sound()
    made.scene.close()
    client.flushall()

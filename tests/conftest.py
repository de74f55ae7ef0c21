"""Fixtures for all kinds of tests: a real state server for the session, emptied for each test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np  # noqa: F401 - its BLAS must be loaded when it is limited
import pytest
from threadpoolctl import threadpool_limits

from pool.store.connection import Client, connect
from pool.store.server import StateServer

TESTS = Path(__file__).parent
#: Folders whose files take long, by rank.
LONG_FIRST = {"faults": 0, "chaos": 0, "integration": 0, "backends": 0, "engine": 1, "webapp": 1}

#: Keys that live as long as a model does; all others must carry a TTL or be gone when a test ends.
LASTING = (":queue", ":model", ":catalogue", ":models", ":card", ":sweep", ":tally", ":totals", ":flows", ":fairness")


def pytest_configure() -> None:
    """One BLAS thread, as in a worker: BLAS's own threads spin, and where several processes do, none gets on.

    A suite that is started in the background inherits "ignore interrupts", and so would all that its tests start: they
    send interrupts, as a terminal does."""
    threadpool_limits(limits=1, user_api="blas")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, each kind in random order, so that no process has one left when the others are
    done (with --no-loadscope-reorder)."""
    items.sort(key=lambda item: LONG_FIRST.get(item.path.relative_to(TESTS).parts[0], len(LONG_FIRST)))


@pytest.fixture(autouse=True)
def own_configuration() -> Iterator[None]:
    """`genpool --config FILE` tells its children by a variable: called here, the next test must not see it."""
    before = os.environ.get("GENPOOL_CONFIG")
    yield
    if before is None:
        os.environ.pop("GENPOOL_CONFIG", None)
    else:
        os.environ["GENPOOL_CONFIG"] = before


@pytest.fixture(scope="session")
def state_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateServer]:
    """A state server of this test session, with its own folder and socket."""
    with StateServer(tmp_path_factory.mktemp("state")) as server:
        yield server


@pytest.fixture
def redis_url(state_server: StateServer) -> Iterator[str]:
    """The URL of the session's state server, empty when the test begins. The test fails when it leaves behind a key of
    genpool without TTL that is not one of the lasting ones."""
    client = connect(state_server.url, max_connections=1)
    client.flushall()
    client.script_flush()
    yield state_server.url
    leaked = leaking(client)
    client.connection_pool.disconnect()
    assert not leaked, f"keys without TTL outlived the test: {leaked}"


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    """A plain redis-py client of the emptied server."""
    client = connect(redis_url)
    yield client
    client.connection_pool.disconnect()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A private folder of this test."""
    return tmp_path


def leaking(client: Client) -> list[str]:
    """genpool's keys without TTL that should not exist any more; jobs still queued or running are the test's to end."""
    keys = [key.decode() for key in client.scan_iter(match="gp:*", count=1000)]
    return [key for key in keys if not key.endswith(LASTING) and client.ttl(key) == -1]

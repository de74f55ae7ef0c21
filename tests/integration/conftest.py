"""Fixtures of the integration tests: sites, and what runs on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool.store.server import StateServer
from tasks.client import Client
from tests.integration.celery_process import Site, Worker


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A state server of this module, and the processes that its tests start on it."""
    with StateServer(tmp_path_factory.mktemp("state")) as server:
        site = Site(server.url, tmp_path_factory.mktemp("site"))
        yield site
        site.close()


@pytest.fixture(scope="module")
def worker(site: Site) -> Worker:
    """The worker that the module's tests share; it sends task events."""
    return site.worker("-E")


@pytest.fixture
def jobs(site: Site) -> Iterator[Client]:
    """A client of the module's site."""
    client = Client(site.settings)
    yield client
    client.close()


@pytest.fixture
def fresh_site(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site of this test alone, without workers yet."""
    site = Site(redis_url, tmp_path_factory.mktemp("site"))
    yield site
    site.close()


@pytest.fixture
def fresh_jobs(fresh_site: Site) -> Iterator[Client]:
    """A client of the test's own site."""
    client = Client(fresh_site.settings)
    yield client
    client.close()

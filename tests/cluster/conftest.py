"""Fixtures for what is special in a Redis Cluster. The store's own tests run on one too: `make test-cluster`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from pool.store.connection import Client, connect
from pool.store.jobs import JobStore
from tests import builders
from tests.clusters import StateCluster

#: A node that is gone is missed soon, and does not take the others with it.
QUICK = ["--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no"]


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateCluster]:
    """Three nodes, for tests that end none of them."""
    with StateCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: StateCluster) -> StateCluster:
    """The same, empty."""
    for node in shared_cluster.primaries:
        node.client.flushall()
        node.client.script_flush()
    return shared_cluster


@pytest.fixture
def mortal_cluster(tmp_path: Path) -> Iterator[StateCluster]:
    """Three nodes and a replica of the first, for one test."""
    with StateCluster(tmp_path / "cluster", replicas=1, arguments=QUICK) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: StateCluster) -> Iterator[Client]:
    """A client of the cluster."""
    made = connect(cluster.url)
    yield made
    made.connection_pool.disconnect()


@pytest.fixture
def store(client: Client) -> JobStore:
    """A job store on it."""
    return builders.job_store(client)


def model_on(cluster: StateCluster, at: int) -> str:
    """A model whose keys the primary of this number has."""
    names = (f"model-{number}" for number in count())
    return next(name for name in names if cluster.owner(f"{{{name}:0}}") is cluster.primaries[at])

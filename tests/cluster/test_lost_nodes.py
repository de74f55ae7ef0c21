"""A node of the cluster is killed: its replica takes over, or else the models of the other nodes go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TypeVar

import pytest
import redis

from pool.errors import StateUnavailable
from pool.store.audit import Audit
from pool.store.connection import connect
from pool.store.handouts import Write
from pool.store.hints import Subscription
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys, node_channel
from tasks.maintenance import Maintenance
from tests import builders
from tests.builders import completed, new_job
from tests.cluster.conftest import model_on
from tests.clusters import StateCluster
from tests.waiting import wait_until
from webapp.waits import Waits

T = TypeVar("T")

#: For an election: the node's timeout, and what a loaded machine makes of it.
ELECTION_S = 30


def test_a_replica_takes_over(mortal_cluster: StateCluster) -> None:
    """The node with a model dies. Once its replica is elected, everything that had reached it is there: a worker
    completes what it holds, and gets what was queued; verbs are loaded again, subscribers listen elsewhere."""
    cluster = mortal_cluster
    model = model_on(cluster, 0)
    client = connect(cluster.url, timeout_s=1)
    store = builders.job_store(client)
    rank = builders.delivery(cluster.url, model=model)
    running, queued = new_job(model=model), new_job(model=model)
    store.submit(running)
    (handout,) = rank.take(1, 10).handouts
    store.submit(queued)
    # What is acknowledged before this, and only that, survives a failover: docs/guarantees.md.
    assert cluster.primaries[0].client.wait(1, 5000) == 1
    os.kill(cluster.primaries[0].server.pid, signal.SIGKILL)
    wait_until(lambda: _takes_writes(store, model), description="the election", timeout_s=ELECTION_S)
    assert cluster.owner(f"{{{model}:0}}") is cluster.replicas[0]
    end = Write(handout.lease, 0, (), completed("x"))
    (answer,) = _again(lambda: rank.write([end]))
    assert answer.code == "ok"
    (second,) = _again(lambda: rank.take(2, 100).handouts)
    assert second.lease.token == queued.ref.token
    listener = Subscription(client, node_channel("me"))
    store.notify("token", watch="me", rank="")
    assert listener.message(5) == b"token"
    listener.close()
    store.cancel(queued.ref)
    assert [store.read(job.ref).state for job in (running, queued)] == ["completed", "cancelled"]
    assert Audit(client, model).run() == []
    rank.close()
    client.connection_pool.disconnect()


def test_models_of_other_nodes_go_on(mortal_cluster: StateCluster) -> None:
    """A node without a replica is gone for good: its models answer that the state is away; timers, sweeps and waits of
    the others' go on in the same processes, and nobody's job is cancelled for want of a reader."""
    cluster = mortal_cluster
    gone, there = model_on(cluster, 1), model_on(cluster, 2)
    client = connect(cluster.url, timeout_s=1)
    store = builders.job_store(client)
    lost, late, waited = new_job(model=gone), new_job(model=there), new_job(model=there)
    waits = Waits(store, client, grace_ms=60_000)
    for job in (lost, late, waited):
        store.submit(job)
    away, waiter = waits.follow(lost.ref, 0), waits.follow(waited.ref, 0)
    os.kill(cluster.primaries[1].server.pid, signal.SIGKILL)
    with pytest.raises(StateUnavailable):
        store.read(lost.ref)
    maintenance = Maintenance(builders.sweeper(client), [gone, there])
    builders.swept_steadily(client, model=there)
    keys = ModelKeys(f"{there}:0")
    assert client.zadd(keys.timers, {f"queue:{late.ref.token}": 1}, xx=True, ch=True) == 1
    maintenance.turn()
    assert store.read(late.ref).state == "failed"
    store.cancel(waited.ref)
    wait_until(lambda: waiter.ended, description="the end to be heard of", timeout_s=ELECTION_S)
    assert not away.ended
    for each in (away, waiter):
        each.close()
    waits.close()
    client.connection_pool.disconnect()


def _takes_writes(store: JobStore, model: str) -> bool:
    try:
        store.ping([model])
    except StateUnavailable:
        return False
    return True


def _again(call: Callable[[], list[T]]) -> list[T]:
    """What a worker does: the first call finds its connection broken, and so learns that the node is gone."""

    def attempt() -> list[T]:
        try:
            return call()
        except (StateUnavailable, redis.exceptions.RedisError):
            return []

    return wait_until(attempt, description="an answer of the new node")

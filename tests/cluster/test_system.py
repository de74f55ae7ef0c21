"""A whole system on a cluster: slots move while it works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pool.store.server import StateServer
from pool.store.slot_map import slot_of
from tests.clusters import ClusterNode, StateCluster
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

TAG = f"{{{SCRIPTED}:0}}"
STEP_MS = 15
TOKENS = 200


@pytest.fixture
def system(cluster: StateCluster, tmp_path: Path) -> Iterator[System]:
    """Two workers and an API node; Celery's broker is a server of its own."""
    with StateServer(tmp_path / "broker", port=0) as broker:
        celery = {"broker_url": broker.url, "result_backend": broker.url}
        with System(tmp_path / "system", url=cluster.url, sections={"state": celery}, delay_ms=STEP_MS) as system:
            system.start()
            yield system


def test_nobody_notices_that_a_models_slot_moves(cluster: StateCluster, system: System) -> None:
    """The slot of a model goes from node to node, key by key and at once, while generations run, wait and are
    submitted: all end whole, each in its first attempt."""
    home = cluster.owner(TAG)
    jobs = {system.submit(f"repeat {TOKENS} x"): TOKENS for _ in range(6)}
    wait_until(lambda: all(system.tokens(job) > 3 for job in jobs), description="all to run")
    for node in cluster.primaries:
        if node is not home:
            cluster.move(TAG, node)
            jobs |= {system.submit(f"repeat {count} x"): count for count in (1, 5)}
    if _moves_at_once(home):
        _move_at_once(cluster, home)
        jobs |= {system.submit(f"repeat {count} x"): count for count in (1, 5)}
    assert any(not system.record(job).terminal for job in jobs), "they must outlast the moves, or nothing was shown"
    for job, count in jobs.items():
        record = system.ended(job)
        assert (record.outputs[0].text, record.attempt, system.starts(job)) == ("x" * count, 1, 1)
    system.assert_recovered()


def _moves_at_once(node: ClusterNode) -> bool:
    """Valkey 9 and later move whole slots."""
    info = node.client.info("server")
    return int(str(info.get("valkey_version", "0")).partition(".")[0]) >= 9


def _move_at_once(cluster: StateCluster, target: ClusterNode) -> None:
    slot = slot_of(TAG)
    cluster.owner(TAG).cluster("MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.id)
    wait_until(lambda: cluster.owner(TAG) is target, description="the slot to have moved")

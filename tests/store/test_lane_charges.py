"""What is charged and counted of jobs in lanes stays within its bounds where keys were lost, and where caps hold jobs
back."""

from __future__ import annotations

import pytest

from pool.rules.fairness import BATCH, INTERACTIVE, LANES, NORMAL, Lane
from pool.store.audit import Audit
from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.flows import flow_of, key_of
from pool.store.handouts import Handout, Write
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.lane_positions import BAND
from pool.store.rebuilding import heal
from pool.store.records import NewJob
from tests.builders import completed, new_job

KEYS = ModelKeys("tiny:0")


def submitted(store: JobStore, lane: Lane, tenant: str, cap: int = 0) -> NewJob:
    """A job that waits."""
    job = new_job(lane=lane, tenant=tenant, inflight_cap=cap)
    store.submit(job)
    return job


def next_of(rank: Delivery) -> Handout:
    """The one job that a rank with a free slot begins."""
    (handout,) = rank.take(1, 1).handouts
    return handout


def end(client: Client, rank: Delivery, handout: Handout, used_ms: int = 1) -> None:
    """It completes, having taken so long."""
    client.hset(KEYS.job(handout.lease.token), mapping={"begun_ms": 2**50, "used_ms": used_ms})
    assert rank.write([Write(handout.lease, 0, (), completed("x"))])[0].code == "ok"


@pytest.mark.parametrize("lane", LANES)
def test_a_charge_that_was_lost_is_not_taken_back(
    store: JobStore, client: Client, rank_a: Delivery, lane: Lane
) -> None:
    """The lanes are lost while a job runs that needs less than was charged for it: its key stays in its lane, whether
    something of it waits meanwhile or not, and the lane's clock stays small."""
    submitted(store, lane, "a")
    running = next_of(rank_a)
    client.delete(*KEYS.lanes.values())
    waits = submitted(store, lane, "a")
    end(client, rank_a, running)
    place, flow = LANES.index(lane), flow_of(lane, "a", "")
    assert client.zscore(KEYS.lanes["flows"], flow) == place * BAND
    running = next_of(rank_a)
    assert running.lease.token == waits.ref.token
    client.zadd(KEYS.lanes["flows"], {flow: (place + len(LANES)) * BAND})
    end(client, rank_a, running)
    assert client.zscore(KEYS.lanes["flows"], flow) == (place + len(LANES)) * BAND
    clocks = [client.hget(KEYS.lanes["fairness"], f"clock:{each}") for each in range(len(LANES))]
    assert max(float(clock or 0) for clock in clocks) < BAND / 2
    assert Audit(client, "tiny").run() == []


def test_what_was_in_a_lost_stream_counts_once(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """Two jobs of a key with a cap of two were moved when the stream went: in the end the key has nothing in flight."""
    for _ in range(2):
        submitted(store, NORMAL, "a", cap=2)
    assert len(rank_a.read(2, 1)) == 2
    client.delete(KEYS.queue)
    heal(client, KEYS)
    held = [next_of(rank_a), next_of(rank_a)]
    assert client.hget(KEYS.lanes["fairness"], f"busy:{key_of('a', '')}") == b"2"
    for handout in held:
        end(client, rank_a, handout)
    assert not client.hexists(KEYS.lanes["fairness"], f"busy:{key_of('a', '')}")
    assert Audit(client, "tiny").run() == []


def test_nothing_is_saved_up_while_caps_hold_a_lane_back(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """A key of batch is at its cap all the while that others have 50 s: what comes into batch then does not go before
    them for all that time, but for one job."""
    submitted(store, BATCH, "a", cap=1)
    held = next_of(rank_a)
    submitted(store, BATCH, "a", cap=1)
    for _ in range(2):
        submitted(store, INTERACTIVE, "high")
    for _ in range(50):
        submitted(store, INTERACTIVE, "high")
        end(client, rank_a, next_of(rank_a), used_ms=1000)
    low = [submitted(store, BATCH, "b").ref.token for _ in range(4)]
    found = []
    for _ in range(4):
        submitted(store, INTERACTIVE, "high")
        handout = next_of(rank_a)
        found.append(handout.lease.token in low)
        end(client, rank_a, handout, used_ms=1000)
    assert found == [True, False, False, False]
    end(client, rank_a, held)
    while handouts := rank_a.take(1, 1).handouts:
        end(client, rank_a, handouts[0])

"""What others put into a model's keys: dropped with one line where that is possible, and never in the way of others."""

from __future__ import annotations

import logging

import pytest

from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.jobs import JobStore
from pool.store.keys import GROUP, ModelKeys
from tasks.maintenance import Maintenance
from tests.builders import LEASE_MS, as_if_ranks_waited, delivery, new_job, sweeper, swept_steadily

KEYS = ModelKeys("tiny:0")
NAMELESS: list[dict[bytes, bytes]] = [{b"foo": b"secret"}, {b"job": b"\xff secret"}, {b"job": b"secret"}]


@pytest.mark.parametrize("fields", NAMELESS)
def test_a_reader_drops_entries_that_name_no_job(
    store: JobStore, client: Client, rank_a: Delivery, caplog: pytest.LogCaptureFixture, fields: dict[bytes, bytes]
) -> None:
    """One line that shows nothing of them; the job between them is read."""
    job = new_job()
    client.xadd(KEYS.queue, fields)
    store.submit(job)
    client.xadd(KEYS.queue, fields)
    (entry,) = rank_a.read(10, 10)
    assert entry.token == job.ref.token
    assert (client.xlen(KEYS.queue), client.xpending(KEYS.queue, GROUP)["pending"]) == (1, 1)
    assert [record.getMessage() for record in caplog.records] == ["tiny:0: 2 stream entries that name no job, dropped"]
    store.cancel(job.ref)


def test_what_lies_in_a_pending_list_is_dropped_too(store: JobStore, client: Client, redis_url: str) -> None:
    """An earlier connection of the rank has read it."""
    rank = delivery(redis_url, "rank-c")
    job = new_job()
    for _ in range(2):
        client.xadd(KEYS.queue, NAMELESS[0])
    as_if_ranks_waited(client)
    store.submit(job)
    client.xreadgroup(GROUP, "rank-c", {KEYS.queue: ">"}, count=10)
    assert [entry.token for entry in rank.read(10, 10)] == [job.ref.token]
    assert client.xpending(KEYS.queue, GROUP)["pending"] == 1
    store.cancel(job.ref)
    for each in (rank.reader, rank.writer):
        each.connection_pool.disconnect()


def test_the_sweep_drops_what_a_dead_reader_read(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """And does all else that it has to: a timer that is due."""
    assert rank_a.keys == KEYS
    client.xadd(KEYS.queue, NAMELESS[0], id="1-1")
    client.xreadgroup(GROUP, "rank-dead", {KEYS.queue: ">"}, count=1)
    client.xclaim(KEYS.queue, GROUP, "rank-dead", 0, ["1-1"], idle=LEASE_MS + 1, justid=True)
    job = new_job()
    store.submit(job)
    client.zadd(KEYS.timers, {f"queue:{job.ref.token}": 1})
    swept_steadily(client)
    assert sweeper(client).sweep("tiny").expired == 1
    assert (client.xlen(KEYS.queue), client.xpending(KEYS.queue, GROUP)["pending"]) == (0, 0)


def test_a_model_that_cannot_be_swept_holds_up_no_other(
    store: JobStore, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor the chores; it is complained of once until it passes, and then again."""
    broken = ModelKeys("broken:0")
    caplog.set_level(logging.WARNING)
    chores: list[int] = []
    maintenance = Maintenance(sweeper(client), ["broken", "tiny"], chores=[lambda: chores.append(1)])
    for turns, complaints in ((2, 1), (1, 2)):
        client.zadd(broken.timers, {"nonsense": 1})
        for _ in range(turns):
            job = new_job()
            store.submit(job)
            client.zadd(KEYS.timers, {f"queue:{job.ref.token}": 1})
            swept_steadily(client)
            maintenance.turn()
            assert store.read(job.ref).error_code == "queue_timeout"
        assert sum("broken: unexpected" in record.getMessage() for record in caplog.records) == complaints
        client.delete(broken.timers)
        maintenance.turn()
    assert len(chores) == 5
    assert "nonsense" not in caplog.text

"""The rank registry and the model card."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from pool.store.connection import Client
from pool.store.keys import GROUP, ModelKeys
from pool.store.ranks import Card, RankRegistry
from tests.waiting import wait_until


@pytest.fixture
def registry(client: Client) -> RankRegistry:
    """The registry of a model."""
    return RankRegistry(client, "tiny")


def test_a_rank_lives_as_long_as_it_beats(registry: RankRegistry) -> None:
    """It is listed with its facts, and gone when its lease has passed."""
    assert registry.beat("node-1", "life-1", lease_ms=300, facts={"state": "loaded"})
    (rank,) = registry.live()
    assert (rank.id, rank.incarnation, rank.pid, rank.facts) == ("node-1", "life-1", os.getpid(), {"state": "loaded"})
    wait_until(lambda: registry.live() == [], description="the lease to pass")
    assert registry.beat("node-2", "life-2", lease_ms=300, facts={})
    wait_until(lambda: registry.live() == [], description="the lease to pass")


def test_two_lives_cannot_share_an_id(registry: RankRegistry) -> None:
    """The second process is told to choose another id, until the first has left."""
    assert registry.beat("node-1", "life-1", lease_ms=60_000, facts={})
    assert not registry.beat("node-1", "life-2", lease_ms=60_000, facts={})
    assert registry.beat("node-1", "life-1", lease_ms=60_000, facts={})
    registry.retire("node-1", "life-2")
    assert len(registry.live()) == 1
    registry.retire("node-1", "life-1")
    assert registry.beat("node-1", "life-2", lease_ms=60_000, facts={})
    registry.retire("node-1", "life-2")
    assert registry.live() == []


def test_a_dead_process_on_this_machine_yields_its_id_at_once(registry: RankRegistry, client: Client) -> None:
    """A restarted worker need not wait for its crashed predecessor's lease; a living or remote one is respected."""
    registry.beat("node-1", "life-1", lease_ms=60_000, facts={})
    record = ModelKeys("tiny:0").rank("node-1")
    client.hset(record, mapping={"pid": 1, "host": "elsewhere"})
    assert not registry.beat("node-1", "life-2", lease_ms=60_000, facts={})
    client.hset(record, mapping={"pid": 2**22 + 1, "host": socket.gethostname()})
    assert registry.beat("node-1", "life-2", lease_ms=60_000, facts={})
    registry.retire("node-1", "life-2")


def test_retiring_removes_the_consumer_unless_entries_are_pending(registry: RankRegistry, client: Client) -> None:
    """Deleting a consumer with pending entries would lose them."""
    queue = ModelKeys("tiny:0").queue
    client.xgroup_create(queue, GROUP, id="0", mkstream=True)
    client.xadd(queue, {"job": "a"})
    client.xreadgroup(GROUP, "node-1", {queue: ">"}, count=1)
    client.xgroup_createconsumer(queue, GROUP, "node-2")
    for rank in ("node-1", "node-2"):
        registry.beat(rank, "life", lease_ms=60_000, facts={})
        registry.retire(rank, "life")
    assert [consumer["name"] for consumer in client.xinfo_consumers(queue, GROUP)] == [b"node-1"]


def test_a_card_comes_back_as_published(registry: RankRegistry) -> None:
    """API nodes read the card; before any worker there is none."""
    assert registry.card() is None
    assert registry.card_fingerprint() is None
    card = Card(context_length=64, max_positions=32, fingerprint="abc", vocabulary=b"\x00\xff")
    registry.publish(card)
    assert registry.card() == card
    assert registry.card_fingerprint() == "abc"
    unable = replace(card, logprobs=False, seed=False)
    registry.publish(unable)
    assert registry.card() == unable


def test_a_card_of_the_first_release_promises_no_logprobs(registry: RankRegistry, client: Client) -> None:
    """Its worker knows none; seeds it has always kept."""
    registry.publish(Card(context_length=64, max_positions=32, fingerprint="abc", vocabulary=b"\x00\xff"))
    client.hdel(ModelKeys("tiny:0").card, "logprobs", "seed")
    card = registry.card()
    assert card is not None
    assert (card.logprobs, card.seed) == (False, True)

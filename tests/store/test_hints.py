"""Hints that carry entries: who is sent what when tokens are appended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Handout, Write
from pool.store.hints import MOST_BYTES, Pushed, Subscription, hint_of
from pool.store.jobs import JobStore
from pool.store.keys import END_ONLY, node_channel
from pool.store.log import LogEntry
from tests.builders import completed, new_job

QUIET_S = 0.2


@pytest.fixture
def follower(client: Client) -> Iterator[Subscription]:
    """The channel of node-1."""
    subscription = Subscription(client, node_channel("node-1"))
    yield subscription
    subscription.close()


def begun(store: JobStore, rank: Delivery, watch: str) -> Handout:
    """A running job that these nodes watch."""
    store.submit(new_job(watch=watch, n=2))
    (handout,) = rank.take(1, 10).handouts
    return handout


def heard(subscription: Subscription) -> list[Pushed | list[str]]:
    """All that is said until it is quiet."""
    hints: list[Pushed | list[str]] = []
    while (message := subscription.message(QUIET_S)) is not None:
        hints.append(hint_of(message))
    return hints


def test_a_follower_is_sent_what_is_appended_once(store: JobStore, rank_a: Delivery, follower: Subscription) -> None:
    """Entries of any choice, with their place in the log; a repeated append says nothing."""
    handout = begun(store, rank_a, "node-1")
    one, two = LogEntry(0, 1, (1, 2), "é\n"), LogEntry(2, 0, (3,), "")
    three = LogEntry(3, 0, (4,), "x y")
    for entries in ((one, two), (three,), (three,)):
        rank_a.write([Write(handout.lease, entries[0].seq, entries)])
    token = handout.lease.token
    assert heard(follower) == [Pushed(token, 0, (one, two)), Pushed(token, 2, (three,))]
    rank_a.write([Write(handout.lease, 4, (), completed("x", "y"))])


def test_who_waits_for_the_end_alone_is_sent_nothing(store: JobStore, rank_a: Delivery, follower: Subscription) -> None:
    """Nor does anybody who watches another job."""
    waits, other = begun(store, rank_a, f"node-1{END_ONLY} node-2"), begun(store, rank_a, "")
    for handout in (waits, other):
        rank_a.write([Write(handout.lease, 0, (LogEntry(0, 0, (1,), "x"),))])
    assert heard(follower) == []
    for handout in (waits, other):
        rank_a.write([Write(handout.lease, 1, (), completed("x", "y"))])


def test_what_is_large_is_only_named(store: JobStore, rank_a: Delivery, follower: Subscription) -> None:
    """The bound is on the entries' bytes."""
    handout = begun(store, rank_a, "node-1")
    packed = 8 + 4  # head and one token id
    fits = LogEntry(0, 0, (1,), "x" * (MOST_BYTES - packed))
    large = LogEntry(1, 0, (1,), "x" * (MOST_BYTES - packed + 1))
    for entry in (fits, large):
        rank_a.write([Write(handout.lease, entry.seq, (entry,))])
    assert heard(follower) == [Pushed(handout.lease.token, 0, (fits,)), [handout.lease.token]]
    rank_a.write([Write(handout.lease, 2, (), completed("x", "y"))])


def test_what_cannot_be_decoded_is_only_named() -> None:
    """An entry of another version: whoever reads the job says so, and others' hints go on."""
    assert hint_of(b"t 0 12\n" + b"\x09" * 12) == ["t"]
    assert hint_of(b"t 0 12\n" + b"\x01") == ["t"]
    assert hint_of(b"a b") == ["a", "b"]
    assert hint_of(b"") == []

"""replica_max: how many replicas of a model may hold a copy of it at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pool.store.connection import Client, connect
from pool.store.ranks import RankRegistry
from tests.waiting import wait_until

LEASE_MS = 60_000


def beat(client: Client, rank: str, state: str, *, most: int = 2, lease_ms: int = LEASE_MS) -> bool:
    """A rank tells that it is in this state; whether it has a place, or there is one for it."""
    facts = {"state": state, "replica_max": most}
    wish = RankRegistry(client, "tiny").beat(rank, f"life-of-{rank}", lease_ms=lease_ms, facts=facts)
    assert wish is not None
    return wish.has_place


def test_one_too_many_waits_for_a_place(client: Client) -> None:
    """From when it begins to load until it has freed what it had; who waits is told once there is one."""
    assert beat(client, "a", "loading") and beat(client, "b", "loading")
    assert not beat(client, "c", "loading")
    assert beat(client, "a", "loaded") and beat(client, "b", "draining")
    assert not beat(client, "c", "waiting")
    beat(client, "b", "unloaded")
    assert beat(client, "c", "waiting")
    assert beat(client, "c", "loading")
    assert not beat(client, "b", "loading")


def test_places_of_the_dead_and_of_those_that_left_are_free(client: Client) -> None:
    """A lease ends; who retires frees its place at once."""
    assert beat(client, "a", "loaded", lease_ms=300) and beat(client, "b", "loaded")
    RankRegistry(client, "tiny").retire("b", "life-of-b")
    assert beat(client, "c", "loading")
    wait_until(lambda: beat(client, "d", "loading"), description="the lease of the dead to end")


def test_what_is_loaded_keeps_its_copy(client: Client) -> None:
    """A lower bound, or a state server that came back empty, takes nobody's place; nobody else comes."""
    assert all(beat(client, rank, "loaded") for rank in "abc")
    assert not beat(client, "d", "loading", most=3)
    assert beat(client, "d", "loading", most=0)


@pytest.mark.usefixtures("client")
def test_many_that_join_at_once_never_exceed_it(redis_url: str) -> None:
    """The place is taken in the script that registers."""
    ready = threading.Barrier(8)

    def join(number: int) -> bool:
        own = connect(redis_url, max_connections=1)
        ready.wait()
        try:
            return beat(own, f"rank-{number}", "loading", most=3)
        finally:
            own.connection_pool.disconnect()

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(join, range(8))) == 3


@pytest.mark.parametrize("state", ["waiting", "failed", "unloaded"])
def test_who_has_no_copy_takes_no_place(client: Client, state: str) -> None:
    """However many of those there are."""
    for rank in "abc":
        beat(client, rank, state)
    assert beat(client, "d", "loading") and beat(client, "e", "loading")

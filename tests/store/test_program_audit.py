"""`genpool check` of Programs: each broken invariant is named, with what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pool.store.audit import Audit
from pool.store.connection import Client
from tests.program_scene import TENANT, Scene, pid

Damage = Callable[[Scene], object]


@pytest.fixture
def scene(client: Client, redis_url: str) -> Iterator[Scene]:
    """Programs in each of their places: one with two jobs on rank `a`, one that holds its place, one that waits, one
    that is idle."""
    made = Scene(client, redis_url)
    made.join("a", "first")
    for name, ttl_ms in (("holds", 60_000), ("idle", 0)):
        made.arrive(name)
        made.plan()
        made.end(*made.take(), ttl_ms=ttl_ms)
    made.arrive("runs")
    made.plan()
    made.arrive("runs")
    made.take(room=1)
    made.arrive("waits")
    yield made
    made.close()
    client.flushall()


def place(scene: Scene, name: str) -> str:
    """One of rank a's keys."""
    return scene.keys.place("a")[name]


def record(scene: Scene, name: str, **fields: object) -> None:
    """Change fields of a Program's record."""
    scene.client.hset(scene.keys.record(pid(name)), mapping={key: str(value) for key, value in fields.items()})


def lose_front(scene: Scene) -> None:
    """The waiting Program's job is another's."""
    ticket = scene.client.lindex(scene.keys.pool(pid("waits")), 0).decode()
    scene.client.hset(scene.keys.job(ticket.partition(":")[0]), "program", pid("idle"))


BREAKS: dict[str, tuple[str, str, Damage]] = {
    "ledger": ("I4", "a", lambda s: s.client.hincrby(place(s, "book"), "tokens", 1)),
    "leaving": ("I4", "a", lambda s: s.client.hset(place(s, "leaving"), pid("idle"), 1)),
    "count": ("I4", "a", lambda s: s.client.hincrby(place(s, "book"), "active", -1)),
    "reasoning": ("I4", "a", lambda s: s.client.hincrby(place(s, "book"), "reasoning", 1)),
    "not among the active": ("I5", pid("holds"), lambda s: s.client.zrem(place(s, "active"), pid("holds"))),
    "owner": ("I4", "owner 0", lambda s: s.client.hincrby(s.keys.owners, TENANT, 1)),
    "active twice": ("I5", pid("idle"), lambda s: s.client.zadd(place(s, "active"), {pid("idle"): 1})),
    "not waiting": ("I5", "a", lambda s: s.client.zrem(place(s, "waiting"), pid("waits"))),
    "other deadline": ("I5", "a", lambda s: s.client.zincrby(place(s, "waiting"), 1, pid("waits"))),
    "shown otherwise": (
        "I5",
        "a",
        lambda s: s.client.hset(place(s, "waiters"), pid("waits"), f"{'a' * 32}{':0' * 12}:"),
    ),
    "shown as garbage": ("I5", "a", lambda s: s.client.hset(place(s, "waiters"), pid("waits"), "x")),
    "not shown": ("I5", "a", lambda s: s.client.delete(place(s, "waiters"))),
    "no order": ("I5", "a", lambda s: s.client.delete(place(s, "order"))),
    "lost job": ("I5", pid("runs"), lambda s: s.client.xtrim(place(s, "stream"), maxlen=0)),
    "no timer": ("I5", pid("idle"), lambda s: s.client.zrem(s.keys.program_timers, f"retention:{pid('idle')}")),
    "a timer too many": (
        "I5",
        pid("waits"),
        lambda s: s.client.zadd(s.keys.program_timers, {f"ttl:{pid('waits')}": 1}),
    ),
    "waits without a job": ("I5", pid("waits"), lambda s: s.client.delete(s.keys.pool(pid("waits")))),
    "waits though active": ("I5", pid("holds"), lambda s: s.client.rpush(s.keys.pool(pid("holds")), "x:1:0:")),
    "tokens though paused": ("I5", pid("idle"), lambda s: record(s, "idle", private=5)),
    "wrong status": ("I5", pid("idle"), lambda s: record(s, "idle", status="reasoning")),
    "another's job": ("I5", pid("waits"), lose_front),
    "pool of nobody": ("I7", pid("none"), lambda s: s.client.rpush(s.keys.pool(pid("none")), "x:1:0:")),
    "timer of nobody": ("I7", pid("none"), lambda s: s.client.zadd(s.keys.program_timers, {f"ttl:{pid('none')}": 1})),
}


def test_a_sound_system_has_no_violation(scene: Scene) -> None:
    """With Programs in all of their places."""
    assert scene.sound()


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_invariant_is_named(scene: Scene, name: str) -> None:
    """With the Program or rank it is about."""
    invariant, subject, damage = BREAKS[name]
    damage(scene)
    found = {(violation.invariant, violation.subject) for violation in Audit(scene.client, "tiny").run()}
    assert (invariant, subject) in found


def test_a_job_in_no_pool_is_named(scene: Scene) -> None:
    """No worker would ever get it."""
    ticket = scene.client.lpop(scene.keys.pool(pid("waits"))).decode()
    found = {(violation.invariant, violation.subject) for violation in Audit(scene.client, "tiny").run()}
    assert ("I1", ticket.partition(":")[0]) in found

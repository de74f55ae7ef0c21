"""`genpool check`: a sound system has no violation, and each broken invariant is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pool.store.audit import Audit
from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Write
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.log import pack
from tests.builders import completed, entry, new_job

KEYS = ModelKeys("tiny:0")
NAMELESS = "99999999999999-1"


@pytest.fixture
def scene(store: JobStore, rank_a: Delivery) -> dict[str, str]:
    """Tokens of a queued job of two choices, a running one with a log, a completed one and a cancelled one."""
    refs = {name: new_job(n=2 if name == "queued" else 1) for name in ("completed", "cancelled", "running", "queued")}
    for name in ("completed", "running"):
        store.submit(refs[name])
        (handout,) = rank_a.take(1, 10).handouts
        rank_a.write([Write(handout.lease, 0, (entry(0, 5, 6, text="ab"),))])
        if name == "completed":
            rank_a.write([Write(handout.lease, 2, (), completed("ab"))])
    for name in ("cancelled", "queued"):
        store.submit(refs[name])
    store.cancel(refs["cancelled"].ref)
    return {name: job.ref.token for name, job in refs.items()}


def wipe(client: Client) -> None:
    """Nothing is left of a broken system."""
    client.flushall()


def test_a_sound_system_has_no_violation(scene: dict[str, str], client: Client) -> None:
    """In every state of a job."""
    assert len(scene) == 4
    assert Audit(client, "tiny").run() == []
    wipe(client)


BREAKS: dict[str, tuple[str, str, Callable[[Client, dict[str, str]], object]]] = {
    "lost entry": ("I1", "running", lambda c, _: c.xtrim(KEYS.queue, maxlen=0)),
    "lost turn": ("I1", "queued", lambda c, _: c.delete(KEYS.lanes["backlog"])),
    "turn of nobody": ("I7", "ab", lambda c, _: c.zadd(KEYS.lanes["backlog"], {"1:0a:1:ab:1:1:0": 0})),
    "turn of one that had it": (
        "I1", "running",
        lambda c, t: c.zadd(KEYS.lanes["backlog"], {c.hget(KEYS.job(t["running"]), "turn"): 0}),
    ),
    "lost index": ("I1", "queued", lambda c, t: c.zrem(KEYS.index, t["queued"])),
    "unended record in no set": (
        "I1",
        "queued",
        lambda c, t: [c.zrem(KEYS.index, t["queued"], t["queued"] + "#1"), c.delete(KEYS.lanes["backlog"]),
                      c.delete(KEYS.timers)],
    ),
    "ended twice": ("I1", "completed", lambda c, t: c.zadd(KEYS.index, {t["completed"]: 1})),
    "gap in the log": ("I3", "running", lambda c, t: c.rpush(KEYS.log(t["running"]), pack(entry(5, 1)))),
    "token told twice": ("I3", "running", lambda c, t: c.rpush(KEYS.log(t["running"]), pack(entry(1, 6)))),
    "other text": ("I3", "completed", lambda c, t: c.lset(KEYS.log(t["completed"]), 0, pack(entry(0, 5, 6)))),
    "no lease": ("I6", "running", lambda c, t: c.zrem(KEYS.leases, t["running"])),
    "lease of a queued job": ("I6", "queued", lambda c, t: c.zadd(KEYS.leases, {t["queued"]: 1})),
    "record without TTL": ("I7", "completed", lambda c, t: c.persist(KEYS.job(t["completed"]))),
    "log without TTL": ("I7", "completed", lambda c, t: c.persist(KEYS.log(t["completed"]))),
    "entry of nobody": ("I7", NAMELESS, lambda c, _: c.xadd(KEYS.queue, {"foo": "bar"}, id=NAMELESS)),
    "timer of nobody": ("I7", "nobody", lambda c, _: c.zadd(KEYS.timers, {"run:nobody": 1})),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_invariant_is_named(scene: dict[str, str], client: Client, name: str) -> None:
    """With the job it is about."""
    invariant, victim, damage = BREAKS[name]
    damage(client, scene)
    found = {(violation.invariant, violation.subject) for violation in Audit(client, "tiny").run()}
    assert (invariant, scene.get(victim, victim)) in found
    wipe(client)

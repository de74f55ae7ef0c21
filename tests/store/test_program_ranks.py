"""What becomes of Programs whose rank is lost, comes back, or is full while another has room."""

from __future__ import annotations

import logging

import pytest

from pool.rules.programs.windows import RequestSample
from tests.builders import LEASE_MS
from tests.program_scene import pid
from tests.program_site import HELD, MODEL, Site, tokens_of, with_settings
from tests.waiting import wait_until


def test_another_rank_takes_over(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the lost one had: running requests, those that were sent and not begun, idle Programs, waiting ones."""
    scene = site.scene
    scene.arrive("idle", tokens=50)
    refs = [scene.arrive("busy", tokens=300)]
    site.woken()
    idle, _ = scene.take()
    scene.end(idle, context_tokens=60, **HELD)
    refs += [scene.arrive("busy", tokens=300), scene.arrive("waits", tokens=600)]
    site.woken()
    site.join("b", "second")
    site.tick()
    assert scene.upkeep.up(["a", "b"]) == {"a": "first", "b": "second"}
    site.die("a")
    with caplog.at_level(logging.INFO, "genpool.programs"):
        site.tick(site.process())
    assert [scene.field(name, "rank") for name in ("busy", "waits")] == ["b", "b"]
    assert (scene.field("idle", "state"), scene.book()["active"]) == ("paused", "0")
    told = [record.getMessage() for record in caplog.records]
    assert any("program_rank_lost" in line and "rank=a" in line for line in told)
    assert sum("reason=health_failover" in line for line in told) == 2
    site.woken()
    first = scene.take("b")
    assert tokens_of(first) <= {ref.token for ref in refs}
    while first:
        scene.end(first.pop(0), "b")
        site.observe("b", 0, gone=tuple(scene.upkeep.leaving("b")))
        site.woken()
        first += scene.take("b")
    assert {scene.state(ref) for ref in refs} == {"completed"}


def test_any_process_goes_on_where_another_died(site: Site) -> None:
    """After the loss was written, or a part of what was there moved."""
    scene = site.scene
    refs = [scene.arrive(name, tokens=50) for name in ("one", "two", "three")]
    site.woken()
    scene.take(room=1)
    site.die("a")
    assert scene.upkeep.lose("a", "first")
    (entry, *_) = scene.client.xrevrange(scene.keys.place("a")["stream"], count=1)
    # One of three is moved, and then its process dies, too.
    assert scene.upkeep._take_back(scene.keys.place("a")["stream"], entry[0], refs[2].token, pid("three"))
    scene.sound()
    site.join("b", "second")
    site.tick(site.process())
    site.woken()
    assert tokens_of(scene.take("b")) == {ref.token for ref in refs}


def test_a_new_process_of_a_rank_goes_on(site: Site) -> None:
    """What the former one had is moved by whoever comes by, once."""
    scene = site.scene
    ref = scene.arrive("lead")
    site.woken()
    scene.take()
    scene.client.delete(scene.keys.rank("a"))
    site.join("a", "second")
    site.tick()
    assert tokens_of(scene.take()) == {ref.token}
    assert scene.book()["drained"] == "second"


def test_without_a_rank_programs_wait_for_one(site: Site) -> None:
    """Those of a rank that is lost, and those that never had one; nothing of the ranks that are gone stays."""
    scene = site.scene
    refs = [scene.arrive("lead", home="")]
    site.die("a")
    site.tick()
    refs.append(scene.arrive("other", home="a"))
    assert site.programs[0].turn([], [MODEL]) == set()
    scene.client.zadd(scene.keys.members, {"a": 1})
    site.tick()
    assert (scene.upkeep.members(), scene.field("other", "rank")) == ({}, "a")
    site.join("b", "second")
    site.tick()
    assert tokens_of(scene.take("b")) == {ref.token for ref in refs}
    site.tick()
    left = [key for rank in ("a", "") for key in scene.keys.place(rank).values() if key.endswith(f":{rank}")]
    assert [key for key in left if scene.client.exists(key)] == []


def test_entries_whose_reply_was_lost_are_sent_again(site: Site) -> None:
    """The process read them, and nobody ever got them."""
    scene = site.scene
    ref = scene.arrive("lead")
    site.woken()
    worker = scene.workers["a"]
    stream = worker.keys.queue
    assert worker.reader.xreadgroup("workers", "a", {stream: ">"}, count=1)
    site.tick()
    assert scene.client.xpending(stream, "workers")["pending"] == 1
    (entry,) = scene.client.xpending_range(stream, "workers", "-", "+", 1)
    scene.client.xclaim(stream, "workers", "a", 0, [entry["message_id"]], idle=LEASE_MS + 1, justid=True)
    site.tick()
    assert tokens_of(scene.take()) == {ref.token}


@with_settings(global_queue=True)
def test_a_program_goes_to_a_rank_with_room(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """One that was active before, whose last rank is full, and in whose engine requests wait."""
    scene = site.scene
    site.join("b", "second")
    for _ in range(2):
        scene.arrive("lead", tokens=100)
        site.woken()
        scene.end(*scene.take(), sample=RequestSample(100, 10, None, None, 1.0, None, 0.5, 1, 1000))
    scene.arrive("big", tokens=850)
    site.observe("a", 0, gone=tuple(scene.upkeep.leaving("a")))
    site.woken()
    assert len(scene.take()) == 1
    ref = scene.arrive("lead", tokens=100)
    site.woken()
    assert scene.take() == []
    site.seconds_pass("lead", "queued_ms", seconds=2)

    def relocated() -> bool:
        # It is fresh for three seconds.
        site.observe("a", 950, waiting=1, running=1)
        site.tick()
        return scene.field("lead", "rank") == "b"

    with caplog.at_level(logging.INFO, "genpool.programs"):
        wait_until(relocated, description="the Program to be relocated")
    assert tokens_of(scene.take("b")) == {ref.token}
    assert any(f"program={pid('lead')} rank=b" in record.getMessage() for record in caplog.records)


def test_a_rank_that_is_away_is_not_planned_for_again_and_again(site: Site) -> None:
    """It stays dirty, as something waits there; but nobody looks at it again before the next tick."""
    scene = site.scene
    site.die("a")
    site.tick()
    scene.arrive("lead")
    for _ in range(2):
        assert site.programs[0].turn([], [MODEL]) == set()
    site.tick()
    assert scene.store.dirty() == ["a"]

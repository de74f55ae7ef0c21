"""Ranks that come and go under Programs, and many processes that look after them; their workers are played."""

from __future__ import annotations

import logging
import threading

import pytest

from pool.rules.programs.binding import home, ring_of
from pool.rules.programs.windows import RequestSample
from pool.store.ids import JobRef
from tests.builders import LEASE_MS
from tests.program_scene import pid
from tests.program_site import HELD, MODEL, Site, tokens_of, with_settings
from tests.waiting import wait_until

# -- ranks --------------------------------------------------------------------------------------------------------


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


def test_a_session_stays_together_when_its_rank_is_lost(site: Site) -> None:
    """Its Programs are bound anew by what they were first bound by, not by their names."""
    scene = site.scene
    for number in range(6):
        scene.arrive(f"session:{number}", key="session")
    site.die("a")
    for rank in ("b", "c", "d"):
        site.join(rank, f"first-{rank}")
    site.tick()
    expected = home(ring_of(["a", "b", "c", "d"], 160), "session", {"b", "c", "d"})
    assert {scene.field(f"session:{number}", "rank") for number in range(6)} == {expected}


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
    assert scene.client.xpending(stream, "workers")["pending"] == 0
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


# -- many processes -----------------------------------------------------------------------------------------------


def test_planners_of_many_processes_do_no_harm(site: Site) -> None:
    """Three of them at once, over two ranks, in threads of their own: all requests are served, in the order of each
    Program, and the books are right."""
    scene = site.scene
    site.join("b", "second")
    for _ in range(2):
        site.process()
    refs: dict[str, list[JobRef]] = {f"agent-{number}": [] for number in range(12)}
    served: list[str] = []
    done = threading.Event()

    def serve() -> None:
        """Both ranks' workers."""
        while not done.is_set():
            for rank in ("a", "b"):
                for handout in scene.take(rank):
                    scene.end(handout, rank, ttl_ms=1000)
                    served.append(handout.lease.token)
                    placement = handout.lease.placement
                    assert placement is not None
                    site.programs[1].completed(MODEL, rank, placement.program)
                site.observe(rank, 0, gone=tuple(scene.upkeep.leaving(rank)))

    for process in site.programs:
        process.start()
    worker = threading.Thread(target=serve)
    worker.start()
    for number in range(5):
        for at, (name, sent) in enumerate(refs.items()):
            sent.append(scene.arrive(name, home="ab"[at % 2], tokens=150))
            site.programs[number % 3].wake(MODEL)
    wait_until(lambda: len(served) == 60, description="all to be served")
    done.set()
    worker.join()
    for process in site.programs:
        process.stop()
    assert len(set(served)) == 60
    for sent in refs.values():
        order = [served.index(ref.token) for ref in sent]
        assert order == sorted(order)


def test_only_one_of_them_looks_after_all_in_an_interval(site: Site) -> None:
    """What changed, any of them plans for; one that another plans for just now is looked at again soon."""
    scene, other = site.scene, site.process()
    ref = scene.arrive("lead")
    site.tick()
    assert tokens_of(scene.take()) == {ref.token}
    site.die("a")
    assert other.turn([MODEL]) == set()
    assert scene.upkeep.up(["a"]) == {"a": "first"}
    scene.arrive("other")
    assert scene.store.claim("a", "somebody else")
    assert other.turn([], [MODEL]) == {MODEL}
    scene.store.unclaim("a")
    assert other.turn([], [MODEL]) == set()
    assert scene.store.dirty() == []
    assert len(scene.take()) == 1

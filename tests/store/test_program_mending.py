"""Keys of Programs that are deleted from outside: planning goes on for all others, and books and lists become right."""

from __future__ import annotations

import logging

import pytest

from pool.store.audit import Audit
from tests.program_lines import told
from tests.program_scene import Scene, pid
from tests.program_site import HELD, Site, tokens_of, with_settings

ONE_PLACE = with_settings(max_active_programs_per_target=1)


#: What a record that is gone leaves wrong: how many Programs its owner has, its job's pool, and its timers.
LOST = {"I4", "I5", "I7"}


def left_over(scene: Scene) -> set[str]:
    """Which invariants are broken, of none that is about a rank; then nothing is left for others to find."""
    found = Audit(scene.client, "tiny").run()
    assert "a" not in {violation.subject for violation in found}
    scene.client.flushall()
    return {violation.invariant for violation in found}


def arrived_first(site: Site, name: str) -> None:
    """A request of a Program comes, by a second before all others: of the same millisecond, ids would decide."""
    site.scene.arrive(name)
    site.seconds_pass(name, "queued_ms", seconds=1)


@ONE_PLACE
def test_a_lost_pool_holds_up_nobody_else(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Its Program waits for nothing any more; its jobs end by their time limits."""
    scene = site.scene
    arrived_first(site, "lead")
    other = scene.arrive("other")
    scene.client.delete(scene.keys.pool(pid("lead")))
    with caplog.at_level(logging.WARNING, "genpool.programs"):
        site.tick()
        site.tick()
    assert told(caplog, "program_planning_failed") == []
    assert tokens_of(scene.take()) == {other.token}
    assert scene.field("lead", "status") == "acting"
    assert left_over(scene) == {"I1"}, "its job is in no pool"


@ONE_PLACE
def test_a_lost_record_of_one_that_waits_holds_up_nobody_else(site: Site) -> None:
    """It is listed nowhere any more."""
    scene = site.scene
    arrived_first(site, "lead")
    other = scene.arrive("other")
    scene.client.delete(scene.keys.record(pid("lead")))
    site.tick()
    site.tick()
    assert tokens_of(scene.take()) == {other.token}
    place = scene.keys.place("a")
    assert [scene.client.exists(place[name]) for name in ("waiting", "order", "waiters")] == [0, 0, 0]
    assert left_over(scene) <= LOST


@ONE_PLACE
def test_a_lost_record_of_an_active_one_leaves_its_place(site: Site) -> None:
    """With its tokens."""
    scene = site.scene
    scene.arrive("lead")
    site.tick()
    (handout,) = scene.take()
    scene.client.delete(scene.keys.record(pid("lead")))
    scene.end(handout)
    other = scene.arrive("other")
    site.tick()
    site.tick()
    assert tokens_of(scene.take()) == {other.token}
    assert [scene.book()[name] for name in ("active", "reasoning", "tokens")] == ["1", "1", "200"]
    assert left_over(scene) <= LOST


def test_a_lost_list_of_what_waits_is_made_again(site: Site) -> None:
    """Those that wait are found by the other lists."""
    scene = site.scene
    ref = scene.arrive("lead")
    scene.client.delete(scene.keys.place("a")["waiters"])
    site.tick()
    assert tokens_of(scene.take()) == {ref.token}
    assert scene.sound()


def test_a_lost_book_becomes_right(site: Site) -> None:
    """Its process takes the rank again; nothing below zero is left of Programs that were there."""
    scene = site.scene
    for name in ("held", "running"):
        scene.arrive(name)
    site.tick()
    first, second = scene.take()
    scene.end(first, **HELD)
    scene.client.delete(scene.keys.place("a")["book"])
    site.join("a", "first")
    for _ in range(3):
        site.tick()
    (handout,) = [each for each in scene.take() if each.lease.token == second.lease.token] or [second]
    scene.end(handout)
    site.tick()
    site.tick()
    assert scene.sound()

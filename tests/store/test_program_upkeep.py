"""What befalls Programs by time, by the loss of ranks and by their owners' word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool.rules.programs.windows import RequestSample
from pool.store.connection import Client
from pool.store.program_upkeep import Look
from pool.store.programs import Operation
from tests.builders import LEASE_MS, swept_steadily
from tests.program_scene import TENANT, Scene, pid, settings


@pytest.fixture
def scene(client: Client, redis_url: str) -> Iterator[Scene]:
    """Two ranks, `a` and `b`."""
    made = Scene(client, redis_url, settings(stats_window_size=2))
    made.join("a", "first")
    made.join("b", "other")
    yield made
    made.sound()
    made.close()
    client.flushall()


def idle(scene: Scene, name: str = "lead", **fields: int) -> None:
    """A Program that has completed a request."""
    scene.arrive(name)
    scene.plan()
    scene.end(*scene.take(), **{"ttl_ms": 60_000} | fields)


# -- timers -------------------------------------------------------------------------------------------------------


def test_a_hold_ends_by_its_timer(scene: Scene) -> None:
    """Its KV is leaving until the engine reports it gone; the pause is a sample of segments."""
    idle(scene)
    assert scene.upkeep.expire() == []
    scene.due("ttl", "lead")
    assert scene.upkeep.expire() == [(pid("lead"), "a", "paused")]
    assert (scene.upkeep.leaving("a"), scene.book()["tokens"]) == ({pid("lead"): 210}, "0")
    assert [sample.segment_rounds for sample in scene.store.snapshot("a").windows.pauses] == [1]
    assert scene.upkeep.expire() == []


def test_what_is_held_by_a_hint_alone_is_told(scene: Scene) -> None:
    """From when on; not where the statistics hold it as long."""
    idle(scene, automatic_ms=1000)
    seen = scene.seen("lead")
    assert seen is not None
    assert seen.held_by_hint_ms == int(scene.field("lead", "finish_ms")) + 1000
    idle(scene, "other", automatic_ms=60_000)
    seen = scene.seen("other")
    assert seen is not None and seen.held_by_hint_ms is None


def test_an_idle_paused_program_is_forgotten_in_time(scene: Scene) -> None:
    """One that waits is not; a released generation is remembered for a while."""
    idle(scene, ttl_ms=0)
    scene.due("retention", "lead")
    assert scene.upkeep.expire() == [(pid("lead"), "a", "released")]
    assert scene.record("lead") is None
    assert 0 < scene.client.pttl(scene.keys.of(pid("lead"))["gone"]) <= 1_800_000
    scene.arrive("lead")
    assert scene.field("lead", "gen") == "1"
    assert scene.client.zcard(scene.keys.program_timers) == 0


def test_windows_are_filled_and_bounded(scene: Scene) -> None:
    """By completions, by returns to the rank that was left, and by pauses."""
    for number in range(4):
        sample = RequestSample(100 + number, 10, None, None, 1.0, None, 0.5, 1, 1000)
        idle(scene, sample=sample, impact_s=2.5)  # type: ignore[arg-type]
    windows = scene.store.snapshot("a").windows
    assert [sample.prompt_tokens for sample in windows.requests] == [102, 103]
    assert [sample.miss_impact_s for sample in windows.continuity] == [2.5, 2.5]
    assert scene.store.snapshot("a").rank.means.full


# -- the end ------------------------------------------------------------------------------------------------------


def test_a_finished_program_is_gone(scene: Scene) -> None:
    """At once where it is idle; repeating it finds nothing and starts no generation."""
    idle(scene)
    assert scene.upkeep.finish(TENANT, "lead") == "released"
    assert scene.upkeep.finish(TENANT, "lead") == "gone"
    assert (scene.record("lead"), scene.book()["tokens"]) == (None, "0")
    assert scene.upkeep.leaving("a") == {pid("lead"): 210}


def test_finishing_cancels_what_waits(scene: Scene) -> None:
    """More than one call's worth; with nothing running it is gone then."""
    refs = [scene.arrive("lead") for _ in range(101)]
    assert scene.upkeep.finish(TENANT, "lead") == "released"
    assert {scene.state(ref) for ref in refs} == {"cancelled"}
    assert scene.record("lead") is None


def test_finishing_waits_for_what_runs(scene: Scene) -> None:
    """The end of the last of them releases it; a request that comes meanwhile shows that it is not over."""
    scene.arrive("lead")
    scene.plan()
    (handout,) = scene.take()
    assert scene.upkeep.finish(TENANT, "lead") == "ending"
    scene.sound()
    scene.end(handout, ttl_ms=60_000)
    assert scene.record("lead") is None
    scene.arrive("lead")
    scene.plan()
    (handout,) = scene.take()
    scene.upkeep.finish(TENANT, "lead")
    scene.arrive("lead")
    scene.end(handout, ttl_ms=60_000)
    assert scene.record("lead") is not None
    scene.end(*scene.take(), ttl_ms=60_000)
    assert scene.field("lead", "state") == "active"


def test_a_request_that_says_so_ends_its_program(scene: Scene) -> None:
    """`expected_resume: false`, once it has completed."""
    scene.arrive("lead", ends=True)
    scene.plan()
    scene.end(*scene.take(), ttl_ms=60_000)
    assert scene.record("lead") is None


def test_a_last_request_ends_its_program_though_others_end_later(scene: Scene) -> None:
    """The end of those that came before it then ends the Program; a request that came after it says that more may."""
    for later, is_over in ((False, True), (True, False)):
        scene.arrive("lead")
        scene.plan()
        (slow,) = scene.take()
        scene.arrive("lead", ends=True)
        (last,) = scene.take()
        slow = [slow]
        if later:
            scene.arrive("lead")
            slow += scene.take()
        scene.end(last, ttl_ms=60_000)
        assert scene.sound()
        for handout in slow:
            assert scene.record("lead") is not None
            scene.end(handout, ttl_ms=60_000)
        assert (scene.record("lead") is None) is is_over


# -- ranks --------------------------------------------------------------------------------------------------------


def test_a_lost_rank_is_drained(scene: Scene) -> None:
    """Running and unbegun jobs go back to the pools in their order; idle Programs lose their places; nothing is leaving
    any more. Others take over."""
    idle(scene, "idle")
    refs = [scene.arrive("busy")]
    scene.plan()
    refs += [scene.arrive("busy"), scene.arrive("busy")]
    assert len(scene.take(room=1)) == 1
    assert not scene.lose("a", "someone")
    assert scene.lose("a", "first")
    while scene.upkeep.drain("a"):
        scene.sound()
    pool = [ticket.split(b":")[0].decode() for ticket in scene.client.lrange(scene.keys.pool(pid("busy")), 0, -1)]
    assert pool == [ref.token for ref in refs]
    assert scene.book() | {"tokens": "0", "active": "0", "reasoning": "0", "leaving": "0"} == scene.book()
    assert scene.field("idle", "state") == "paused"
    assert scene.upkeep.waiting_at("a") == [pid("busy")]
    assert scene.store.rebind(pid("busy"), "a", "b", "failover") is not None
    scene.plan("b")
    (handout,) = scene.take("b")
    assert handout.lease.token == refs[0].token
    scene.sound()


def test_a_registered_rank_is_not_lost(scene: Scene) -> None:
    """Unless it says so itself."""
    record = scene.keys.rank("a")
    scene.client.hset(record, "incarnation", "first")
    scene.client.pexpire(record, 60_000)
    assert not scene.lose("a", "first")
    assert scene.lose("a", "first", leaves=True)
    assert scene.upkeep.up(["a", "b"]) == {"b": "other"}


def test_an_idle_program_is_bound_anew_when_it_comes_back(scene: Scene) -> None:
    """To the home that its caller names, where its own rank is away or has lost it; else it waits there."""
    idle(scene, "active")
    idle(scene, "paused", ttl_ms=0)
    scene.lose("a", "first")
    for name in ("active", "paused"):
        scene.arrive(name, home="b")
        assert (scene.field(name, "rank"), scene.field(name, "state")) == ("b", "paused")
    scene.sound()
    scene.plan("b")
    for handout in scene.take("b"):
        scene.end(handout, "b", ttl_ms=0)
    scene.lose("b", "other")
    scene.arrive("active", home="b")
    assert scene.field("active", "rank") == "b"


def test_a_rank_away_for_long_leaves_the_ring(scene: Scene) -> None:
    """Its keys go once nothing is bound to it."""
    scene.arrive("lead")
    assert set(scene.upkeep.members()) == {"a", "b"}
    assert scene.upkeep.forget("a", 0) == "live"
    scene.lose("a", "first")
    assert scene.upkeep.forget("a", 60_000) == "early"
    assert scene.upkeep.forget("a", 0) == "left"
    assert set(scene.upkeep.members()) == {"b"}
    scene.store.rebind(pid("lead"), "a", "b", "failover")
    assert scene.upkeep.forget("a", 0) == "gone"
    assert [key for key in scene.keys.place("a").values() if key.endswith(":a") and scene.client.exists(key)] == []


def test_nothing_is_left_of_programs_that_are_over(scene: Scene) -> None:
    """But what belongs to the model, and to ranks that are up; of a rank that has left the ring, nothing."""
    idle(scene)
    idle(scene, "paused", ttl_ms=0)
    scene.arrive("waits")
    scene.lose("a", "first")
    while scene.upkeep.drain("a"):
        pass
    scene.upkeep.finish(TENANT, "waits")
    assert scene.upkeep.forget("a", 0) == "gone"
    for name in ("lead", "paused"):
        scene.due("retention", name)
    assert len(scene.upkeep.expire()) == 2
    lasting = {"members", "placement", "program-events", "tally", "rank-queue:b", "book:b", "dirty", "sweep", "totals"}
    lasting |= {"flows", "fairness"}
    left = {key.decode().partition("}:")[2] for key in scene.client.scan_iter("gp:*") if scene.client.ttl(key) == -1}
    assert left <= lasting


def test_a_relocation_admits_on_another_rank(scene: Scene) -> None:
    """On the version that the plan was made on."""
    scene.arrive("lead")
    seen, front = scene.store.snapshot("b"), scene.store.snapshot("a").fronts[pid("lead")]
    operation = Operation("admit", pid("lead"), "fits", front)
    assert scene.store.relocate(seen, operation, "a").refused == ()
    (handout,) = scene.take("b")
    scene.sound()
    scene.end(handout, "b")
    assert scene.store.relocate(seen, operation, "b").code == "version"


# -- observations -------------------------------------------------------------------------------------------------


def test_an_observation_knows_what_changed_since_its_look_began(scene: Scene) -> None:
    """A pause changes nothing, as its KV is still there; an admission adds; what is gone is no change."""
    idle(scene)
    before = scene.store.snapshot("a")
    scene.arrive("other", tokens=500)
    scene.plan()
    scene.pause("lead", "max_segment_yield")
    look = Look(before.now_ms, before.rank_set, before.moved_tokens, 210, waiting=3, running=4, gone=())
    assert scene.upkeep.observe("a", "first", look)
    seen = scene.store.snapshot("a").rank
    assert seen.observation is not None
    assert (seen.observation.tokens, seen.observation.changed_tokens, seen.observation.waiting) == (210, 600, 3)
    assert seen.leaving_tokens == 210
    after = scene.store.snapshot("a")
    look = Look(after.now_ms, after.rank_set, after.moved_tokens, 600, gone=(pid("lead"), pid("other")))
    assert scene.upkeep.observe("a", "first", look)
    seen = scene.store.snapshot("a").rank
    assert seen.observation is not None
    assert (seen.leaving_tokens, seen.observation.changed_tokens, seen.ledger_tokens) == (0, 0, 600)


def test_late_and_foreign_observations_are_dropped(scene: Scene) -> None:
    """Of another process, of other ranks, and older than the one that is in."""
    seen = scene.store.snapshot("a")
    look = Look(seen.now_ms, seen.rank_set, 0, None)
    assert not scene.upkeep.observe("a", "someone", look)
    assert scene.upkeep.observe("a", "first", look)
    assert not scene.upkeep.observe("a", "first", Look(seen.now_ms - 1, seen.rank_set, 0, 1))
    scene.join("c", "new")
    assert not scene.upkeep.observe("a", "first", Look(seen.now_ms + 1, seen.rank_set, 0, 1))
    observation = scene.store.snapshot("a").rank.observation
    assert observation is not None and observation.tokens is None


def test_a_program_that_yielded_ranks_behind_its_equals_once(scene: Scene) -> None:
    """Until it is active again; KV of its own that was leaving is its own again."""
    idle(scene)
    scene.pause("lead", "max_segment_yield")
    scene.arrive("other")
    scene.arrive("lead")
    order = [member[-32:].decode() for member in scene.client.zrange(scene.keys.place("a")["order"], 0, -1)]
    assert order == [pid("other"), pid("lead")]
    assert scene.upkeep.leaving("a") == {pid("lead"): 210}
    scene.plan()
    assert (scene.upkeep.leaving("a"), scene.field("lead", "yielded")) == ({}, "")


def test_blocking_ancestors_are_seen(scene: Scene) -> None:
    """Nearest first, over blocking links only."""
    scene.arrive("root")
    scene.arrive("middle", parent=pid("root"), blocks_parent=True)
    scene.arrive("leaf", parent=pid("middle"), blocks_parent=True)
    scene.arrive("free", parent=pid("middle"))
    seen = {name: scene.seen(name) for name in ("leaf", "free", "root")}
    ancestors = {name: program.awaited_by for name, program in seen.items() if program is not None}
    assert ancestors == {"leaf": (pid("middle"), pid("root")), "free": (), "root": ()}


def test_one_planner_at_a_time_is_asked_for_a_rank(scene: Scene) -> None:
    """For a moment."""
    assert scene.store.claim("a", "one")
    assert not scene.store.claim("a", "two")


def test_ranks_are_outlined_for_a_first_binding(scene: Scene) -> None:
    """Their books, how many wait there, and whether a process has them; turns go up."""
    idle(scene)
    scene.arrive("waits")
    scene.lose("b", "other")
    outlines = scene.store.outlines(["a", "b", "new"])
    assert [(each.rank.ledger_tokens, each.rank.active, each.waiting) for each in outlines] == [
        (210, 1, 1),
        (0, 0, 0),
        (0, 0, 0),
    ]
    assert [each.incarnation for each in outlines] == ["first", "", ""]
    assert scene.store.turn() < scene.store.turn()


# -- after an outage ----------------------------------------------------------------------------------------------


def test_nothing_is_lost_or_expires_in_a_gap_of_the_sweeps(scene: Scene) -> None:
    """While the state server was away nobody could renew, nor come back to a Program: both have a lease's time."""
    idle(scene)
    scene.due("ttl", "lead")
    swept_steadily(scene.client, ago_ms=LEASE_MS)
    assert scene.upkeep.expire() == []
    assert not scene.upkeep.lose("a", "first")
    # It was put off.
    swept_steadily(scene.client)
    assert scene.upkeep.expire() == []
    assert scene.client.zscore(scene.keys.program_timers, f"ttl:{pid('lead')}") > 1
    assert scene.field("lead", "state") == "active"
    assert scene.upkeep.lose("a", "first")


def test_a_rank_counts_as_away_from_its_loss_on(scene: Scene) -> None:
    """However long ago it was last seen: one that flaps stays in the ring."""
    scene.client.zadd(scene.keys.members, {"a": 1})
    assert scene.lose("a", "first")
    assert scene.upkeep.forget("a", 60_000) == "early"

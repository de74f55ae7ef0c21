"""Programs in the state server: arrivals, places, ends; the ledger, and one place for each Program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool.errors import QueueFull
from pool.store.connection import Client
from pool.store.handouts import Write, failed
from pool.store.ids import new_ref
from pool.store.program_figures import program_survey
from pool.store.program_records import Arrival
from pool.store.programs import Operation, ProgramStore
from tests.builders import entry, job_store, new_job
from tests.program_scene import TENANT, Scene, pid, settings


@pytest.fixture
def scene(client: Client, redis_url: str) -> Iterator[Scene]:
    """One rank, `a`."""
    made = Scene(client, redis_url)
    made.join("a", "first")
    yield made
    made.sound()
    made.close()
    client.flushall()


# -- step 1: arrive, plan, begin, complete ------------------------------------------------------------------------


def test_a_new_program_waits_until_it_is_admitted(scene: Scene) -> None:
    """Its first request waits in its pool; admitted, it goes to the rank, and the ledger counts what it needs."""
    ref = scene.arrive("lead", tokens=400, expected_tokens=50)
    assert scene.take() == []
    waiting = scene.seen("lead")
    assert waiting is not None and waiting.waiting is not None and waiting.waiting.expected_output_tokens == 50
    assert scene.store.dirty() == ["a"]
    applied = scene.plan()
    assert (applied.code, applied.refused, scene.store.dirty()) == ("ok", (), [])
    (handout,) = scene.take()
    assert handout.lease.token == ref.token
    assert handout.lease.placement is not None and handout.lease.placement.epoch == 1
    assert scene.book() | {"tokens": "450", "active": "1", "reasoning": "1"} == scene.book()
    scene.sound()
    assert scene.end(handout).code == "ok"
    assert scene.state(ref) == "completed"
    assert scene.book() | {"tokens": "0", "active": "0", "reasoning": "0"} == scene.book()


def test_a_program_that_keeps_its_place_goes_on_at_once(scene: Scene) -> None:
    """Its next request is dispatched with the same epoch, and the ledger grows by what its context does."""
    scene.arrive("lead")
    scene.plan()
    scene.end(*scene.take(), ttl_ms=60_000)
    assert scene.book() | {"tokens": "210", "active": "1", "reasoning": "0"} == scene.book()
    scene.sound()
    ref = scene.arrive("lead", tokens=300)
    (handout,) = scene.take()
    assert (handout.lease.token, handout.lease.placement.epoch) == (ref.token, 1)  # type: ignore[union-attr]
    assert scene.book()["tokens"] == "400"
    scene.sound()
    assert scene.end(handout, ttl_ms=0).code == "ok"
    assert scene.field("lead", "state") == "paused"
    assert scene.upkeep.leaving("a") == {pid("lead"): 400}


def test_each_transition_is_an_event_and_is_counted(scene: Scene) -> None:
    """By what happened and why; a request that goes on at once is one, too."""
    scene.arrive("lead")
    scene.plan()
    scene.end(*scene.take(), ttl_ms=60_000)
    scene.arrive("lead")
    scene.end(*scene.take(), ttl_ms=0)
    scene.upkeep.finish(TENANT, "lead")
    events = [fields for _, fields in scene.client.xrange(scene.keys.program_events)]
    happened = [(fields[b"what"].decode(), fields[b"reason"].decode()) for fields in events]
    assert happened == [
        ("create", "arrival"),
        ("admit", "fits"),
        ("rest", "completed"),
        ("continue", "arrival"),
        ("pause", "ttl_expired"),
        ("release", "finished"),
    ]
    assert program_survey(scene.client, "tiny", scene.settings).transitions == dict.fromkeys(happened, 1)


def test_records_stay_packed(scene: Scene) -> None:
    """Whatever a Program does: a record that the server once unpacked takes three times as much, and is never packed
    again."""
    for _ in range(2):
        scene.arrive("lead", tokens=400_000, expected_tokens=50, priority=2**31 - 1)
        assert scene.client.object("encoding", scene.keys.record(pid("lead"))) == b"listpack"
        scene.plan()
        scene.end(*scene.take())
    assert scene.client.object("encoding", scene.keys.record(pid("lead"))) == b"listpack"


def test_overlapping_requests_rest_with_the_last(scene: Scene) -> None:
    """The Program rests when the last of them is done; the later one's hint counts while it runs."""
    scene.arrive("lead")
    scene.plan()
    (first,) = scene.take()
    scene.arrive("lead", tokens=50, expected_tokens=700)
    (second,) = scene.take()
    assert (scene.book()["tokens"], scene.book()["reasoning"]) == ("800", "1")
    scene.end(second, ttl_ms=60_000)
    assert (scene.field("lead", "status"), scene.book()["tokens"]) == ("reasoning", "210")
    scene.sound()
    scene.end(first, ttl_ms=60_000)
    assert scene.field("lead", "status") == "acting"


def test_a_context_falls_with_the_second_smaller_observation(scene: Scene) -> None:
    """One that is smaller changes nothing; the next one does."""
    scene.arrive("lead", tokens=1000)
    scene.plan()
    for context, expected in ((900, "1000"), (950, "950"), (940, "950"), (960, "960")):
        scene.end(*scene.take(), ttl_ms=60_000, context_tokens=context)
        assert scene.field("lead", "ctx") == expected
        scene.arrive("lead", tokens=1)
    scene.end(*scene.take())


def test_a_marked_program_pauses_when_idle_and_its_successor_clears_the_mark(scene: Scene) -> None:
    """A request that came meanwhile waits in the pool, is dispatched by the end of the one before it, and clears the
    mark; without one, the Program pauses."""
    scene.arrive("lead")
    scene.plan()
    (first,) = scene.take()
    scene.store.apply(scene.store.snapshot("a"), [Operation("mark", pid("lead"), "capacity_repair")])
    second = scene.arrive("lead", tokens=5000)
    assert scene.book()["tokens"] == "200"
    assert scene.take() == []
    scene.sound()
    assert scene.end(first, ttl_ms=60_000).code == "ok"
    (handout,) = scene.take()
    assert (handout.lease.token, scene.field("lead", "mark")) == (second.token, "")
    scene.sound()
    scene.store.apply(scene.store.snapshot("a"), [Operation("mark", pid("lead"), "capacity_repair")])
    scene.end(handout, ttl_ms=60_000)
    assert scene.field("lead", "state") == "paused"
    assert scene.client.xrevrange(scene.keys.program_events, count=1)[0][1][b"reason"] == b"capacity_repair"


def test_requests_of_one_program_are_served_in_the_order_in_which_they_came(scene: Scene) -> None:
    """Only the first is dispatched by the admission; each end dispatches the next."""
    refs = [scene.arrive("lead") for _ in range(3)]
    scene.plan()
    for ref in refs:
        scene.sound()
        (handout,) = scene.take()
        assert handout.lease.token == ref.token
        scene.end(handout, ttl_ms=60_000)


def test_programs_wait_in_the_order_of_the_rules(client: Client, redis_url: str) -> None:
    """The lexicographic order of the store is that of pool/rules/programs/order.py, for both resume orders."""
    for order in ("mru", "fcfs"):
        client.flushall()
        scene = Scene(client, redis_url, settings(resume_order=order, max_active_programs_per_target=1))
        scene.join("a", "x")
        for number in range(6):
            scene.arrive(f"p{number}")
            scene.plan()
            scene.end(*scene.take())
        for number in (3, 1, 5, 0, 2, 4):
            scene.arrive(f"p{number}", priority=(-7, 0, 2**31 - 1)[number % 3])
        admitted = []
        for _ in range(6):
            seen = scene.store.snapshot("a")
            first = scene.client.zrange(scene.keys.place("a")["order"], 0, 0)[0][-32:].decode()
            applied = scene.plan(limit=1)
            (handout,) = scene.take()
            assert handout.lease.placement is not None and applied.refused == ()
            assert handout.lease.placement.program == first
            admitted.append(first)
            assert seen.fronts[first] == handout.lease.token
            scene.end(handout)
        recency = (5, 2, 4, 1, 3, 0) if order == "mru" else (5, 2, 1, 4, 3, 0)
        assert admitted == [pid(f"p{number}") for number in recency]
        scene.sound()
        scene.close()
    client.flushall()


def test_a_plan_on_an_old_version_does_nothing(scene: Scene) -> None:
    """Whatever happened to the rank meanwhile; the rank still needs a plan."""
    scene.arrive("lead")
    seen = scene.store.snapshot("a")
    scene.arrive("other")
    applied = scene.store.apply(seen, [Operation("admit", pid("lead"), "fits", seen.fronts[pid("lead")])])
    assert applied.code == "version"
    assert (scene.take(), scene.store.dirty()) == ([], ["a"])


def test_hard_limits_hold_whatever_a_plan_says(client: Client, redis_url: str) -> None:
    """The number of Programs unless forced, the KV there is always, and the request in front."""
    limits = settings(max_active_programs_per_target=1, token_capacity_per_dp_rank=500)
    scene = Scene(client, redis_url, limits)
    scene.join("a", "x")
    for name, tokens in (("one", 100), ("two", 100), ("large", 300)):
        scene.arrive(name, tokens=tokens)
    seen = scene.store.snapshot("a")

    def op(kind: str, name: str, token: str = "") -> Operation:
        return Operation(kind, pid(name), "why", token or seen.fronts[pid(name)])

    operations = [op("admit", "one", "ab" * 16), op("admit", "one"), op("admit", "two"), op("force", "large")]
    applied = scene.store.apply(seen, [*operations, op("force", "two"), Operation("pause", pid("one"), "why")])
    refused = [(pid("one"), "other_front"), (pid("two"), "too_many"), (pid("large"), "no_kv"), (pid("one"), "busy")]
    assert list(applied.refused) == refused
    assert scene.store.dirty() == ["a"]
    assert len(scene.take()) == 2
    scene.sound()
    scene.close()
    client.flushall()


def test_an_observation_decides_what_kv_there_is(client: Client, redis_url: str) -> None:
    """A fresh one of an engine that holds more than the ledger says keeps a Program out."""
    scene = Scene(client, redis_url, settings(token_capacity_per_dp_rank=500))
    scene.join("a", "x")
    scene.arrive("lead")
    seen = scene.store.snapshot("a")
    book = {"obs_began_ms": seen.now_ms, "obs_tokens": 301, "obs_moved": 0, "obs_waiting": 0, "obs_running": 0}
    scene.client.hset(scene.keys.place("a")["book"], mapping=book)
    operation = Operation("admit", pid("lead"), "fits", seen.fronts[pid("lead")])
    assert scene.store.apply(seen, [operation]).refused == ((pid("lead"), "no_kv"),)
    scene.client.hset(scene.keys.place("a")["book"], "obs_tokens", 300)
    assert scene.store.apply(seen, [operation]).refused == ()
    scene.close()
    client.flushall()


def test_an_arrival_is_idempotent_and_bounded_as_a_submit(scene: Scene) -> None:
    """The same job twice is one; past the model's bound it is refused, with nothing left behind."""
    job = new_job(tenant=TENANT)
    arrival = Arrival(TENANT, "lead", 10, force_ms=1000)
    assert scene.store.arrive(job, arrival, home="a").where == "waiting"
    assert scene.store.arrive(job, arrival, home="a").where == ""
    assert scene.client.llen(scene.keys.pool(pid("lead"))) == 1
    full = ProgramStore(scene.client, job_store(scene.client, cap=1), "tiny", scene.settings)
    with pytest.raises(QueueFull):
        full.arrive(new_job(tenant=TENANT), Arrival(TENANT, "new", 10, force_ms=1000), home="a")
    assert scene.record("new") is None


def test_a_force_deadline_is_set_once(scene: Scene) -> None:
    """A second request never postpones it; a deadline of its own brings it forward."""
    scene.arrive("lead", force_ms=100_000)
    first = scene.field("lead", "force_ms")
    scene.arrive("lead", force_ms=300_000)
    assert scene.field("lead", "force_ms") == first
    scene.arrive("lead", force_ms=300_000, deadline_ms=5_000)
    assert int(scene.field("lead", "force_ms")) < int(first)
    scene.sound()


def test_a_program_bound_to_no_rank_waits(scene: Scene) -> None:
    """Until a rank is up and it is bound there."""
    scene.arrive("lead", home="")
    scene.sound()
    assert scene.plan("").code == "away"
    assert scene.store.rebind(pid("lead"), "", "a", "joined") is not None
    scene.plan()
    assert len(scene.take()) == 1


def test_where_programs_are_only_bound_they_begin_at_once(client: Client, redis_url: str) -> None:
    """Without a plan; idle they keep their place until they are forgotten."""
    scene = Scene(client, redis_url, settings(binding_only=True))
    scene.join("a", "x")
    scene.arrive("lead")
    scene.end(*scene.take())
    assert (scene.field("lead", "state"), scene.field("lead", "status")) == ("active", "acting")
    scene.sound()
    scene.due("retention", "lead")
    assert scene.upkeep.expire() == [(pid("lead"), "a", "released")]
    assert scene.record("lead") is None
    scene.sound()
    scene.close()
    client.flushall()


def test_a_late_completion_changes_nothing(scene: Scene) -> None:
    """Neither one that is repeated, nor one of an attempt that was taken back, nor one of a rank that was lost."""
    ref = scene.arrive("lead")
    scene.plan()
    (handout,) = scene.take()
    old = scene.workers["a"]
    scene.join("a", "second")
    before = (scene.record("lead"), scene.book())
    assert scene.end(handout, worker=old).code == "stale"
    assert (scene.record("lead"), scene.book()) == before
    scene.upkeep.drain("a")
    assert (scene.state(ref), scene.field("lead", "state"), scene.field("lead", "epoch")) == ("queued", "paused", "2")
    scene.sound()
    scene.plan()
    (again,) = scene.take()
    assert scene.end(handout, worker=old).code == "stale"
    assert scene.end(again).code == "ok"
    assert scene.end(again).detail == "completed"
    assert scene.field("lead", "completed") == "1"


def test_a_failed_request_pauses_its_program_and_a_first_one_ends_it(scene: Scene) -> None:
    """With that reason; a Program that never completed anything is released."""
    scene.arrive("lead")
    scene.plan()
    (handout,) = scene.take()
    scene.workers["a"].write([Write(handout.lease, 0, (), failed("engine_error", "It failed."))])
    assert scene.record("lead") is None
    scene.arrive("lead")
    assert scene.field("lead", "gen") == "1"
    scene.plan()
    scene.end(*scene.take(), ttl_ms=60_000)
    scene.arrive("lead")
    (handout,) = scene.take()
    scene.workers["a"].write([Write(handout.lease, 0, (entry(0, 1),), failed("engine_error", "It failed."))])
    assert scene.field("lead", "state") == "paused"
    assert scene.client.xrevrange(scene.keys.program_events, count=1)[0][1][b"reason"] == b"request_failed"


def test_a_program_of_another_tenant_is_another_one(scene: Scene) -> None:
    """Though it has the same name; and names never meet in the middle."""
    scene.arrive("lead", tenant="other")
    assert scene.record("lead") is None
    assert pid("a:b") != pid("a") != pid("b")
    assert new_ref("chat", "tiny") != new_ref("chat", "tiny")

"""Jobs of Programs that end otherwise than by their worker, or go back: what becomes of the Program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool.errors import ModelClosed
from pool.rules.fairness import BATCH
from pool.store.connection import Client
from pool.store.flows import flow_of
from pool.store.handouts import Handout, Write
from pool.store.ids import JobRef
from pool.store.jobs import JobStore
from pool.store.lane_positions import BAND
from pool.store.lifecycle import Lifecycle
from pool.store.programs import Operation
from pool.store.standing import lost_why
from pool.store.totals import surveys
from pool.store.unloading import Unloading
from tests.builders import RESULT_TTL_MS, entry, new_job, sweeper, swept_steadily
from tests.program_scene import TENANT, Scene, pid


@pytest.fixture
def scene(client: Client, redis_url: str) -> Iterator[Scene]:
    """One rank, `a`."""
    made = Scene(client, redis_url)
    made.join("a", "first")
    yield made
    made.sound()
    made.close()
    client.flushall()


def running(scene: Scene, *, completed: bool = True) -> Handout:
    """A Program `lead` with a request that its worker has begun; `completed`: it has completed one before."""
    scene.arrive("lead")
    scene.plan()
    if completed:
        scene.end(*scene.take(), ttl_ms=60_000)
        scene.arrive("lead")
    (handout,) = scene.take()
    return handout


def last_event(scene: Scene) -> tuple[str, str]:
    """What, and why."""
    ((_, fields),) = scene.client.xrevrange(scene.keys.program_events, count=1)
    return fields[b"what"].decode(), fields[b"reason"].decode()


def test_a_waiting_first_request_that_is_cancelled_ends_its_program(scene: Scene) -> None:
    """It has never completed anything; its number is remembered."""
    ref = scene.arrive("lead")
    assert scene.jobs.cancel(ref).state == "cancelled"
    assert (scene.record("lead"), last_event(scene)) == (None, ("release", "request_cancelled"))
    scene.arrive("lead")
    assert scene.field("lead", "gen") == "1"


def test_of_several_waiting_ones_the_next_is_in_front(scene: Scene) -> None:
    """With its own hints; the force deadline stays."""
    first = scene.arrive("lead", priority=5, expected_tokens=9)
    second = scene.arrive("lead", priority=1)
    force_ms = scene.field("lead", "force_ms")
    scene.jobs.cancel(first)
    seen = scene.seen("lead")
    assert seen is not None and seen.waiting is not None
    assert (seen.waiting.priority, seen.waiting.expected_output_tokens) == (1, None)
    assert scene.field("lead", "force_ms") == force_ms
    assert scene.store.snapshot("a").fronts == {pid("lead"): second.token}


def test_a_running_request_that_is_cancelled_pauses_its_program(scene: Scene) -> None:
    """Where it has completed one before; the late completion of its worker changes nothing."""
    handout = running(scene)
    ref = scene.arrive("lead")
    (other,) = scene.take()
    scene.jobs.cancel(ref)
    assert scene.field("lead", "inflight") == "1"
    scene.sound()
    scene.end(handout, ttl_ms=60_000)
    assert scene.field("lead", "status") == "acting"
    assert scene.end(other).code == "stale"
    ref = scene.arrive("lead")
    scene.jobs.cancel(ref)
    assert (scene.field("lead", "state"), last_event(scene)) == ("paused", ("pause", "request_cancelled"))


def test_a_cancelled_request_lets_its_successor_run(scene: Scene) -> None:
    """The cancel declares the successor that it was told of."""
    handout = running(scene)
    scene.store.apply(scene.store.snapshot("a"), [Operation("mark", pid("lead"), "capacity_repair")])
    successor = scene.arrive("lead")
    assert scene.jobs.cancel(JobRef("resp", "tiny", 0, handout.lease.token)).state == "cancelled"
    (next_one,) = scene.take()
    assert next_one.lease.token == successor.token
    scene.sound()
    scene.end(next_one)


@pytest.mark.parametrize("kind", ["queue", "deadline", "reader"])
def test_a_waiting_request_that_times_out(scene: Scene, kind: str) -> None:
    """Its Program is idle afterwards, where it has completed one before."""
    scene.end(running(scene))
    ref = scene.arrive("lead", job={"deadline_ms": 10_000, "reader_ms": 10_000})
    swept_steadily(scene.client)
    scene.client.zadd(scene.keys.timers, {f"{kind}:{ref.token}": 1}, xx=True)
    assert sweeper(scene.client).sweep("tiny").expired == 1
    assert scene.state(ref) == ("cancelled" if kind == "reader" else "failed")
    assert (scene.field("lead", "state"), scene.field("lead", "status")) == ("paused", "acting")


def test_a_running_request_that_times_out(scene: Scene) -> None:
    """Its Program pauses."""
    handout = running(scene)
    swept_steadily(scene.client)
    scene.client.zadd(scene.keys.timers, {f"run:{handout.lease.token}": 1}, xx=True)
    assert sweeper(scene.client).sweep("tiny").expired == 1
    assert (scene.field("lead", "state"), last_event(scene)) == ("paused", ("pause", "request_failed"))
    assert scene.end(handout).code == "stale"


def test_a_job_whose_lease_ran_out_goes_back_to_its_rank(scene: Scene) -> None:
    """While the rank lives, the Program keeps its place; the job keeps its tokens."""
    handout = running(scene)
    scene.workers["a"].write([Write(handout.lease, 0, (entry(0, 5, 6),))])
    swept_steadily(scene.client)
    scene.client.zadd(scene.keys.leases, {handout.lease.token: 1})
    assert sweeper(scene.client).sweep("tiny").requeued == 1
    scene.sound()
    (again,) = scene.take()
    assert (again.lease.token, again.logged, again.lease.attempt) == (handout.lease.token, 2, 2)
    assert scene.end(handout).code == "stale"
    assert scene.end(again).code == "ok"


def test_a_job_that_loses_every_worker_fails_as_poison(scene: Scene) -> None:
    """And its Program, which never completed anything, is gone."""
    handout = running(scene, completed=False)
    for losses in range(1, 4):
        swept_steadily(scene.client)
        scene.client.zadd(scene.keys.leases, {handout.lease.token: 1})
        swept = sweeper(scene.client).sweep("tiny")
        assert (swept.requeued, swept.poisoned) == ((1, 0) if losses < 3 else (0, 1))
        scene.sound()
        if losses < 3:
            (handout,) = scene.take()
    assert scene.record("lead") is None
    scene.client.delete(scene.keys.dead)


def test_what_a_worker_hands_back_is_its_ranks_again(scene: Scene) -> None:
    """Begun or not, with its tokens, at no cost; a late completion of the former attempt changes nothing."""
    handout = running(scene)
    worker = scene.workers["a"]
    worker.write([Write(handout.lease, 0, (entry(0, 5),))])
    assert worker.hand_back([handout.lease]) == 1
    assert worker.hand_back([handout.lease]) == 0
    scene.sound()
    (found,) = worker.read(1, 10)
    worker.give_back([found])
    scene.sound()
    (again,) = scene.take()
    assert (again.logged, again.lease.attempt) == (1, 2)
    assert scene.end(handout).code == "stale"
    assert scene.end(again).code == "ok"
    assert scene.client.hget(scene.keys.job(again.lease.token), "crashes") is None


def test_what_a_lost_rank_hands_back_waits_in_front(scene: Scene) -> None:
    """The Program has no place any more, and its request is the front of its pool again, before later ones."""
    handout = running(scene)
    later = scene.arrive("lead")
    assert scene.lose("a", "first", leaves=True)
    assert scene.workers["a"].hand_back([handout.lease]) == 1
    scene.sound()
    assert scene.upkeep.drain("a") > 0
    tokens = [ticket.split(b":")[0].decode() for ticket in scene.client.lrange(scene.keys.pool(pid("lead")), 0, -1)]
    assert sorted(tokens) == sorted([handout.lease.token, later.token])
    assert scene.book() | {"tokens": "0", "leaving": "0", "active": "0"} == scene.book()
    scene.upkeep.finish(TENANT, "lead")


def test_an_entry_is_not_begun_for_a_place_that_is_lost(scene: Scene) -> None:
    """It stays where whoever takes over finds it."""
    scene.arrive("lead")
    scene.plan()
    old = scene.workers["a"]
    found = old.read(1, 10)
    scene.join("a", "second")
    assert list(old.begin(found)) == []
    assert scene.upkeep.drain("a") == 1
    scene.plan()
    assert len(scene.take()) == 1


def test_a_program_whose_record_was_deleted_does_not_hold_up_its_job(scene: Scene) -> None:
    """It completes alone."""
    handout = running(scene)
    scene.client.delete(scene.keys.record(pid("lead")))
    assert scene.end(handout).code == "ok"
    scene.client.flushall()


def test_the_model_counts_jobs_of_programs(scene: Scene) -> None:
    """As submitted, queued and running; its own stream is missing none of them."""
    handout = running(scene)
    scene.arrive("other")
    survey = surveys(scene.client, ["tiny"])["tiny"]
    assert (survey.queued, survey.running, survey.totals.submitted) == (1, 1, 3)
    swept_steadily(scene.client)
    sweeper(scene.client).sweep("tiny")
    assert scene.client.hget(scene.keys.sweep, "rebuilt_ms") is None
    scene.end(handout)


def test_a_lost_stream_of_a_rank_is_made_again(scene: Scene, store: JobStore) -> None:
    """From the jobs that were sent there; those that wait, run, or are plain, stay where they are."""
    plain = new_job()
    store.submit(plain)
    handout = running(scene)
    sent = [scene.arrive("lead"), scene.arrive("lead")]
    scene.arrive("waits")
    scene.client.delete(scene.keys.place("a")["stream"])
    assert scene.take() == []
    assert sorted(each.lease.token for each in scene.take()) == sorted(ref.token for ref in sent)
    assert scene.client.zcard(scene.keys.lanes["backlog"]) == 1
    assert scene.end(handout).code == "ok"
    scene.sound()
    store.cancel(plain.ref)


def test_an_unload_pauses_programs_and_ends_what_waits(scene: Scene) -> None:
    """Requests in the pool, and those that were sent and have not begun, end by name; what runs ends as it would have;
    whoever has a place loses it for that reason, and the same generation goes on at the rank's next process."""
    handout = running(scene)
    sent, waiting = scene.arrive("lead"), scene.arrive("new")
    lifecycle = Lifecycle(scene.client, "tiny")
    lifecycle.unload(60_000)
    unloading = Unloading(lifecycle, scene.jobs, result_ttl_ms=RESULT_TTL_MS)
    with pytest.raises(ModelClosed):
        scene.arrive("other")
    unloading.go_on()
    for ref in (sent, waiting):
        assert scene.jobs.read(ref).error_code == "model_unloading"
    swept_steadily(scene.client)
    assert scene.upkeep.lose("a", "first", leaves=True, why="model_unloading")
    scene.upkeep.drain("a")
    assert scene.end(handout, ttl_ms=60_000).code == "ok"
    assert last_event(scene) == ("pause", "model_unloading")
    assert (scene.field("lead", "state"), scene.field("lead", "gen")) == ("paused", "0")
    assert unloading.go_on().code == "ok" and lost_why(scene.client, scene.keys, "a") == "model_unloading"
    lifecycle.load()
    scene.join("a", "second")
    scene.arrive("lead")
    scene.plan()
    (again,) = scene.take()
    assert scene.end(again).code == "ok" and scene.field("lead", "gen") == "0"
    assert scene.upkeep.join("a", "third")
    assert lost_why(scene.client, scene.keys, "a") == "health_failover"


def test_a_program_s_slot_time_is_charged(scene: Scene) -> None:
    """To its owner's key, in the lane that the request names, beside plain work; what never began is not."""
    flow = flow_of(BATCH, TENANT, "")
    scene.arrive("lead", job={"lane": BATCH, "weight": 2})
    scene.plan()
    (handout,) = scene.take()
    scene.client.hset(scene.keys.job(handout.lease.token), mapping={"begun_ms": 2**50, "used_ms": 500})
    scene.end(handout, ttl_ms=60_000)
    assert scene.client.zscore(scene.keys.lanes["flows"], flow) % BAND == 250
    waits = scene.arrive("lead", job={"lane": BATCH})
    scene.jobs.cancel(waits)
    assert scene.client.zscore(scene.keys.lanes["flows"], flow) % BAND == 250

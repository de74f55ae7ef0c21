"""A rank that reads two streams as one: its model's, and its own of Programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool.store.connection import Client, connect
from pool.store.handouts import Handout, Write
from pool.store.ids import JobRef
from pool.store.log import LogEntry
from pool.store.rank_delivery import RankDelivery
from tests.builders import LEASE_MS, RESULT_TTL_MS, completed, new_job, swept_steadily
from tests.builders import sweeper as builders_sweeper
from tests.program_scene import Scene, settings


@pytest.fixture
def scene(client: Client, redis_url: str) -> Iterator[Scene]:
    """Rank `a` reads both."""
    made = Scene(client, redis_url, settings())
    made.upkeep.join("a", "first")
    worker = RankDelivery(
        reader=connect(redis_url, max_connections=1),
        writer=connect(redis_url, max_connections=1),
        model="tiny",
        rank="a",
        lease_ms=LEASE_MS,
        result_ttl_ms=RESULT_TTL_MS,
        incarnation="first",
    )
    worker.heal()
    made.workers["a"] = worker
    yield made
    made.sound()
    made.close()
    client.flushall()


def both(scene: Scene) -> RankDelivery:
    """The scene's worker."""
    worker = scene.workers["a"]
    assert isinstance(worker, RankDelivery)
    return worker


def plain(scene: Scene) -> JobRef:
    """A job of no Program."""
    job = new_job()
    scene.jobs.submit(job)
    return job.ref


def of_program(scene: Scene, name: str) -> JobRef:
    """A job of a Program that has its place."""
    ref = scene.arrive(name)
    scene.plan()
    return ref


def is_programs(handout: Handout) -> bool:
    """Whose it is."""
    return handout.lease.placement is not None


def test_room_is_shared(scene: Scene) -> None:
    """Each gets half of it; what one does not need, the next read gives to the other."""
    for number in range(4):
        plain(scene)
        of_program(scene, f"p{number}")
    taken = both(scene).take(4, 1)
    assert sorted(map(is_programs, taken.handouts)) == [False, False, True, True]
    taken = both(scene).take(4, 1)
    assert len(taken.handouts) == 4
    plain(scene)
    plain(scene)
    found = [*both(scene).take(4, 1).handouts, *both(scene).take(2, 1).handouts]
    assert list(map(is_programs, found)) == [False, False]


def test_the_last_place_goes_to_each_in_turn(scene: Scene) -> None:
    """Whoever else waits; and at once to the only one that does."""
    for number in range(3):
        plain(scene)
        of_program(scene, f"p{number}")
    kinds = [is_programs(*both(scene).take(1, 1).handouts) for _ in range(6)]
    assert kinds[:4] in ([True, False, True, False], [False, True, False, True])
    assert sorted(kinds) == [False, False, False, True, True, True]
    for _ in range(3):
        plain(scene)
    assert [is_programs(*both(scene).take(1, 1).handouts) for _ in range(3)] == [False] * 3


def test_each_kind_is_written_by_its_own_verbs(scene: Scene) -> None:
    """Tokens, renewals and ends of both in one call, answered in order; then nothing of them is left."""
    refs = [plain(scene), of_program(scene, "lead"), plain(scene)]
    handouts = {handout.lease.token: handout for handout in both(scene).take(8, 1).handouts}
    leases = [handouts[ref.token].lease for ref in refs]
    worker = both(scene)
    entry = LogEntry(0, 0, (5,), "x")
    assert [answer.code for answer in worker.write([Write(lease, 0, (entry,)) for lease in leases])] == ["ok"] * 3
    scene.jobs.cancel(refs[2])
    assert [answer.code for answer in worker.renew(leases)] == ["ok", "ok", "stale"]
    answers = worker.write([Write(lease, 1, (), completed("x")) for lease in leases])
    assert [answer.code for answer in answers] == ["ok", "ok", "stale"]
    assert [scene.state(ref) for ref in refs] == ["completed", "completed", "cancelled"]
    assert [scene.client.xlen(queue) for queue in (worker.keys.queue, worker.plain.keys.queue)] == [0, 0]


def test_each_goes_back_where_it_came_from(scene: Scene) -> None:
    """Begun ones are handed back, unbegun ones given back, those that wait are kept; then all begin again."""
    refs = [plain(scene), of_program(scene, "lead")]
    worker = both(scene)
    taken = worker.take(8, 1).handouts
    assert worker.hand_back([handout.lease for handout in taken]) == 2
    assert [scene.state(ref) for ref in refs] == ["queued", "queued"]
    entries = worker.read(8, 1)
    assert {entry.token for entry in worker.keep(entries)} == {ref.token for ref in refs}
    worker.give_back(entries)
    assert worker.keep(entries) == []
    assert len(worker.take(8, 1).handouts) == 2


def test_a_new_connection_finds_what_was_read_of_both(scene: Scene) -> None:
    """Entries that got lost on the old one lie in the pending lists of both streams."""
    refs = [plain(scene), of_program(scene, "lead")]
    worker = both(scene)
    assert len(worker.read(8, 1)) == 2
    worker._reading.forget()
    assert {entry.token for entry in worker.read(8, 1)} == {ref.token for ref in refs}


def test_both_streams_are_healed(scene: Scene) -> None:
    """When they or their groups are lost, the next read makes them again from the index."""
    refs = [plain(scene), of_program(scene, "lead")]
    worker = both(scene)
    scene.client.delete(worker.keys.queue, worker.plain.keys.queue)
    assert worker.read(8, 1) == []
    assert {entry.token for entry in worker.read(8, 1)} == {ref.token for ref in refs}


def test_without_its_seat_a_rank_reads_its_model_alone(scene: Scene) -> None:
    """The other stream is another process's."""
    worker = both(scene)
    worker.seated = False
    ref = plain(scene)
    of_program(scene, "lead")
    assert [handout.lease.token for handout in worker.take(8, 1).handouts] == [ref.token]


def test_an_entry_of_no_program_is_dropped(scene: Scene) -> None:
    """Anybody who reaches the state server can add one to a rank's stream."""
    worker = both(scene)
    scene.client.xadd(worker.keys.queue, {"job": "0" * 32})
    assert worker.read(8, 1) == []
    assert scene.client.xlen(worker.keys.queue) == 0


# -- a rank that leaves ---------------------------------------------------------------------------------------------


def leave(scene: Scene) -> None:
    """The worker gives its rank up, and what has not begun is moved."""
    assert scene.upkeep.lose("a", "first", leaves=True)
    while scene.upkeep.drain("a"):
        pass


def test_what_runs_may_end_on_a_rank_that_leaves(scene: Scene) -> None:
    """It counts, and its Program then waits or rests without a place; what had not begun waits in its pool at once."""
    running, behind = of_program(scene, "lead"), of_program(scene, "other")
    handouts = [found for found in both(scene).begin(both(scene).read(1, 1)) if isinstance(found, Handout)]
    (handout,) = handouts
    assert handout.lease.token == running.token
    leave(scene)
    assert (scene.field("other", "state"), scene.field("lead", "state")) == ("paused", "active")
    assert scene.client.lrange(scene.keys.pool(handout.lease.placement.program), 0, -1) == []  # type: ignore[union-attr]
    successor = scene.arrive("lead")
    scene.sound()
    assert scene.end(handout, ttl_ms=60_000).code == "ok"
    assert (scene.state(running), scene.state(behind), scene.state(successor)) == ("completed", "queued", "queued")
    assert (scene.field("lead", "state"), scene.field("lead", "completed")) == ("paused", "1")
    assert scene.book()["active"] == "0"


def test_a_rank_that_leaves_begins_nothing(scene: Scene) -> None:
    """Not even what it has read."""
    of_program(scene, "lead")
    entries = both(scene).read(1, 1)
    leave(scene)
    assert list(both(scene).begin(entries)) == []


def test_a_rank_that_leaves_hands_back(scene: Scene) -> None:
    """What did not end in time waits in its pool."""
    ref = of_program(scene, "lead")
    (handout,) = both(scene).take(1, 1).handouts
    leave(scene)
    assert both(scene).hand_back([handout.lease]) == 1
    assert (scene.state(ref), scene.field("lead", "state")) == ("queued", "paused")


def test_a_rank_that_leaves_loses_what_it_does_not_renew(scene: Scene) -> None:
    """It died before the end: its lease runs out, as any."""
    ref = of_program(scene, "lead")
    (handout,) = both(scene).take(1, 1).handouts
    leave(scene)
    swept_steadily(scene.client)
    scene.client.zadd(scene.keys.leases, {handout.lease.token: 1})
    assert builders_sweeper(scene.client).sweep("tiny").requeued == 1
    assert (scene.state(ref), scene.field("lead", "state")) == ("queued", "paused")
    assert scene.end(handout).code == "stale"


def test_a_new_process_ends_the_grace_of_the_one_before(scene: Scene) -> None:
    """From then on the old one's ends change nothing."""
    of_program(scene, "lead")
    (handout,) = both(scene).take(1, 1).handouts
    leave(scene)
    scene.upkeep.join("a", "second")
    assert scene.end(handout).code == "stale"
    while scene.upkeep.drain("a"):
        pass
    assert scene.field("lead", "state") == "paused"

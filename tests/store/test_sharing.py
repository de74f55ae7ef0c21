"""How replicas of a model fill evenly: what a replica gives back of what it has read, and what becomes of that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool.store.audit import Audit
from pool.store.connection import Client
from pool.store.handouts import Write
from pool.store.jobs import JobStore
from pool.store.keys import GROUP, ModelKeys
from pool.store.sharing import MOST_HOPS, TELL_AGAIN_S
from tests.builders import as_if_ranks_waited, completed, new_job
from tests.replicas import Replica

KEYS = ModelKeys("tiny:0")


@pytest.fixture
def trio(redis_url: str, client: Client) -> Iterator[list[Replica]]:
    """Three replicas of 8, 4 and 2 slots; what they hold at the end of the test ends."""
    replicas = [Replica(redis_url, client, f"rank-{slots}", slots) for slots in (8, 4, 2)]
    yield replicas
    for replica in replicas:
        replica.end(len(replica.held))
        replica.delivery.close()


def fill(store: JobStore, replicas: list[Replica], jobs: int) -> list[int]:
    """Submit jobs one by one; each time the fullest replicas look first, as if they had waited longest. What each
    holds then."""
    for _ in range(jobs):
        store.submit(new_job())
        line = sorted(replicas, key=lambda replica: -replica.occupancy)
        assert any(replica.turn() for replica in line), "nobody begins the job"
    return [len(replica.held) for replica in replicas]


@pytest.mark.parametrize(("jobs", "held"), [(3, [1, 1, 1]), (7, [4, 2, 1]), (14, [8, 4, 2])])
def test_unequal_replicas_fill_evenly(store: JobStore, trio: list[Replica], jobs: int, held: list[int]) -> None:
    """In flight for its slots is what counts, whoever reads first."""
    assert fill(store, trio, jobs) == held


def test_who_ends_work_gets_the_next(store: JobStore, trio: list[Replica]) -> None:
    """What a replica told when it began to wait is not what counts, but what it has now."""
    fill(store, trio, 14)
    trio[2].end(2)
    trio[0].end(2)
    assert fill(store, trio, 3) == [7, 4, 2]


def test_whoever_comes_back_does_not_take_all_that_has_gathered(
    store: JobStore, client: Client, trio: list[Replica]
) -> None:
    """One that reads eight at once keeps its share, also counting what still lies there."""
    for _ in range(7):
        store.submit(new_job())
    assert trio[0].turn() == 4
    assert client.xlen(KEYS.queue) == 7
    assert (trio[1].turn(), trio[2].turn()) == (2, 1)


def test_a_job_is_passed_on_a_few_times_at_most(store: JobStore, client: Client, trio: list[Replica]) -> None:
    """One that is told to be empty and does not come holds nothing up."""
    fuller = trio[0]
    fill(store, [fuller], 1)
    ref = new_job()
    store.submit(ref)
    assert [fuller.turn() for _ in range(MOST_HOPS + 1)] == [0] * MOST_HOPS + [1]
    assert store.read(ref.ref).state == "running"
    assert Audit(client, "tiny").run() == []


def test_the_dead_and_those_that_leave_get_nothing(store: JobStore, client: Client, trio: list[Replica]) -> None:
    """Their lease has ended, or they said so."""
    trio[1].registry.retire("rank-4", "life")
    trio[2].sharing.leave(client)
    trio[2].tell()
    assert fill(store, trio[:1], 5) == [5]


@pytest.mark.parametrize("fact", [{"crashes": 1}, {"state": "cancelled"}, {"entry": "1-1"}])
def test_what_is_not_simply_queued_stays(
    store: JobStore, client: Client, trio: list[Replica], fact: dict[str, str | int]
) -> None:
    """A job on trial is begun with care where it is; one that has gone elsewhere is found to be so."""
    fill(store, trio[:1], 1)
    job = new_job()
    store.submit(job)
    entries = trio[0].delivery.read(4, 10)
    before = client.hgetall(KEYS.job(job.ref.token))
    client.hset(KEYS.job(job.ref.token), mapping=fact)
    assert trio[0].keeps(entries) == entries
    client.hset(KEYS.job(job.ref.token), mapping=before)
    client.hdel(KEYS.job(job.ref.token), "crashes")
    trio[0].delivery.give_back(entries)
    trio[1].turn()


def test_alone_nothing_is_told_or_asked(store: JobStore, client: Client, trio: list[Replica]) -> None:
    """One replica pays nothing for the sake of others."""
    only = trio[0]
    client.delete(KEYS.load)
    only.sharing.has_others = lambda: False
    assert fill(store, [only], 3) == [3]
    assert not client.exists(KEYS.load)


def test_an_entry_with_wild_hops_is_read(store: JobStore, client: Client, trio: list[Replica]) -> None:
    """Anybody can add entries to a stream."""
    fill(store, trio[:1], 1)
    as_if_ranks_waited(client)
    for hops in ("-1", "x", "9" * 400, "²"):
        job = new_job()
        store.submit(job)
        ((entry, _),) = client.xrevrange(KEYS.queue, count=1)
        client.xdel(KEYS.queue, entry)
        fresh = client.xadd(KEYS.queue, {"job": job.ref.token, "hops": hops})
        client.hset(KEYS.job(job.ref.token), "entry", fresh)
    assert sum(replica.turn() for _ in range(4) for replica in trio) == 4
    assert client.xpending(KEYS.queue, GROUP)["pending"] == 5


@pytest.mark.parametrize("is_back", [True, False])
def test_what_a_former_life_told_counts_no_more(
    store: JobStore, client: Client, trio: list[Replica], *, is_back: bool
) -> None:
    """A replica was killed, and loads again or does not come back: its place is another one's now, and what it told
    goes. So does what one told that has left."""
    keeper, killed = trio[:2]
    keeper.sharing.leave(client)
    trio[2].registry.retire(trio[2].delivery.rank, "life")
    assert client.hkeys(KEYS.load) == [killed.delivery.rank.encode()]
    if is_back:
        client.delete(KEYS.rank(killed.delivery.rank))
        assert killed.registry.beat(killed.delivery.rank, "next", lease_ms=60_000, facts={"state": "loading"})
    else:
        client.zadd(KEYS.ranks, {killed.delivery.rank: 1})
        assert keeper.registry.beat(keeper.delivery.rank, "life", lease_ms=60_000, facts={})
    assert not client.exists(KEYS.load)
    for _ in range(2):
        store.submit(new_job())
        assert keeper.turn() == 1


def test_what_was_forgotten_is_told_again(client: Client, trio: list[Replica]) -> None:
    """Though nothing has changed; not each time."""
    client.delete(KEYS.load)
    trio[0].tell()
    assert not client.exists(KEYS.load)
    trio[0].sharing._tell_again_s -= TELL_AGAIN_S
    trio[0].tell()
    assert client.hlen(KEYS.load) == 1


def test_choices_count(store: JobStore, client: Client, trio: list[Replica]) -> None:
    """Two jobs of four choices each: the first fills a replica of four slots, so the second goes to one with room."""
    other, keeper = trio[:2]
    trio[2].sharing.leave(client)
    for _ in range(2):
        store.submit(new_job())
        assert any(other.turn() for _ in range(MOST_HOPS + 1))
    as_if_ranks_waited(client)
    for _ in range(2):
        store.submit(new_job(n=4))
    client.delete(KEYS.hungry)
    assert (keeper.turn(), other.turn()) == (1, 1)
    for replica in (keeper, other):
        while replica.held:
            handout = replica.held.pop()
            ended = Write(handout.lease, 0, (), completed(*["x"] * handout.n))
            assert replica.delivery.write([ended])[0].code == "ok"

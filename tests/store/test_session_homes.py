"""How turns of a session come to the same replica: who gives a job back for whom, and when somebody else serves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pool.rules.affinity import home_of
from pool.store.audit import Audit
from pool.store.connection import Client
from pool.store.flows import session_of
from pool.store.handouts import Entry
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.nodes import nodes
from pool.store.rebuilding import heal
from pool.store.scripts import script
from pool.store.sharing import FARTHEST, MOST_RETURNS, REMEMBERED, Sharing
from tests.builders import as_if_ranks_waited, new_job, sweeper, swept_steadily
from tests.replicas import Replica

KEYS = ModelKeys("tiny:0")
SLOTS = 4
Fleet = dict[str, Replica]


@pytest.fixture
def fleet(redis_url: str, client: Client) -> Iterator[Fleet]:
    """Three replicas of four slots, by rank; what they hold at the end of the test ends."""
    replicas = {rank: Replica(redis_url, client, rank, SLOTS) for rank in ("rank-a", "rank-b", "rank-c")}
    yield replicas
    for replica in replicas.values():
        replica.end(len(replica.held))
        replica.delivery.close()


def session_at(fleet: Fleet, rank: str) -> str:
    """A session whose home is this rank."""
    digits = (session_of("default", f"chat-{number}") for number in range(100))
    return next(session for session in digits if home_of(session, [*fleet]) == rank)


def submitted(store: JobStore, session: str, **fields: Any) -> str:
    """A job of this session; its token."""
    job = new_job(session=session, **fields)
    store.submit(job)
    return job.ref.token


def served(fleet: Fleet, *line: str) -> tuple[str, int]:
    """Have these ranks look in turn, as blocked readers do, until one begins the one job that is there; which that was,
    and how many gave it back."""
    for looks in range(10 * len(line)):
        rank = line[looks % len(line)]
        if fleet[rank].turn():
            return rank, looks
    raise AssertionError("nobody begins the job")


def end_all(fleet: Fleet) -> None:
    """What runs ends."""
    for replica in fleet.values():
        replica.end(len(replica.held))


def test_turns_come_home_whoever_reads_them_first(store: JobStore, client: Client, fleet: Fleet) -> None:
    """Also when others are emptier; straight from a lane as well as past it. Beyond the bound the next one serves."""
    for home in fleet:
        first, second = [rank for rank in fleet if rank != home]
        for is_awaited in (True, False):
            if is_awaited:
                as_if_ranks_waited(client)
            submitted(store, session_at(fleet, home))
            client.delete(KEYS.hungry)
            assert served(fleet, first, second, home) == (home, 2)
            assert len(fleet[first].held + fleet[second].held) == 0
        # Half of its slots are taken, and nobody else has anything.
        submitted(store, session_at(fleet, home))
        assert served(fleet, home, first, second)[0] != home
        end_all(fleet)
    assert Audit(client, "tiny").run() == []


def test_what_is_read_at_once_is_parted(store: JobStore, fleet: Fleet) -> None:
    """Each goes where it belongs: what is its own a replica begins, though others are emptier."""
    for home in fleet:
        submitted(store, session_at(fleet, home))
    assert [fleet[rank].turn() for rank in fleet] == [1, 1, 1]


def test_what_is_kept_counts_for_the_rest(store: JobStore, fleet: Fleet) -> None:
    """Of a read: with two turns a replica is fuller than others, and gives a plain job back."""
    for _ in range(2):
        submitted(store, session_at(fleet, "rank-a"))
    store.submit(new_job())
    assert [fleet[rank].turn() for rank in fleet] == [2, 1, 0]


def test_a_replica_knows_its_own_load_best(store: JobStore, fleet: Fleet) -> None:
    """What it has told may be older."""
    reader = fleet["rank-a"]
    submitted(store, session_at(fleet, "rank-a"))
    entries = reader.delivery.read(1, 10)
    assert reader.sharing.kept(reader.delivery.reader, entries, SLOTS - 1, SLOTS) == []
    served(fleet, "rank-b", "rank-c")


def test_a_full_home_delays_nobody(store: JobStore, fleet: Fleet) -> None:
    """The next on the ring serves; of a fleet of which one replica has room, that one, at once."""
    session = session_at(fleet, "rank-a")
    following = home_of(session, ["rank-b", "rank-c"])
    other = "rank-c" if following == "rank-b" else "rank-b"
    fleet["rank-a"].sharing.tell(fleet["rank-a"].delivery.writer, SLOTS, SLOTS)
    submitted(store, session)
    assert served(fleet, other, str(following)) == (following, 1)
    fleet[str(following)].sharing.tell(fleet["rank-a"].delivery.writer, SLOTS, SLOTS)
    submitted(store, session)
    assert served(fleet, other) == (other, 0)


@pytest.mark.parametrize("line", [("rank-b",), ("rank-b", "rank-c")])
def test_a_home_that_does_not_come_holds_nothing_up(
    store: JobStore, client: Client, fleet: Fleet, line: tuple[str, ...]
) -> None:
    """It is told to be empty, and is dead or stopped: nobody gives the job back more than twice. The next turn
    neither."""
    for _ in range(2):
        token = submitted(store, session_at(fleet, "rank-a"))
        _, looks = served(fleet, *line)
        assert looks == MOST_RETURNS * len(line)
        assert client.hget(KEYS.job(token), "state") == b"running"
        end_all(fleet)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_home_that_has_gone_moves_its_own_sessions(
    store: JobStore, client: Client, fleet: Fleet, *, is_lost: bool
) -> None:
    """At once, its lease over or given up: its place is the next one's. Sessions of others stay where they are."""
    sessions = {home: session_at(fleet, home) for home in fleet}
    if is_lost:
        client.zadd(KEYS.ranks, {"rank-a": 1})
    else:
        fleet["rank-a"].registry.retire("rank-a", "life")
    following = str(home_of(sessions["rank-a"], ["rank-b", "rank-c"]))
    for session, home in ((sessions["rank-a"], following), (sessions["rank-b"], "rank-b")):
        other = "rank-c" if home == "rank-b" else "rank-b"
        submitted(store, session)
        assert served(fleet, other, home) == (home, 1)
        end_all(fleet)


def test_a_session_goes_with_its_job(store: JobStore, client: Client, fleet: Fleet) -> None:
    """Through a lane, a hand-over, a return unbegun, a return of what had begun, a lost worker and a lost stream."""
    reader, session = fleet["rank-a"].delivery, session_at(fleet, "rank-b")

    def read() -> Entry:
        (entry,) = reader.read(1, 10)
        assert entry.session == session
        return entry

    submitted(store, session, inflight_cap=3, weight=2)
    entry = read()
    assert fleet["rank-a"].keeps([entry]) == []
    entry = read()
    reader.give_back([entry])
    (handout,) = reader.take(1, 10).handouts
    reader.hand_back([handout.lease])
    (handout,) = reader.take(1, 10).handouts
    swept_steadily(client)
    client.zadd(KEYS.leases, {handout.lease.token: 1})
    sweeper(client).sweep("tiny")
    read()
    client.delete(KEYS.queue)
    heal(client, KEYS)
    entry = read()
    fleet["rank-a"].held += reader.take(1, 10).handouts
    (found,) = reader.begin([entry], alone=2)
    fleet["rank-a"].held.append(found)  # type: ignore[arg-type] # it is no trial
    assert client.hget(KEYS.job(entry.token), "session") == session.encode()
    assert Audit(client, "tiny").run() == []


def test_what_has_come_far_is_as_without_a_session(store: JobStore, client: Client, fleet: Fleet) -> None:
    """However many replicas there are, it does not go round for ever."""
    submitted(store, session_at(fleet, "rank-a"))
    reader = fleet["rank-b"]
    (entry,) = reader.delivery.read(1, 10)
    entry.hops = FARTHEST
    assert reader.keeps([entry]) == [entry]
    entry.hops = FARTHEST - 1
    assert reader.keeps([entry]) == []
    assert served(fleet, "rank-a") == ("rank-a", 0)
    assert Audit(client, "tiny").run() == []


def test_jobs_without_a_session_cost_what_they_did(store: JobStore, client: Client, fleet: Fleet) -> None:
    """An empty replica that reads one asks nothing, and else one script is run, beside those with sessions too."""

    def scripts() -> int:
        return sum(node.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"] for node in nodes(client))

    reader = fleet["rank-a"]
    client.script_load(script("share").source)
    store.submit(new_job())
    entries = reader.delivery.read(1, 10)
    before = scripts()
    assert reader.keeps(entries) == entries
    assert scripts() == before
    reader.sharing.kept(client, entries, 1, SLOTS)
    assert scripts() == before + 1
    assert not client.hexists(KEYS.job(entries[0].token), "session")
    (there,) = client.xrange(KEYS.queue)
    assert set(there[1]) == {b"job", b"guess", b"hops"}
    served(fleet, "rank-b")


def test_plain_jobs_fill_evenly_beside_those_of_sessions(store: JobStore, fleet: Fleet) -> None:
    """What a session brings counts like anything else."""
    for _ in range(2):
        submitted(store, session_at(fleet, "rank-a"))
        assert served(fleet, "rank-a")[0] == "rank-a"
    for _ in range(4):
        store.submit(new_job())
        served(fleet, "rank-a", "rank-b", "rank-c")
    assert [len(replica.held) for replica in fleet.values()] == [2, 2, 2]


def test_a_wild_session_of_an_entry_is_none(store: JobStore, client: Client, fleet: Fleet) -> None:
    """Anybody can add entries to a stream."""
    as_if_ranks_waited(client)
    for session in ("x", "A" * 16, "0" * 17, "²" * 16, ""):
        store.submit(job := new_job())
        ((entry, _),) = client.xrevrange(KEYS.queue, count=1)
        client.xdel(KEYS.queue, entry)
        fresh = client.xadd(KEYS.queue, {"job": job.ref.token, "guess": 1, "session": session})
        client.hset(KEYS.job(job.ref.token), "entry", fresh)
        (found,) = fleet["rank-a"].delivery.read(1, 10)
        assert found.session == ""
        fleet["rank-a"].delivery.give_back([found])
        served(fleet, "rank-a", "rank-b", "rank-c")


def test_what_a_replica_remembers_is_bounded(fleet: Fleet) -> None:
    """The oldest is forgotten first."""
    sharing: Sharing = fleet["rank-a"].sharing
    sharing._remember(Entry("1-1", str(number), "") for number in range(REMEMBERED + 5))
    assert (len(sharing._returns), "4" in sharing._returns, "5" in sharing._returns) == (REMEMBERED, False, True)


@pytest.mark.parametrize(("tenant", "session"), [("a", "b:c"), ("a:b", "c"), ("other", "\ud800"), ("", "x" * 256)])
def test_a_session_is_stored_as_digits(tenant: str, session: str) -> None:
    """Of its own tenant: nobody else's session is alike."""
    found = session_of(tenant, session)
    assert len(found) == 16 and int(found, 16) >= 0
    assert found != session_of(tenant + ":", session)

"""The workers' side of the store: who may run a job, and what an old fence can still do (nothing)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Handout, Lease, Write, failed
from pool.store.jobs import JobStore
from pool.store.keys import GROUP, ModelKeys
from pool.store.log import LogEntry, pack, replay_of, unpack
from pool.store.running import run
from pool.store.scripts import script
from tests.builders import as_if_ranks_waited, completed, delivery, entry, new_job


@pytest.fixture
def running(store: JobStore, rank_a: Delivery) -> Handout:
    """A job begun by rank a."""
    store.submit(new_job(n=2, tenant="somebody"))
    (handout,) = rank_a.take(1, 10).handouts
    return handout


def end(rank: Delivery, handout: Handout, at: int = 0) -> None:
    """End a job, so that no test leaves one behind."""
    assert rank.write([Write(handout.lease, at, (), completed("x"))])[0].code == "ok"


def test_a_worker_reads_only_what_fits(store: JobStore, rank_a: Delivery, rank_b: Delivery) -> None:
    """Room 2 of 3 queued jobs: two go to one rank, the third stays for the other."""
    for _ in range(3):
        store.submit(new_job())
    first, second = rank_a.take(2, 10).handouts
    (third,) = rank_b.take(2, 10).handouts
    assert rank_a.take(1, 10).handouts == []
    for rank, handout in ((rank_a, first), (rank_a, second), (rank_b, third)):
        end(rank, handout)


def test_a_handout_carries_what_the_runner_needs(rank_a: Delivery, running: Handout) -> None:
    """Prompt, seed, choices, whose it is; the first attempt has nothing to replay."""
    assert (running.prompt_tokens, running.seed, running.n, running.lease.attempt) == (3, 7, 2, 1)
    assert running.tenant == "somebody"
    assert (running.logged, running.replay) == (0, ((), ()))
    end(rank_a, running)


def test_only_the_owner_of_the_entry_begins(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """A rank that did not read the entry cannot begin the job, and a lease refuses everybody, until the sweep has ended
    it: also when it has run out. Only its own nonce begins again."""
    job = new_job()
    as_if_ranks_waited(client)
    store.submit(job)
    keys = ModelKeys("tiny:0")
    ((_, ((entry_id, _),)),) = client.xreadgroup(GROUP, "rank-a", {keys.queue: ">"}, count=1)

    def begin(rank: str, nonce: str = "n1") -> bytes:
        command = script("begin")(job=keys.job(job.ref.token), queue=keys.queue, leases=keys.leases,
        timers=keys.timers, model=keys.model,
        token=job.ref.token,
                                  entry=entry_id, rank=rank, nonce=nonce, guess=1, lease=3000, alone=0)  # fmt: skip
        return bytes(run(client, command)[0])

    assert begin("rank-b") == b"not-owner"
    assert begin("rank-a") == b"ok"
    assert begin("rank-a", "n2") == b"leased"
    client.zadd(keys.leases, {job.ref.token: 1})
    assert begin("rank-a", "n2") == b"leased"
    assert begin("rank-a") == b"ok"
    assert client.zscore(keys.leases, job.ref.token) > 1_000_000
    assert rank_a.write([Write(Lease(job.ref.token, 1, "n1"), 0, (), completed("x"))])[0].code == "ok"


def test_a_begin_whose_answer_got_lost_may_be_repeated(store: JobStore, rank_a: Delivery) -> None:
    """The same entries again, whether or not the server had begun them: one attempt each, at no cost to the job."""
    refs = [new_job().ref for _ in range(3)]
    for ref in refs:
        store.submit(new_job(ref=ref))
    entries = rank_a.read(3, 10)
    lost = [found for found in rank_a.begin(entries[:2]) if isinstance(found, Handout)]
    again = [found for found in rank_a.begin(entries) if isinstance(found, Handout)]
    assert [handout.lease for handout in lost] == [handout.lease for handout in again[:2]]
    assert [handout.lease.attempt for handout in again] == [1, 1, 1]
    for handout in again:
        end(rank_a, handout)


def test_unbegun_entries_are_given_back_at_once(store: JobStore, rank_a: Delivery, rank_b: Delivery) -> None:
    """An entry that was only read, and one whose begin was never answered, go to another rank without waiting for a
    lease. One that another fence has begun stays where it is."""
    for _ in range(3):
        store.submit(new_job())
    read, unanswered, begun = rank_a.read(3, 10)
    list(rank_a.begin([unanswered]))
    (kept,) = [found for found in rank_a.begin([begun]) if isinstance(found, Handout)]
    rank_a.give_back([read, unanswered, replace(begun, nonce="0000000000000000")])
    taken = rank_b.take(3, 10).handouts
    assert {handout.lease.token for handout in taken} == {read.token, unanswered.token}
    end(rank_a, kept)
    for handout in taken:
        end(rank_b, handout)


def test_entries_lost_on_the_way_are_found_on_the_next_connection(
    store: JobStore, rank_a: Delivery, redis_url: str, client: Client
) -> None:
    """A read's reply never came: on its next connection the rank finds the entry in its pending list and begins it,
    and leaves alone what it runs already."""
    store.submit(new_job())
    (running,) = rank_a.take(1, 10).handouts
    lost = new_job()
    as_if_ranks_waited(client)
    store.submit(lost)
    client.xreadgroup(GROUP, rank_a.rank, {rank_a.keys.queue: ">"}, count=1)
    reconnected = delivery(redis_url, rank_a.rank)
    (found,) = reconnected.take(2, 10).handouts
    assert (found.lease.token, found.lease.attempt) == (lost.ref.token, 1)
    assert rank_a.renew([running.lease])[0].code == "ok"
    end(rank_a, running)
    end(reconnected, found)
    for each in (reconnected.reader, reconnected.writer):
        each.connection_pool.disconnect()


def test_appends_are_idempotent_and_gapless(rank_a: Delivery, running: Handout, client: Client) -> None:
    """A repeat is a no-op, a gap or an overlap answers the log's end; entries of both choices keep one numbering."""
    first = Write(running.lease, 0, (entry(0, 5, 6), entry(2, 9, choice=1)))
    assert rank_a.write([first])[0].code == "ok"
    again = rank_a.write([first])[0]
    assert (again.code, again.log_end) == ("old", 3)
    gap = rank_a.write([Write(running.lease, 7, (entry(7, 1),))])[0]
    assert (gap.code, gap.log_end) == ("resend", 3)
    overlap = rank_a.write([Write(running.lease, 2, (entry(2, 9, 10),))])[0]
    assert (overlap.code, overlap.log_end) == ("resend", 3)
    assert client.llen(ModelKeys("tiny:0").log(running.lease.token)) == 2
    gapped_end = rank_a.write([Write(running.lease, 9, (), completed("x"))])[0]
    assert (gapped_end.code, gapped_end.log_end) == ("resend", 3)
    end(rank_a, running, at=3)


@pytest.mark.parametrize("fence", [{"attempt": 2}, {"attempt": 0}, {"nonce": "0000000000000000"}])
def test_an_old_fence_changes_nothing(rank_a: Delivery, running: Handout, fence: dict[str, Any]) -> None:
    """Append, complete, renew and hand-back with another attempt or nonce are refused."""
    forged = replace(running.lease, **fence)
    assert rank_a.write([Write(forged, 0, (entry(0, 5),))])[0].code == "stale"
    assert rank_a.write([Write(forged, 0, (), completed("x"))])[0].code == "stale"
    assert rank_a.renew([forged])[0].code == "stale"
    assert rank_a.hand_back([forged]) == 0
    end(rank_a, running)


def test_a_hand_back_wakes_a_blocked_reader_and_keeps_the_tokens(
    rank_a: Delivery, rank_b: Delivery, running: Handout
) -> None:
    """The other rank gets the job with its logged tokens, as attempt 2; the first rank's fence is dead."""
    rank_a.write([Write(running.lease, 0, (entry(0, 5, 6, text="ab"), entry(2, 9, choice=1, text="c")))])
    assert rank_a.hand_back([running.lease]) == 1
    (taken,) = rank_b.take(1, 1000).handouts
    assert (taken.lease.attempt, taken.logged, taken.replay) == (2, 3, ((5, 6), (9,)))
    assert rank_a.write([Write(running.lease, 3, (entry(3, 7),))])[0].code == "stale"
    assert rank_a.hand_back([running.lease]) == 0
    end(rank_b, taken, at=3)


def test_renewing_keeps_the_lease_and_the_entry_young(rank_a: Delivery, running: Handout, client: Client) -> None:
    """The lease moves on, the pending entry's idle time restarts, its delivery count does not rise."""
    keys = ModelKeys("tiny:0")
    client.zadd(keys.leases, {running.lease.token: 1})
    assert rank_a.renew([running.lease])[0].code == "ok"
    assert client.zscore(keys.leases, running.lease.token) > 1_000_000
    (pending,) = client.xpending_range(keys.queue, GROUP, "-", "+", 10)
    assert pending["times_delivered"] == 1
    assert pending["consumer"] == b"rank-a"
    end(rank_a, running)


def test_a_failed_job_tells_why(store: JobStore, rank_a: Delivery) -> None:
    """Code and message are in the record; it has no outputs."""
    job = new_job()
    store.submit(job)
    (handout,) = rank_a.take(1, 10).handouts
    rank_a.write([Write(handout.lease, 0, (), failed("engine_error", "The engine failed: OSError."))])
    record = store.read(job.ref)
    assert (record.state, record.error_code, record.error_message) == (
        "failed", "engine_error", "The engine failed: OSError.",
    )  # fmt: skip
    assert record.outputs == ()


def test_a_celery_job_leaves_its_result_to_the_outbox(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """Only jobs that want a Celery result enter the outbox, in the write that ends them."""
    jobs = [new_job(), new_job(celery=True)]
    for job in jobs:
        store.submit(job)
    for handout in rank_a.take(2, 10).handouts:
        end(rank_a, handout)
    outbox = ModelKeys("tiny:0").outbox
    assert client.zrange(outbox, 0, -1) == [jobs[1].ref.token.encode()]
    client.delete(outbox)


def test_log_entries_survive_packing() -> None:
    """Token ids, choice, sequence and any text come back; damaged entries are named."""
    whole = LogEntry(70_000, 15, (0, 49151, 2**31), "ü€😀\n\x00")
    assert unpack(pack(whole)) == whole
    assert unpack(pack(LogEntry(0, 0, (), ""))) == LogEntry(0, 0, (), "")
    with pytest.raises(ValueError, match="damaged"):
        unpack(pack(whole)[:9])
    with pytest.raises(ValueError, match="version 9"):
        unpack(b"\x09" + pack(whole)[1:])
    assert replay_of([entry(0, 1, 2), entry(2, 3, choice=1), entry(3, 4)], 2) == ((1, 2, 4), (3,))

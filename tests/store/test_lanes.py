"""Jobs in lanes on a real server: who comes first, who is woken, what is charged, and what is left after faults. Which
job the rules choose is held by tests/stateful/test_lanes_model.py; here is what lies around them."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from pool.errors import JobNotWaiting, JobUnknown, QueueFull
from pool.rules.fairness import BATCH, INTERACTIVE, NORMAL, Lane
from pool.store.audit import Audit
from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.flows import flow_of, key_of
from pool.store.handouts import Handout, Write
from pool.store.ids import new_ref
from pool.store.jobs import JobStore
from pool.store.keys import GROUP, ModelKeys
from pool.store.lane_positions import BAND, ahead
from pool.store.lane_views import backlog, change_lane
from pool.store.records import NewJob
from pool.store.sweeping import Swept
from tests.builders import (
    as_if_ranks_waited,
    completed,
    delivery,
    job_store,
    new_job,
    sweeper,
    swept_steadily,
)
from tests.waiting import wait_until

KEYS = ModelKeys("tiny:0")
#: Bands of flows of which nothing waits begin behind so many.
LANES_ABOVE = 3


def submitted(store: JobStore, lane: Lane = NORMAL, tenant: str = "default", **fields: object) -> NewJob:
    """A job that waits."""
    job = new_job(lane=lane, tenant=tenant, **fields)
    store.submit(job)
    return job


def tokens(jobs: list[NewJob]) -> list[str]:
    """What hand-outs name them by."""
    return [job.ref.token for job in jobs]


def end(rank: Delivery, handout: Handout) -> None:
    """It completes."""
    assert rank.write([Write(handout.lease, 0, (), completed(*["x"] * handout.n))])[0].code == "ok"


def end_all(store: JobStore, client: Client) -> None:
    """Nothing is left behind, and nothing was wrong."""
    assert Audit(client, "tiny").run() == []
    for token in client.zrange(KEYS.index, 0, -1):
        if b"#" not in token:
            store.cancel(new_ref("responses", "tiny", token=token.decode()))
    assert not client.exists(KEYS.lanes["backlog"], KEYS.queue) or client.xlen(KEYS.queue) == 0


def test_order_is_made_when_a_rank_has_room(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """What came last may go first: an interactive job passes ten of batch; jobs of one key and lane stay in order."""
    low = [submitted(store, BATCH) for _ in range(10)]
    assert [handout.lease.token for handout in rank_a.take(2, 1).handouts] == tokens(low[:2])
    high = [submitted(store, INTERACTIVE) for _ in range(2)]
    middle = submitted(store)
    found = [handout.lease.token for _ in range(3) for handout in rank_a.take(2, 1).handouts]
    assert found == tokens([*high, middle, *low[2:5]])
    assert client.xlen(KEYS.queue) == 8, "the stream holds what runs"
    end_all(store, client)


def test_keys_of_a_lane_take_turns(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """A flood of one does not stand before another's single job."""
    flood = [submitted(store, tenant="flood") for _ in range(20)]
    light = submitted(store, tenant="light")
    found = [handout.lease.token for handout in rank_a.take(3, 1).handouts]
    assert light.ref.token in found[:2]
    assert found[0] in tokens(flood[:1]) or found[1] in tokens(flood[:1])
    end_all(store, client)


def test_fairness_keys_of_one_tenant_are_keys_of_their_own(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """And never another tenant's, whatever they are called."""
    assert len({key_of("a", ""), key_of("a", "b"), key_of("b", "a"), key_of("b", "")}) == 4
    assert key_of("a", "a") == key_of("a", "")
    for _ in range(5):
        submitted(store, tenant="gateway", fairness="one")
    other = submitted(store, tenant="gateway", fairness="two")
    assert other.ref.token in [handout.lease.token for handout in rank_a.take(2, 1).handouts]
    end_all(store, client)


def test_slot_time_is_shared_by_weight(client: Client, rank_a: Delivery) -> None:
    """Weights 3:2:1, all backlogged, the lightest with jobs ten times as long: shares of slot time within a tenth. Each
    job is made to have taken its time."""
    store = job_store(client, cap=1000)
    weights, length_ms = {"a": 3, "b": 2, "c": 1}, {"a": 100, "b": 100, "c": 1000}
    had_ms: Counter[str] = Counter()
    running: list[tuple[int, Handout]] = []
    now_ms = 0
    for tenant, weight in weights.items():
        for _ in range(150 if tenant != "c" else 15):
            submitted(store, tenant=tenant, weight=weight)
    while sum(had_ms.values()) < 24_000:
        for handout in rank_a.take(4 - len(running), 1).handouts if len(running) < 4 else ():
            running.append((now_ms + length_ms[handout.tenant], handout))
        running.sort(key=lambda each: each[0])
        now_ms, done = running.pop(0)
        client.hset(KEYS.job(done.lease.token), mapping={"begun_ms": 2**50, "used_ms": length_ms[done.tenant]})
        end(rank_a, done)
        had_ms[done.tenant] += length_ms[done.tenant]
    whole = sum(had_ms.values())
    for tenant, weight in weights.items():
        assert had_ms[tenant] / whole == pytest.approx(weight / 6, rel=0.1)
    end_all(store, client)


def test_every_way_to_end_is_charged_but_what_never_began(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """Cancelled and failed as completed; a hand-back adds to what its job took, and is not charged twice."""
    anchor = submitted(store, tenant="anchor")
    (kept,) = rank_a.take(1, 1).handouts
    flow = flow_of(NORMAL, "a", "")

    def charged() -> float:
        return (client.zscore(KEYS.lanes["flows"], flow) or 0) % BAND

    waits = submitted(store, tenant="a")
    before = charged()
    (handout,) = rank_a.take(1, 1).handouts
    assert charged() == before + 1000, "a guess"
    client.hset(KEYS.job(waits.ref.token), "begun_ms", 0)
    rank_a.hand_back([handout.lease])
    used = int(client.hget(KEYS.job(waits.ref.token), "used_ms"))
    assert used > 1_000_000
    client.hset(KEYS.job(waits.ref.token), "used_ms", 300)
    (again,) = rank_a.take(1, 1).handouts
    client.hset(KEYS.job(waits.ref.token), "begun_ms", 2**50)
    store.cancel(waits.ref)
    assert charged() == pytest.approx(before + 300, abs=0.2)
    never = submitted(store, tenant="a")
    store.cancel(never.ref)
    assert charged() == pytest.approx(before + 300, abs=0.2)
    assert rank_a.renew([again.lease])[0].code == "stale"
    end(rank_a, kept)
    assert store.read(anchor.ref).state == "completed"


def test_a_submit_wakes_a_rank_that_waits(store: JobStore, redis_url: str, client: Client) -> None:
    """Two ranks block; each of two submits wakes one of them, and none waits for its time to be over."""
    ranks = [delivery(redis_url, f"rank-{number}") for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(rank.read, 4, 60_000) for rank in ranks]
        wait_until(lambda: client.zcard(KEYS.hungry) == 2, description="both to wait")
        wait_until(lambda: client.info("clients")["blocked_clients"] == 2, description="both to be blocked")
        jobs = [submitted(store) for _ in range(2)]
        found = [[entry.token for entry in read.result(timeout=20)] for read in reads]
    assert sorted(found) == sorted([token] for token in tokens(jobs))
    # What they do next says that they wait no longer.
    for rank, read in zip(ranks, reads, strict=True):
        assert len(list(rank.begin(read.result()))) == 1
    assert client.zcard(KEYS.hungry) == 0
    end_all(store, client)
    for rank in ranks:
        rank.close()


def test_no_rank_waits_while_work_does(store: JobStore, client: Client, rank_a: Delivery, redis_url: str) -> None:
    """Rank a has found nothing and is about to block; what a submit moved for it is read by rank b, while another job
    waits. Then that one is moved for rank a at once."""
    rank_b = delivery(redis_url, "rank-b")
    rank_a.heal()
    assert rank_a.read(1, 1) == []
    jobs = [submitted(store) for _ in range(2)]
    assert client.xlen(KEYS.queue) == 1, "one rank waits, one job is moved"
    assert [entry.token for entry in rank_b.read(1, 1)] == tokens(jobs[:1])
    assert client.xlen(KEYS.queue) == 2
    assert client.xreadgroup(GROUP, rank_a.rank, {KEYS.queue: ">"}, count=1)
    end_all(store, client)
    rank_b.close()


def test_a_dead_rank_that_waited_costs_order_and_no_job(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """A job is moved for it, and lies before a better one; whoever comes reads both."""
    rank_a.heal()
    client.zadd(KEYS.hungry, {"dead": 2**50})
    client.pexpire(KEYS.hungry, 60_000)
    low, high = submitted(store, BATCH), submitted(store, INTERACTIVE)
    found = [handout.lease.token for _ in range(2) for handout in rank_a.take(1, 1).handouts]
    assert found == tokens([low, high])
    end_all(store, client)


@pytest.mark.parametrize("n", [1, 3])
def test_the_bound_of_a_key_is_exact_under_parallel_submits(client: Client, n: int) -> None:
    """Twenty at once: as many as fit are accepted, choices counted, and the rest leave no key."""
    store = job_store(client, cap=1000)
    jobs = [new_job(tenant="a", tenant_cap=7, n=n) for _ in range(20)]
    start = threading.Barrier(20)

    def submit(job: NewJob) -> bool:
        start.wait()
        try:
            store.submit(job)
        except QueueFull as full:
            assert full.code == "fairness_key_queue_full"
            return False
        return True

    with ThreadPoolExecutor(20) as pool:
        accepted = list(pool.map(submit, jobs))
    assert sum(accepted) == 7 // n
    left = [job for job, is_in in zip(jobs, accepted, strict=True) if not is_in]
    assert not any(client.exists(KEYS.job(job.ref.token)) for job in left)
    assert client.zcard(KEYS.lanes["backlog"]) == 7 // n
    end_all(store, client)


def test_what_comes_back_goes_first(store: JobStore, client: Client, rank_a: Delivery, rank_b: Delivery) -> None:
    """A batch job that was handed back has had its turn: it passes what waits in higher lanes."""
    low = submitted(store, BATCH)
    (handout,) = rank_a.take(1, 1).handouts
    high = submitted(store, INTERACTIVE)
    rank_a.hand_back([handout.lease])
    assert [handout.lease.token for handout in rank_b.take(2, 1).handouts] == tokens([low, high])
    end_all(store, client)


def test_a_rank_killed_between_move_and_read_loses_nothing(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """Its entries lie in its pending list, read and not begun: after a lease they go back, at no cost."""
    jobs = [submitted(store) for _ in range(2)]
    entries = rank_a.read(2, 1)
    for entry in entries:
        client.xclaim(KEYS.queue, GROUP, rank_a.rank, 0, [entry.id], idle=60_000, justid=True)
    swept_steadily(client)
    assert sweeper(client).sweep("tiny") == Swept(requeued=2)
    assert Audit(client, "tiny").run() == []
    assert [handout.lease.attempt for handout in rank_a.take(2, 1).handouts] == [1, 1]
    assert len(jobs) == 2
    end_all(store, client)


def test_lost_lanes_are_made_again(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """All of their keys are deleted from outside: the sweep finds fewer jobs placed than there are, and has those that
    waited wait again, in their order and lane; one that was moved and not begun gets another entry."""
    jobs = [submitted(store, lane) for lane in (BATCH, NORMAL, INTERACTIVE, NORMAL)]
    (read,) = rank_a.read(1, 1)
    assert read.token == jobs[2].ref.token
    client.delete(*KEYS.lanes.values())
    swept_steadily(client)
    assert sweeper(client).sweep("tiny").requeued >= 3
    rank_a.give_back([read])
    found = [handout.lease.token for handout in rank_a.take(5, 1).handouts]
    assert sorted(found) == sorted(tokens(jobs))
    assert [token for token in found if token != read.token] == tokens([jobs[1], jobs[3], jobs[0]])
    end_all(store, client)


def test_a_turn_whose_record_is_gone_holds_nobody_up(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """It is moved, read and dropped; the next one runs."""
    gone, there = submitted(store), submitted(store)
    client.delete(KEYS.job(gone.ref.token))
    client.zrem(KEYS.index, gone.ref.token)
    client.zrem(KEYS.timers, f"queue:{gone.ref.token}")
    assert [handout.lease.token for handout in rank_a.take(2, 1).handouts] == [there.ref.token]
    assert client.xlen(KEYS.queue) == 1
    end_all(store, client)


def test_time_limits_hold_in_lanes(store: JobStore, client: Client) -> None:
    """A queue timeout and a deadline end a job that waits, by name, and nothing of it stays in its lane."""
    jobs = [submitted(store, BATCH, queue_timeout_ms=1), submitted(store, BATCH, deadline_ms=1)]
    swept_steadily(client)
    ended = sweeper(client)
    wait_until(
        lambda: (
            [ended.sweep("tiny") and store.read(job.ref).error_code for job in jobs]
            == ["queue_timeout", "deadline_exceeded"]
        ),
        description="both to be ended",
    )
    assert not client.exists(KEYS.lanes["backlog"])


def test_a_waiting_job_may_change_lanes(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """It goes where its submit time puts it there; one that had its turn, or that nobody knows, does not change."""
    early, late = submitted(store, BATCH), submitted(store)
    moved = submitted(store, BATCH)
    change_lane(client, store, early.ref, NORMAL)
    change_lane(client, store, moved.ref, INTERACTIVE)
    assert (store.read(moved.ref).lane, store.read(early.ref).lane) == (INTERACTIVE, NORMAL)
    found = [handout.lease.token for handout in rank_a.take(3, 1).handouts]
    assert found == tokens([moved, early, late])
    with pytest.raises(JobNotWaiting, match="running"):
        change_lane(client, store, early.ref, BATCH)
    with pytest.raises(JobUnknown):
        change_lane(client, store, new_ref("responses", "tiny"), BATCH)
    end_all(store, client)


def test_positions_are_of_the_moment(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """Higher lanes, what is before it in its key, as much of other keys; of a moved one, what is unread before it."""
    mine = [submitted(store, tenant="a") for _ in range(3)]
    assert [ahead(client, job.ref) for job in mine] == [0, 1, 2]
    for _ in range(5):
        submitted(store, tenant="b")
    assert [ahead(client, job.ref) for job in mine] == [0, 2, 4]
    submitted(store, INTERACTIVE)
    assert [ahead(client, job.ref) for job in mine] == [1, 3, 5]
    assert len(rank_a.take(20, 1).handouts) == 9
    end_all(store, client)


def test_positions_of_what_was_moved(store: JobStore, client: Client) -> None:
    """What is unread before it; for one that waits, all of that."""
    as_if_ranks_waited(client, count=2)
    jobs = [submitted(store) for _ in range(3)]
    assert [ahead(client, job.ref) for job in jobs] == [0, 1, 2]
    assert client.zcard(KEYS.lanes["backlog"]) == 1
    end_all(store, client)


def test_a_job_that_is_moved_at_once_is_charged_as_any(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """Virtual times, clock, caps: the same as of one that waited and was moved by a take; also when it ends unbegun."""
    seen = []
    for is_awaited in (False, True):
        client.delete(*KEYS.lanes.values())
        if is_awaited:
            as_if_ranks_waited(client)
        jobs = []
        for n, weight, cap in ((1, 1, 0), (2, 4, 3), (3, 1, 0)):
            jobs.append(submitted(store, n=n, weight=weight, inflight_cap=cap))
            if not is_awaited:
                assert len(rank_a.read(1, 1)) == 1
        client.delete(KEYS.hungry)
        facts = dict(client.hgetall(KEYS.lanes["fairness"]))
        seen.append((client.zrange(KEYS.lanes["flows"], 0, -1, withscores=True), facts))
        for job in jobs:
            store.cancel(job.ref)
        seen.append(
            (client.zrange(KEYS.lanes["flows"], 0, -1, withscores=True), client.hgetall(KEYS.lanes["fairness"]))
        )
        assert client.xlen(KEYS.queue) == 0
    assert seen[:2] == seen[2:]
    assert seen[1][0][0][1] % BAND == 0, "nothing began, nothing is charged"


def test_a_thousand_flows_are_remembered(store: JobStore, client: Client) -> None:
    """With more of them the sweep drops those that had least and of which nothing waits."""
    submitted(store, tenant="waits")
    resting = {f"1:{number:016x}": (LANES_ABOVE + 1) * BAND + number for number in range(1200)}
    client.zadd(KEYS.lanes["flows"], resting)
    swept_steadily(client)
    sweep = sweeper(client)
    wait_until(
        lambda: sweep.sweep("tiny") and client.zcard(KEYS.lanes["flows"]) == 1000, description="the rest to be dropped"
    )
    assert client.zscore(KEYS.lanes["flows"], f"1:{200:016x}") is None
    assert client.zscore(KEYS.lanes["flows"], f"1:{1199:016x}") is not None
    assert client.zscore(KEYS.lanes["flows"], flow_of(NORMAL, "waits", "")) < LANES_ABOVE * BAND
    end_all(store, client)


def test_an_operator_sees_lanes_and_keys(store: JobStore, client: Client, rank_a: Delivery) -> None:
    """What waits and since when, what is in flight, weight and virtual time; keys as hashes."""
    for _ in range(3):
        submitted(store, BATCH, tenant="a", weight=2, n=2)
    assert len(rank_a.take(1, 1).handouts) == 1
    (flow,) = backlog(client, "tiny").flows
    assert (flow.lane, flow.key, flow.waiting, flow.in_flight, flow.weight) == (BATCH, key_of("a", ""), 2, 2, 2)
    assert (flow.virtual_ms, flow.guess_ms) == (1000, 1000)
    assert 0 <= flow.oldest_ms < 60_000
    end_all(store, client)

"""What has passed through a model is counted once, by the script that did it; what it holds is looked up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pool.store import scripts
from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Ending, Handout, Write, failed
from pool.store.ids import JobRef
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.rebuilding import rebuild
from pool.store.records import Output
from pool.store.running import run_many
from pool.store.scripts import script
from pool.store.totals import ADD_UP_FROM, BOUNDS_MS, Survey, Totals, add_up, surveys
from tests.builders import completed, entry, give_up, new_job, sweeper, swept_steadily

KEYS = ModelKeys("tiny:0")


def survey(client: Client) -> Survey:
    """Of the model."""
    return surveys(client, ["tiny"])["tiny"]


def totals(client: Client) -> Totals:
    """Of the model."""
    return survey(client).totals


def wipe(client: Client) -> None:
    """Nothing is left of jobs that have not ended, and of dead letters."""
    client.flushall()


def begun(store: JobStore, rank: Delivery, **fields: Any) -> Handout:
    """A job that the rank has begun."""
    store.submit(new_job(**fields))
    (handout,) = rank.take(1, 100).handouts
    return handout


def test_a_model_that_was_never_used_has_nothing(client: Client) -> None:
    """Every figure is there, and 0."""
    found = survey(client)
    assert (found.queued, found.running, found.oldest_ms, found.dead_letters) == (0, 0, 0, 0)
    assert found.totals == Totals(
        0,
        {"cancelled": 0, "completed": 0, "failed": 0, "incomplete": 0},
        {},
        {"lost": 0, "handed_back": 0, "unbegun": 0, "rebuilt": 0},
        0,
        0,
        0,
        found.totals.wait,
        found.totals.run,
    )
    assert sum(found.totals.wait.counts) == sum(found.totals.run.counts) == 0


def test_depth_counts_jobs_and_not_their_choices(client: Client, store: JobStore, rank_a: Delivery) -> None:
    """A job of four choices is one, queued or running."""
    running = begun(store, rank_a, n=4)
    store.submit(new_job(n=3))
    assert (survey(client).queued, survey(client).running) == (1, 1)
    assert totals(client).submitted == 2
    rank_a.write([Write(running.lease, 0, (), completed("a", "b", "c", "d"))])
    assert (survey(client).queued, survey(client).running) == (1, 0)
    assert totals(client).submitted == 2
    wipe(client)


def test_the_oldest_age_is_that_of_a_job_that_waits(client: Client, store: JobStore, rank_a: Delivery) -> None:
    """Running jobs are older and do not count."""
    for _ in range(3):
        begun(store, rank_a)
    assert survey(client).oldest_ms == 0
    waiting = [new_job() for _ in range(3)]
    for job in waiting:
        store.submit(job)
    at_ms = survey(client).at_ms
    for index, token in enumerate(client.zrange(KEYS.index, 0, -1)):
        age_ms = 9000 if token not in [job.ref.token.encode() for job in waiting] else 5000 - index
        client.zadd(KEYS.index, {token: at_ms - age_ms})
    found = survey(client)
    assert 5000 - 5 <= found.oldest_ms - (found.at_ms - at_ms) <= 5000
    wipe(client)


@pytest.mark.parametrize("added_up", [False, True])
def test_each_end_is_counted_by_state_with_its_tokens(
    client: Client, store: JobStore, rank_a: Delivery, added_up: bool
) -> None:
    """Whether the tally was added up meanwhile makes no difference."""
    long = Ending("incomplete", (Output("ab", "length", 2),), prompt_tokens=3)
    for ending, tokens in ((completed("x"), (5,)), (long, (6, 7)), (failed("engine_error", "No."), ())):
        handout = begun(store, rank_a)
        entries = tuple(entry(seq, token) for seq, token in enumerate(tokens))
        rank_a.write([Write(handout.lease, 0, entries, ending)])
    partly = begun(store, rank_a)
    rank_a.write([Write(partly.lease, 0, (entry(0, 8, 9),))])
    unbegun = new_job()
    store.submit(unbegun)
    for token in (partly.lease.token, unbegun.ref.token):
        store.cancel(JobRef("resp", "tiny", 0, token))
    if added_up:
        add_up(client, KEYS)
        assert client.llen(KEYS.tally) == 0
    found = totals(client)
    assert found.ended == {"cancelled": 2, "completed": 1, "failed": 1, "incomplete": 1}
    assert found.failed == {"engine_error": 1}
    assert found.submitted == 5
    # The one that never began has cost no prompt.
    assert (found.prompt_tokens, found.output_tokens) == (4 * 3, 1 + 2 + 2)
    assert sum(found.wait.counts) == sum(found.run.counts) == 4


def test_an_end_that_is_told_twice_counts_once(client: Client, store: JobStore, rank_a: Delivery) -> None:
    """A repeated completion, and a cancel that comes too late."""
    handout = begun(store, rank_a)
    write = Write(handout.lease, 0, (), completed("x"))
    assert [rank_a.write([write])[0].code for _ in range(2)] == ["ok", "stale"]
    assert sum(totals(client).ended.values()) == totals(client).submitted == 1


def test_waits_and_runs_fall_into_their_buckets(client: Client, store: JobStore, rank_a: Delivery) -> None:
    """A bound belongs to its bucket; the sums are exact."""
    for wait_ms in (0, 10, 11, 4_000_000):
        handout = begun(store, rank_a)
        started_ms = int(client.hget(KEYS.job(handout.lease.token), "started_ms"))
        client.hset(KEYS.job(handout.lease.token), "created_ms", started_ms - wait_ms)
        rank_a.write([Write(handout.lease, 0, (), completed("x"))])
    wait = totals(client).wait
    assert wait.counts == (2, 1, *(0,) * (len(BOUNDS_MS) - 2), 1)
    assert wait.sum_ms == 4_000_021
    slow = begun(store, rank_a)
    client.hincrby(KEYS.job(slow.lease.token), "started_ms", -7_000_000)
    client.hincrby(KEYS.job(slow.lease.token), "created_ms", -7_000_000)
    rank_a.write([Write(slow.lease, 0, (), completed("x"))])
    assert totals(client).run.counts[-1] == 1
    assert totals(client).run.sum_ms >= 7_000_000


def test_the_script_has_the_same_bounds() -> None:
    """A bucket that only one side knows would be lost."""
    text = (Path(scripts.__file__).parent / "lua" / "lib" / "finish.lua").read_text()
    (listed,) = re.findall(r"BOUNDS_MS = \{([\d, ]+)\}", text)
    assert tuple(map(int, listed.split(", "))) == BOUNDS_MS


def test_requeues_are_counted_by_reason_and_poison_as_a_failure(
    client: Client, store: JobStore, rank_a: Delivery, rank_b: Delivery
) -> None:
    """Each return to the queue once, apart from the job's one end."""
    handout = begun(store, rank_a)
    rank_a.hand_back([handout.lease])
    (again,) = rank_a.take(1, 100).handouts
    swept_steadily(client)
    client.zadd(KEYS.leases, {again.lease.token: 1})
    assert sweeper(client).sweep("tiny").requeued == 1
    rank_b.give_back(rank_b.read(1, 100))
    client.delete(KEYS.queue)
    assert rebuild(client, KEYS) == 1
    assert totals(client).requeued == {"lost": 1, "handed_back": 1, "unbegun": 1, "rebuilt": 1}
    assert (totals(client).submitted, sum(totals(client).ended.values())) == (1, 0)
    store.cancel(JobRef("resp", "tiny", 0, handout.lease.token))
    rank_b.heal()
    store.submit(new_job())
    give_up(client, rank_b)
    found = survey(client)
    assert found.totals.failed == {"poison": 1}
    assert found.dead_letters == 1
    assert found.totals.submitted == sum(found.totals.ended.values()) == 2
    wipe(client)


def test_a_job_whose_record_vanished_is_counted_as_such(client: Client, store: JobStore, rank_a: Delivery) -> None:
    """So that what was submitted never shrinks."""
    job = new_job(n=2)
    store.submit(job)
    client.delete(KEYS.job(job.ref.token), KEYS.queue, KEYS.lanes["backlog"])
    client.zrem(KEYS.timers, f"queue:{job.ref.token}")
    before = totals(client)
    # As two sweeps do at once.
    command = script("reenqueue")(
        job=KEYS.job(job.ref.token), queue=KEYS.queue, index=KEYS.index, leases=KEYS.leases, timers=KEYS.timers,
        tally=KEYS.tally, lanes=KEYS.lanes, token=job.ref.token,
    )  # fmt: skip
    assert run_many(client, [command, command]) == [[b"void"], [b"void"]]
    found = totals(client)
    assert (before.submitted, before.vanished) == (1, 0)
    assert (found.submitted, found.vanished) == (1, 1)
    rank_a.heal()


def test_sweeps_keep_the_tally_short(client: Client, store: JobStore, rank_a: Delivery) -> None:
    """From a hundred lines on they are added up, on every sweep, also while nothing may expire."""
    for _ in range(ADD_UP_FROM):
        handout = begun(store, rank_a)
        assert sweeper(client).sweep("tiny").expired == 0
        assert client.llen(KEYS.tally) < ADD_UP_FROM
        rank_a.write([Write(handout.lease, 0, (), completed("x"))])
    assert client.llen(KEYS.tally) == ADD_UP_FROM
    sweeper(client).sweep("tiny")
    assert client.llen(KEYS.tally) == 0
    assert totals(client).ended["completed"] == ADD_UP_FROM


def test_large_sums_stay_exact(client: Client) -> None:
    """No exponent, no rounding, up to 2^53."""
    client.rpush(KEYS.tally, "output_tokens 900000000000001", "output_tokens 1")
    add_up(client, KEYS)
    client.rpush(KEYS.tally, "output_tokens 5")
    assert totals(client).output_tokens == 900000000000007

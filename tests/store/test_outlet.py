"""The outlet against a real store: nothing is lost or doubled when replies get lost or attempts change hands."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pool.store.connection import Client, connect
from pool.store.delivery import Delivery
from pool.store.handouts import Ending, Handout, failed
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.log import TokenLogprobs, replay_of
from pool.store.nodes import node_of
from pool.store.server import StateServer
from tasks.ports import ChoiceOutput, Failed, Finished, RunnerCapacity, Stopped, Tokens
from tests.builders import LEASE_MS, delivery, job_store, new_job
from tests.waiting import wait_until
from workers.outlet import CONGESTION_TOKENS, FOLLOWED_S, Held, Outlet, spacing_s


class IdleRunner:
    """A runner that generates nothing: the test plays its part. It records what it is told to drop, and drops it only
    when the test takes it out of `live`."""

    def __init__(self) -> None:
        self.live: set[tuple[str, int]] = set()
        self.cancelled: list[tuple[str, int, str]] = []
        self.turns = 0

    def cancel(self, job: str, attempt: int, *, how: Stopped = "cancelled") -> bool:
        """Record it."""
        known = (job, attempt) in self.live
        if known:
            self.cancelled.append((job, attempt, how))
        return known

    def progress(self) -> int:
        """Always healthy."""
        self.turns += 1
        return self.turns

    def capacity(self) -> RunnerCapacity:
        """Nothing in flight."""
        return RunnerCapacity(8, 0)


class Rig:
    """An outlet with its delivery, and what it reported."""

    def __init__(self, delivery: Delivery, **settings: Any) -> None:
        self.delivery = delivery
        self.runner = IdleRunner()
        self.left: list[tuple[str, str, Ending | None]] = []
        defaults = {"flush_idle_ms": 5000, "renew_ms": 60_000, "stall_timeout_s": 60}
        self.outlet = Outlet(delivery, self.runner, on_left=self._left, **defaults | settings)  # type: ignore[arg-type] # as much of a Runner as it uses

    def _left(self, handout: Handout, state: str, ending: Ending | None) -> None:
        self.left.append((handout.lease.token, state, ending))

    def take(self) -> Handout:
        """Begin the next job and hold it."""
        (handout,) = self.delivery.take(1, 100).handouts
        if self.outlet.open(handout):
            self.runner.live.add((handout.lease.token, handout.lease.attempt))
        return handout


@pytest.fixture
def rig(rank_a: Delivery) -> Iterator[Rig]:
    """An outlet that runs."""
    rig = Rig(rank_a)
    rig.outlet.start()
    yield rig
    rig.outlet.stop()


def tokens(handout: Handout, *ids: int, text: str = "x", choice: int = 0) -> Tokens:
    """An event of the runner."""
    return Tokens(handout.lease.token, handout.lease.attempt, choice, ids, text)


def finished(handout: Handout, text: str, count: int) -> Finished:
    """The end of a job of one choice."""
    return Finished(handout.lease.token, handout.lease.attempt, (ChoiceOutput(text, "stop", count),), 3, 0)


def test_the_first_token_is_written_at_once_and_later_ones_wait_unless_watched(store: JobStore, rig: Rig) -> None:
    """Nobody watches: one entry now, the next with the end. Somebody watches: every token that comes later than
    FOLLOWED_S after the one before at once."""
    job, watched = new_job(), new_job(watch="node-1")
    store.submit(job)
    handout = rig.take()
    rig.outlet.deliver([tokens(handout, 5)])
    wait_until(lambda: store.read(job.ref).logged_tokens == 1, description="the first token")
    rig.outlet.deliver([tokens(handout, 6)])
    store.submit(watched)
    other = rig.take()
    for count in (1, 2, 3):
        rig.outlet.deliver([tokens(other, count)])
        wait_until(lambda count=count: store.read(watched.ref).logged_tokens == count, description="a watched token")
    assert store.read(job.ref).logged_tokens == 1
    rig.outlet.deliver([finished(handout, "xx", 2), finished(other, "xxx", 3)])
    wait_until(lambda: len(rig.left) == 2, description="both to end")
    assert [entry.token_ids for entry in store.view(job.ref).entries] == [(5,), (6,)]


def test_logprobs_are_stored_with_their_tokens(store: JobStore, rig: Rig) -> None:
    """Also where tokens of several steps share an entry."""
    job = new_job()
    store.submit(job)
    handout = rig.take()
    lease = handout.lease
    told = [TokenLogprobs(-float(number), ((number, -0.5),)) for number in range(4)]
    for number, each in enumerate(told):
        rig.outlet.deliver([Tokens(lease.token, lease.attempt, 0, (number,), "x", (each,))])
    wait_until(lambda: store.read(job.ref).logged_tokens >= 1, description="the first token")
    rig.outlet.deliver([finished(handout, "xxxx", 4)])
    wait_until(lambda: rig.left, description="the end")
    entries = store.view(job.ref).entries
    assert [each for entry in entries for each in entry.logprobs] == told
    assert all(len(entry.logprobs) == len(entry.token_ids) for entry in entries)


def test_when_a_job_is_due(store: JobStore, rank_a: Delivery) -> None:
    """Its first token and its end at once; later tokens FOLLOWED_S after the last write while somebody follows, and
    else when the oldest has waited for the idle time."""
    job = new_job()
    store.submit(job)
    (handout,) = rank_a.take(1, 100).handouts
    store.cancel(job.ref)
    for watch, due_s in (("node-1", 7.0 + FOLLOWED_S), ("", 9.0 + 0.5)):
        held = Held(handout, next_seq=0, watch=watch)
        assert held.due_s(0.5) == math.inf
        held.add(Tokens(handout.lease.token, handout.lease.attempt, 0, (5,), "x"), now_s=9.0)
        assert held.due_s(0.5) == 0.0
        held.flushed, held.written_s = True, 7.0
        assert held.due_s(0.5) == due_s
        held.ending = failed("engine_error", "x")
        assert held.due_s(0.5) == 0.0


def test_few_followed_jobs_are_written_more_often(store: JobStore, rank_a: Delivery) -> None:
    """What is saved by waiting is the work of many writes: one job that somebody follows is written four times as often
    as each of many."""
    assert [spacing_s(followed) for followed in (1, 2, 4, 100)] == [0.0025, 0.005, 0.01, 0.01]
    job = new_job(watch="node-1")
    store.submit(job)
    (handout,) = rank_a.take(1, 100).handouts
    store.cancel(job.ref)
    held = Held(handout, next_seq=0, watch="node-1")
    held.add(tokens(handout, 5), now_s=9.0)
    held.flushed, held.written_s = True, 7.0
    assert held.due_s(0.5, spacing_s(1)) == 7.0025


def test_a_write_whose_reply_was_lost_is_neither_lost_nor_doubled(store: JobStore, rank_a: Delivery) -> None:
    """It had landed; more tokens came before the retry. The log holds each token once, in order."""
    job = new_job(watch="node-1")
    store.submit(job)
    rig = Rig(rank_a)
    handout = rig.take()
    held = rig.outlet._held[handout.lease.token]
    held.add(Tokens(handout.lease.token, handout.lease.attempt, 0, (5, 6), "ab"), 0.0)
    assert rank_a.write([held.write()])[0].code == "ok"
    rig.outlet.start()
    rig.outlet.deliver([tokens(handout, 7, text="c"), tokens(handout, 8, text="d")])
    wait_until(lambda: store.read(job.ref).logged_tokens == 4, description="the rest to be stored")
    rig.outlet.deliver([finished(handout, "abcd", 4)])
    wait_until(lambda: rig.left, description="the job to end")
    entries = store.view(job.ref).entries
    assert replay_of(entries, 1) == ((5, 6, 7, 8),)
    assert "".join(entry.text for entry in entries) == "abcd"
    rig.outlet.stop()


def test_an_ending_whose_reply_was_lost_still_counts_as_ours(store: JobStore, rank_a: Delivery) -> None:
    """The retry finds the job ended in our own state: it left with its ending, not as lost."""
    job = new_job()
    store.submit(job)
    rig = Rig(rank_a)
    handout = rig.take()
    rig.outlet.deliver([tokens(handout, 5), finished(handout, "x", 1)])
    rig.outlet._gather()
    assert rank_a.write([rig.outlet._held[handout.lease.token].write()])[0].code == "ok"
    rig.outlet.start()
    wait_until(lambda: rig.left, description="the outlet to notice")
    ((_, state, ending),) = rig.left
    assert state == "completed"
    assert ending is not None
    assert rig.runner.cancelled == []
    rig.outlet.stop()


def test_a_cancelled_job_is_dropped_at_the_next_hint(store: JobStore, rig: Rig) -> None:
    """The runner is told, the job leaves as cancelled, and late events of it change nothing."""
    job = new_job()
    store.submit(job)
    handout = rig.take()
    store.cancel(job.ref)
    rig.outlet.nudge()
    wait_until(lambda: rig.left, description="the job to leave")
    assert rig.left == [(job.ref.token, "cancelled", None)]
    assert rig.runner.cancelled == [(job.ref.token, 1, "cancelled")]
    rig.outlet.deliver([tokens(handout, 5), finished(handout, "x", 1)])
    rig.outlet.nudge()
    assert store.read(job.ref).state == "cancelled"


def test_a_job_that_comes_back_replaces_its_former_attempt(store: JobStore, rig: Rig, client: Client) -> None:
    """A rank that lost a job and gets it again drops the old attempt, whose events are no longer its own."""
    job = new_job()
    store.submit(job)
    old = rig.take()
    rig.delivery.hand_back([old.lease])
    new = rig.take()
    assert (new.lease.attempt, rig.runner.cancelled) == (2, [(job.ref.token, 1, "failed")])
    rig.outlet.deliver([tokens(old, 5), tokens(new, 6), finished(new, "x", 1)])
    wait_until(lambda: store.read(job.ref).terminal, description="the job to end")
    assert [entry.token_ids for entry in store.view(job.ref).entries] == [(6,)]
    assert client.xlen(ModelKeys("tiny:0").queue) == 0


class Snapshot:
    """All of genpool's keys at one moment; `restore` makes the server one that lost what came after."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept = {key: client.dump(key) for key in client.scan_iter(match="gp:*")}

    def restore(self) -> None:
        """Go back, in one step."""
        pipe = node_of(self._client, ModelKeys("tiny:0").queue).pipeline()
        for key in self._client.scan_iter(match="gp:*"):
            pipe.delete(key)
        for key, value in self._kept.items():
            pipe.restore(key, 0, value)
        pipe.execute()


def test_a_log_that_lost_stored_tokens_costs_only_the_attempt(store: JobStore, rig: Rig, client: Client) -> None:
    """The server comes back with a shorter log, so the rank cannot fill the gap: the job goes back to the queue, and a
    new attempt goes on from what is there."""
    job = new_job(watch="node-1")
    store.submit(job)
    handout = rig.take()
    rig.outlet.deliver([tokens(handout, 5)])
    wait_until(lambda: store.read(job.ref).logged_tokens == 1, description="the first token")
    wait_until(lambda: not rig.outlet.held()[0].entries, description="its answer")
    earlier = Snapshot(client)
    rig.outlet.deliver([tokens(handout, 6), tokens(handout, 7)])
    wait_until(lambda: store.read(job.ref).logged_tokens == 3, description="three tokens")
    wait_until(lambda: not rig.outlet.held()[0].entries, description="their answer")
    earlier.restore()
    rig.outlet.deliver([tokens(handout, 8)])
    wait_until(lambda: store.read(job.ref).state == "queued", description="the job to be queued again")
    assert rig.left == [(job.ref.token, "queued", None)]
    assert rig.runner.cancelled == [(job.ref.token, 1, "failed")]
    again = rig.take()
    assert (again.lease.attempt, again.replay, again.alone) == (2, ((5,),), False)
    store.cancel(job.ref)


def test_an_attempt_number_that_is_given_out_twice_runs_once(store: JobStore, rig: Rig, client: Client) -> None:
    """The server comes back without an attempt, and the rank that still runs it gets the job again under the same
    number: it could not tell the two apart, so the job waits for the next number, and old events are nobody's."""
    job = new_job()
    store.submit(job)
    earlier = Snapshot(client)
    old = rig.take()
    earlier.restore()
    again = rig.take()
    assert (again.lease.attempt, again.lease.nonce != old.lease.nonce) == (1, True)
    wait_until(lambda: store.read(job.ref).state == "queued", description="the job to be queued again")
    assert rig.outlet.held() == []
    new = rig.take()
    assert new.lease.attempt == 2
    rig.outlet.deliver([tokens(old, 5), tokens(new, 6), finished(new, "x", 1)])
    wait_until(lambda: store.read(job.ref).terminal, description="the job to end")
    assert [entry.token_ids for entry in store.view(job.ref).entries] == [(6,)]


def test_events_of_a_former_attempt_of_the_same_number_are_nobodys(
    store: JobStore, rank_a: Delivery, client: Client
) -> None:
    """Delivered before the runner dropped it, not yet looked at when the rank begins the job anew as attempt 1."""
    job = new_job()
    store.submit(job)
    earlier = Snapshot(client)
    rig = Rig(rank_a)
    old = rig.take()
    rig.outlet.deliver([tokens(old, 5)])
    rig.runner.live.clear()
    earlier.restore()
    new = rig.take()
    rig.outlet.start()
    rig.outlet.deliver([tokens(new, 6), finished(new, "x", 1)])
    wait_until(lambda: store.read(job.ref).terminal, description="the job to end")
    assert [entry.token_ids for entry in store.view(job.ref).entries] == [(6,)]
    rig.outlet.stop()


def test_a_failure_is_stored_with_its_name(store: JobStore, rig: Rig) -> None:
    """What the runner reports as failed ends as failed."""
    job = new_job()
    store.submit(job)
    handout = rig.take()
    rig.outlet.deliver([Failed(handout.lease.token, 1, "engine_error", "The engine failed: OSError.")])
    wait_until(lambda: store.read(job.ref).terminal, description="the job to end")
    assert store.read(job.ref).error_code == "engine_error"


def test_a_runner_far_ahead_of_the_store_is_congested(store: JobStore, rank_a: Delivery) -> None:
    """Unsent tokens count, gathered or not, and no longer once they are stored."""
    job = new_job()
    store.submit(job)
    rig = Rig(rank_a)
    handout = rig.take()
    assert not rig.outlet.congested()
    rig.outlet.deliver([tokens(handout, *range(CONGESTION_TOKENS + 1))])
    rig.outlet._gather()
    assert rig.outlet.congested()
    rig.outlet.start()
    wait_until(lambda: not rig.outlet.congested(), description="the backlog to be stored")
    rig.outlet.stop()
    store.cancel(job.ref)


def test_a_stopped_outlet_hands_back_what_has_not_ended(store: JobStore, rank_a: Delivery, rank_b: Delivery) -> None:
    """With every token it was given, at no cost to the job."""
    job = new_job()
    store.submit(job)
    rig = Rig(rank_a)
    rig.outlet.start()
    handout = rig.take()
    rig.outlet.deliver([tokens(handout, 5), tokens(handout, 6)])
    rig.outlet.stop()
    (again,) = rank_b.take(1, 100).handouts
    assert again.replay == ((5, 6),)
    assert rig.left == [(job.ref.token, "queued", None)]
    store.cancel(job.ref)


def test_a_job_that_is_lost_is_let_go_before_the_runner_drops_it(store: JobStore, rank_a: Delivery) -> None:
    """Whoever submits a job to the runner looks afterwards whether it is still held: in this order, one of the two
    sees the other."""
    job = new_job()
    store.submit(job)
    rig = Rig(rank_a)
    handout = rig.take()
    drop = rig.runner.cancel
    seen: list[bool] = []

    def dropped(token: str, attempt: int, *, how: Stopped = "cancelled") -> bool:
        seen.append(rig.outlet.holds(handout))
        return drop(token, attempt, how=how)

    rig.runner.cancel = dropped  # type: ignore[method-assign] # looks on
    assert rig.outlet.holds(handout)
    store.cancel(job.ref)
    rig.outlet.nudge()
    rig.outlet._turn(everything=False)
    assert seen == [False]


def test_a_deploy_during_an_outage_costs_no_job_a_crash(folder: Path) -> None:
    """The state server is away for longer than half a lease while a worker leaves: the worker stays until it can hand
    back, which it can long before anybody would take the job for lost."""
    with StateServer(folder, port=0) as server:
        url = server.url
        client = connect(url)
        store = job_store(client)
        job = new_job()
        store.submit(job)
        rig = Rig(delivery(url, "rank-a"))
        rig.outlet.start()
        rig.take()
    leaving = threading.Thread(target=rig.outlet.stop)
    back_s = time.monotonic() + 0.8 * LEASE_MS / 1000
    leaving.start()
    wait_until(lambda: time.monotonic() > back_s, description="most of a lease")
    with StateServer(folder, port=int(url.split(":")[2].split("/")[0])) as server:
        leaving.join()
        assert store.read(job.ref).state == "queued"
        assert rig.left == [(job.ref.token, "queued", None)]
        for each in (client, rig.delivery.reader, rig.delivery.writer):
            each.connection_pool.disconnect()

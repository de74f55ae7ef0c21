"""The lanes in Redis against their rules in Python (pool/rules/fairness.py): the same steps drive both, and both must
move the same jobs in the same order and count the same."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pool.rules.fairness import LANES, Lanes, Moved, Waiting
from pool.store.audit import Audit
from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.flows import flow_of
from pool.store.handouts import Entry, Handout, Write
from pool.store.ids import JobRef, new_ref
from pool.store.keys import ModelKeys
from pool.store.lane_positions import BAND
from tests.builders import completed, delivery, job_store, new_job

KEYS = ModelKeys("tiny:0")
#: A begin so late takes no time of its own.
NEVER_MS = 2**50


class LanesModel(RuleBasedStateMachine):
    """One rank. The slot time of attempts is set by hand: the clock is not the matter here."""

    client: Client
    url: str

    @initialize()
    def begin(self) -> None:
        """An empty server, and no lanes."""
        self.client.flushall()
        self.store = job_store(self.client, cap=1000)
        self.rank: Delivery = delivery(self.url)
        self.lanes = Lanes()
        self.refs: dict[str, JobRef] = {}
        self.waiting: dict[str, tuple[tuple[int, str], Waiting]] = {}
        self.moved: dict[str, tuple[Entry, Moved]] = {}
        self.running: dict[str, tuple[Handout, Moved]] = {}

    @rule(
        tenant=st.sampled_from("abc"), lane=st.sampled_from(LANES), n=st.integers(1, 3), weight=st.integers(1, 3),
        cap=st.sampled_from([0, 0, 2]),
    )  # fmt: skip
    def submit(self, tenant: str, lane: str, n: int, weight: int, cap: int) -> None:
        """A job joins its flow."""
        ref = new_ref("responses", "tiny", token=f"{len(self.refs) + 1:032x}")
        new = new_job(ref=ref, tenant=tenant, lane=lane, n=n, weight=weight, inflight_cap=cap)
        self.store.submit(new)
        place, key = flow_of(lane, tenant, "").split(":")
        flow, job = (int(place), key), Waiting(new.ref.token, n, weight, cap, tells=new.ref.token[-1] in "048c")
        self.lanes.join(flow, job)
        self.refs[new.ref.token] = new.ref
        self.waiting[new.ref.token] = (flow, job)

    @rule(room=st.integers(1, 6))
    def take(self, room: int) -> None:
        """A rank with room gets what the rules say, in their order."""
        moved = self.lanes.feed(room)
        found = self.rank._take(self.rank.reader, [KEYS.queue], room, None)
        entries = self.rank._entries(found[0][1]) if found else []
        assert [entry.token for entry in entries] == [each.job.name for each in moved]
        for entry, each in zip(entries, moved, strict=True):
            del self.waiting[entry.token]
            self.moved[entry.token] = (entry, each)

    @precondition(lambda self: self.moved)
    @rule(data=st.data())
    def begin_one(self, data: st.DataObject) -> None:
        """A job that was read begins."""
        token = data.draw(st.sampled_from(list(self.moved)))
        entry, moved = self.moved.pop(token)
        (handout,) = self.rank.begin([entry])
        assert isinstance(handout, Handout)
        self.running[token] = (handout, moved)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), used_ms=st.integers(0, 5000), succeeds=st.booleans())
    def end_one(self, data: st.DataObject, used_ms: int, succeeds: bool) -> None:
        """A running job completes, or is cancelled: both are charged."""
        token = data.draw(st.sampled_from(list(self.running)))
        handout, moved = self.running.pop(token)
        self.client.hset(KEYS.job(token), mapping={"begun_ms": NEVER_MS, "used_ms": used_ms})
        if succeeds:
            texts = ["x"] * handout.n
            assert self.rank.write([Write(handout.lease, 0, (), completed(*texts))])[0].code == "ok"
        else:
            self.store.cancel(self.refs[token])
        self.lanes.end(moved, used_ms)

    @precondition(lambda self: self.waiting or self.moved)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A job that has not begun costs nothing, wherever it is."""
        token = data.draw(st.sampled_from([*self.waiting, *self.moved]))
        self.store.cancel(self.refs[token])
        if token in self.waiting:
            self.lanes.withdraw(*self.waiting.pop(token))
        else:
            _, moved = self.moved.pop(token)
            self.lanes.end(moved, None)

    @precondition(lambda self: self.moved)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """A job that was read and not begun goes back into the stream, and comes first in the next read."""
        token = data.draw(st.sampled_from(list(self.moved)))
        entry, moved = self.moved[token]
        self.rank.give_back([entry])
        found = self.rank._take(self.rank.reader, [KEYS.queue], 1, None)
        (again,) = self.rank._entries(found[0][1])
        assert again.token == token
        self.moved[token] = (again, moved)

    @invariant()
    def the_same_is_counted(self) -> None:
        """Virtual times, choices in flight, what is owed, guesses."""
        flows = dict(self.client.zrange(KEYS.lanes["flows"], 0, -1, withscores=True))
        facts = {name.decode(): float(value) for name, value in self.client.hgetall(KEYS.lanes["fairness"]).items()}
        assert {_flow(name): score % BAND for name, score in flows.items()} == self.lanes.vt
        waits = {_flow(name) for name, score in flows.items() if score < len(LANES) * BAND}
        assert waits == {flow for flow, queue in self.lanes.queues.items() if queue}
        busy = {name[5:]: count for name, count in facts.items() if name.startswith("busy:")}
        assert busy == {key: count for key, count in self.lanes.busy.items() if count}
        guesses = {_flow(name[6:].encode()): guess for name, guess in facts.items() if name.startswith("guess:")}
        assert guesses == self.lanes.guess_ms
        for lane in range(len(LANES)):
            assert facts.get(f"owed:{lane}", 0) == pytest.approx(self.lanes.owed_ms[lane], abs=0.01)
            assert facts.get(f"clock:{lane}", 0) == self.lanes.clock[lane]

    def teardown(self) -> None:
        """What is left is sound."""
        assert Audit(self.client, "tiny").run() == []
        self.rank.close()


def _flow(name: bytes) -> tuple[int, str]:
    lane, key = name.decode().split(":")
    return int(lane), key


@pytest.mark.timeout(3600)
def test_lanes_follow_their_rules(client: Client, redis_url: str) -> None:
    """Whatever is submitted, moved, begun, ended, cancelled and given back, in whatever order."""
    machine = type("Machine", (LanesModel,), {"client": client, "url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    client.flushall()

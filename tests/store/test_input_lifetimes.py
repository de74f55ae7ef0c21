"""Random lives of jobs with large inputs: after every step, exactly the blocks exist that somebody needs."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pool.store.audit import Audit
from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Handout, Write
from pool.store.inputs import BLOCK_BYTES, INLINE_BYTES, blocks_of, read_input
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.records import NewJob
from pool.store.stored_jobs import erase
from tests.builders import completed, new_job, sweeper, swept_steadily

KEYS = ModelKeys("tiny:0")
TEXT = "".join(random.Random(3).choices("abcdefgh ", k=4 * BLOCK_BYTES))
PROMPT = random.Random(4).randbytes(4 * BLOCK_BYTES)
#: Lengths around the limits: inline, one block, several; equal and grown histories.
LENGTHS = st.sampled_from([40, INLINE_BYTES, BLOCK_BYTES, BLOCK_BYTES + 4, 3 * BLOCK_BYTES])


def ids_of(tenant: str, content: bytes) -> set[str]:
    """The blocks of some content."""
    return {block.id for block in blocks_of(tenant, content)}


@dataclass
class Life:
    """What the model knows of a job: its form, its hand-out while one runs it, and whether it has ended."""

    job: NewJob
    handout: Handout | None = None
    ended: bool = False

    @property
    def large(self) -> bool:
        """Whether its input lies in blocks."""
        given = 0 if self.job.prompt and not self.job.store else len(self.job.input)
        return given + len(self.job.prompt) > INLINE_BYTES

    def needs(self) -> set[str]:
        """Blocks that must exist for it."""
        if not self.large:
            return set()
        given = ids_of(self.job.tenant, self.job.input.encode())
        if self.ended:
            return given if self.job.store else set()
        return ids_of(self.job.tenant, self.job.prompt) | (given if self.job.store or not self.job.prompt else set())


class Lives(RuleBasedStateMachine):
    """Submits, begins, ends and losses in any order."""

    client: Client
    store: JobStore
    rank: Delivery

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.rank.heal()
        self.lives: list[Life] = []
        self.erased: list[Life] = []

    @rule(chars=LENGTHS, ids=LENGTHS, tenant=st.sampled_from("ab"), store=st.booleans(), tokenized=st.booleans())
    def submit(self, chars: int, ids: int, tenant: str, store: bool, tokenized: bool) -> None:
        """A new job."""
        prompt = PROMPT[:ids] if tokenized else b""
        job = new_job(input=TEXT[:chars], prompt=prompt, tenant=tenant, store=store)
        self.store.submit(job)
        self.lives.append(Life(job))

    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        """The same id once more changes nothing, ended or not."""
        if self.lives:
            self.store.submit(data.draw(st.sampled_from(self.lives)).job)

    @rule(room=st.integers(1, 3))
    def begin(self, room: int) -> None:
        """A worker takes jobs, and gets what was submitted."""
        by_token = {life.job.ref.token: life for life in self.lives}
        taken = self.rank.take(room, 1)
        for handout in [*taken.handouts, *filter(None, map(self.rank.begin_alone, taken.alone))]:
            life = by_token[handout.lease.token]
            life.handout = handout
            assert not handout.lost
            assert handout.prompt == life.job.prompt
            assert handout.prompt or handout.input == life.job.input.encode()

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """A running job ends well."""
        if running := self.running():
            life = data.draw(st.sampled_from(running))
            assert life.handout is not None
            assert self.rank.write([Write(life.handout.lease, 0, (), completed("x"))])[0].code == "ok"
            life.ended = True

    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        """A running job goes back."""
        if running := self.running():
            life = data.draw(st.sampled_from(running))
            assert life.handout is not None
            assert self.rank.hand_back([life.handout.lease]) == 1
            life.handout = None

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A job is cancelled, queued or running."""
        if unended := [life for life in self.lives if not life.ended]:
            life = data.draw(st.sampled_from(unended))
            self.store.cancel(life.job.ref)
            life.ended = True

    @rule(data=st.data(), kind=st.sampled_from(["run", "deadline", "reader"]))
    def expire(self, data: st.DataObject, kind: str) -> None:
        """A timer of a job is due."""
        if unended := [life for life in self.lives if not life.ended]:
            life = data.draw(st.sampled_from(unended))
            self.client.zadd(KEYS.timers, {f"{kind}:{life.job.ref.token}": 1})
            swept_steadily(self.client)
            assert sweeper(self.client).sweep("tiny").expired == 1
            life.ended = True

    @rule(data=st.data(), cap=st.integers(1, 3))
    def lose(self, data: st.DataObject, cap: int) -> None:
        """The lease of a running job runs out: it is queued again, or given up."""
        if running := self.running():
            life = data.draw(st.sampled_from(running))
            self.client.zadd(KEYS.leases, {life.job.ref.token: 1})
            swept_steadily(self.client)
            swept = sweeper(self.client, max_deliveries=cap).sweep("tiny")
            assert swept.requeued + swept.poisoned == 1
            life.handout, life.ended = None, swept.poisoned == 1

    @rule(data=st.data())
    def erase(self, data: st.DataObject) -> None:
        """The owner deletes a job, ended or not; rather one whose input is kept in blocks."""
        if self.lives:
            kept = [life for life in self.lives if life.ended and life.needs()]
            life = data.draw(st.sampled_from(kept or self.lives))
            erase(self.client, self.store, life.job.ref)
            self.lives.remove(life)
            self.erased.append(life)

    def running(self) -> list[Life]:
        """Jobs that a worker has."""
        return [life for life in self.lives if life.handout is not None and not life.ended]

    @invariant()
    def exactly_what_is_needed_exists(self) -> None:
        """Each block is there for a reason, and goes when its last reason does."""
        stored = {key.decode().rpartition(":")[2] for key in self.client.scan_iter(match=KEYS.input("*"), count=1000)}
        assert stored == {block for life in self.lives for block in life.needs()}
        held = {block for life in self.lives if not life.ended for block in life.needs()}
        assert {block for block in stored if self.client.ttl(KEYS.input(block)) == -1} == held
        for life in self.lives:
            if life.ended:
                kept = life.job.input if life.job.store else None
                assert read_input(self.client, life.job.ref) == kept
        assert all(read_input(self.client, life.job.ref) is None for life in self.erased)
        assert Audit(self.client, "tiny").run() == []

    def teardown(self) -> None:
        """Nothing is left for the next example."""
        self.client.flushall()


def test_blocks_live_as_long_as_somebody_needs_them(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """A dict of jobs and the server agree after every step."""

    class Machine(Lives):
        """Lives on the server of this test."""

    Machine.client, Machine.store, Machine.rank = client, store, rank_a
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )

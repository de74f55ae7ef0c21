"""Programs on a real state server against plain objects, by random events: arrivals, ends (also late, repeated, and of
dead processes), cancels, timers, ranks that come, go and are drained, and a clock that is set.

After each event: every Program and job is as the model says, and an audit finds nothing (I4, I5, tenants). What an old
fence tries changes nothing (I6). PROGRAM_STEPS in the environment says how many events there are (`make programs`).
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pool.rules.programs.facts import State
from pool.rules.programs.tokens import private_tokens
from pool.store.audit import Audit
from pool.store.connection import Client, connect
from pool.store.handouts import Handout, Write, failed
from pool.store.ids import JobRef
from pool.store.placements import Outcome
from pool.store.program_keys import program_id_of
from pool.store.program_records import Arrival
from pool.store.program_views import Snapshot
from pool.store.programs import Operation
from tests.builders import completed, new_job, sweeper, swept_steadily
from tests.program_scene import Scene
from tests.program_scene import settings as program_settings
from tests.stateful.program_model import Key, Program, World

STEPS = int(os.environ.get("PROGRAM_STEPS", "300"))
STEPS_EACH = 50
#: Longer than any run: leases end by an event alone.
LEASE_MS = 36_000_000
#: Timers in the past by so much are due.
LONG_MS = 3_600_000_000

KEYS = st.tuples(st.sampled_from(("acme", "umbrella")), st.sampled_from(("lead", "helper", "critic")))
RANKS = st.sampled_from(("a", "b", "c"))


class Programs(RuleBasedStateMachine):
    """`handouts`: all that were ever given, by whichever process."""

    url = ""

    @initialize(order=st.sampled_from(("mru", "fcfs")), capacity=st.sampled_from((None, 3000)))
    def start(self, order: str, capacity: int | None) -> None:
        self.client: Client = connect(self.url)
        self.client.flushall()
        wanted = program_settings(
            resume_order=order,
            token_capacity_per_dp_rank=capacity,
            stats_window_size=3,
            max_active_programs_per_target=3,
        )
        self.scene = Scene(self.client, self.url, wanted, max_deliveries=1000, lease_ms=LEASE_MS)
        self.world = World()
        self.world.seats |= {"a": "", "b": "", "c": ""}
        self.lives = 0
        self.handouts: list[Handout] = []
        self.epochs: dict[Key, tuple[int, int]] = {}
        for rank in ("a", "b"):
            self.take_rank(rank)

    def teardown(self) -> None:
        if hasattr(self, "scene"):
            self.scene.close()
            self.client.flushall()
            self.client.connection_pool.disconnect()

    def ref(self, token: str) -> JobRef:
        return JobRef("resp", "tiny", 0, token)

    def id_of(self, key: Key) -> str:
        return program_id_of(*key)

    def pick(self, data: st.DataObject, keys: list[Key]) -> Key:
        return data.draw(st.sampled_from(sorted(keys)))

    def possible(self) -> list[str]:
        """The events that can come now, each as often as it is likely."""
        running = any(job.handout is not None for job in self.world.jobs.values())
        timers = any(program.timer for program in self.world.programs.values())
        weights = {
            "arrive": 6, "plan": 8, "begin": 2, "join": 1, "lose": 1, "leave": 1, "drain": 1,
            "read_as_a_ghost": 1, "set_clock": 1,
            "complete": 8 * bool(self.handouts), "give_back": 2 * running, "replace": 2 * running,
            "time_passes": 2 * timers,            "cancel": 2 * bool(self.unended()), "time_out": bool(self.unended()),
            "operate": 3 * bool(self.world.programs), "rebind": bool(self.world.programs), "finish": 1,
        }  # fmt: skip
        return [name for name, weight in weights.items() for _ in range(weight)]

    @rule(data=st.data())
    def event(self, data: st.DataObject) -> None:
        """One of them. As rules of their own, too many would be left out of each run: nothing would ever get far."""
        getattr(self, data.draw(st.sampled_from(self.possible()), label="event"))(data)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def join(self, data: st.DataObject) -> None:
        """A process takes a rank, also from one that lives on."""
        self.take_rank(data.draw(RANKS, label="rank"))

    def take_rank(self, rank: str) -> None:
        self.lives += 1
        self.scene.join(rank, f"life-{self.lives}")
        self.world.seats[rank], self.world.closing[rank] = f"life-{self.lives}", ""

    def lose(self, data: st.DataObject) -> None:
        """A rank is lost; what it had is moved at once, or later."""
        rank = data.draw(RANKS, label="rank")
        drained = data.draw(st.booleans(), label="drained")
        assert self.scene.lose(rank, self.world.seats[rank]) == bool(self.world.seats[rank])
        self.world.seats[rank] = ""
        if drained:
            self.drain_rank(rank)

    def leave(self, data: st.DataObject) -> None:
        """A process gives up its rank, and may still end what it has begun."""
        rank = data.draw(RANKS, label="rank")
        if self.scene.upkeep.lose(rank, self.world.seats[rank], leaves=True):
            self.world.closing[rank] = self.world.seats[rank]
        self.world.seats[rank] = ""
        if data.draw(st.booleans(), label="drained"):
            self.drain_rank(rank)

    def drain(self, data: st.DataObject) -> None:
        """Until nothing is left to be moved."""
        self.drain_rank(data.draw(RANKS, label="rank"))

    def drain_rank(self, rank: str) -> None:
        while self.scene.upkeep.drain(rank):
            pass
        self.world.drain(rank)

    def rebind(self, data: st.DataObject) -> None:
        """A Program goes to another rank, unless it has a place."""
        other = data.draw(RANKS, label="other")
        key = self.pick(data, list(self.world.programs))
        program = self.world.programs[key]
        done = self.scene.store.rebind(self.id_of(key), program.rank, other, "test")
        assert (done is not None) == (not program.active)
        program.rank = program.rank if program.active else other

    # -- requests ---------------------------------------------------------------------------------------------------

    def arrive(self, data: st.DataObject) -> None:
        """A request of a Program, perhaps sent twice."""
        key = data.draw(KEYS, label="key")
        up = [rank for rank, seat in self.world.seats.items() if seat]
        home = data.draw(st.sampled_from([*up, *up, *self.world.seats]), label="home")
        tokens = data.draw(st.integers(1, 1500), label="tokens")
        expected = data.draw(st.one_of(st.none(), st.integers(0, 900)), label="expected")
        priority = data.draw(st.integers(-3, 3), label="priority")
        again = data.draw(st.booleans(), label="again")
        ends = data.draw(st.sampled_from((False, False, False, True)), label="ends")
        job = new_job(tenant=key[0], tenant_cap=50)
        arrival = Arrival(*key, tokens, force_ms=30_000, priority=priority, expected_tokens=expected, ends=ends)
        for _ in range(1 + again):
            self.scene.store.arrive(job, arrival, home=home, is_up=bool(self.world.seats[home]))
        self.world.arrive(key, job.ref.token, tokens, home, ends=ends)

    def plan(self, data: st.DataObject) -> None:
        """What the rules want for each rank, whatever that is; and perhaps its process begins it."""
        limit = data.draw(st.integers(1, 3), label="limit")
        begins = data.draw(st.sampled_from((True, True, True, False)), label="begins")
        for rank in ("a", "b", "c"):
            self.plan_for(rank, limit)
            if begins:
                self.begin_on(rank)

    def plan_for(self, rank: str, limit: int) -> None:
        seen = self.scene.store.snapshot(rank)
        before = {key: program for key, program in self.world.programs.items() if program.rank == rank}
        applied = self.scene.plan(rank, limit)
        assert applied.refused == ()
        assert (applied.code == "away") == (not self.world.seats[rank])
        for key, program in before.items():
            stored = self.scene.store.read(self.id_of(key))
            assert stored is not None
            if stored.number("mark") and not program.mark:
                assert program.flight and program.active
                program.mark = True
            elif stored.text("state") != ("active" if program.active else "paused"):
                self.follow(seen, key, program)

    def follow(self, seen: Snapshot, key: Key, program: Program) -> None:
        """A plan has changed the Program's place, which must have been possible."""
        if program.active:
            assert not program.flight
            program.timer = ""
            self.world.pause(program, "")
        else:
            assert seen.fronts[self.id_of(key)] == program.pool[0]
            self.world.admit(program)

    def operate(self, data: st.DataObject) -> None:
        """One operation that no rule may have asked for: it is carried out exactly where it is possible."""
        kind = data.draw(st.sampled_from(("force", "pause", "mark")), label="kind")
        why = data.draw(st.sampled_from(("max_segment_yield", "x")), label="why")
        key = self.pick(data, list(self.world.programs))
        program = self.world.programs[key]
        front = program.pool[0] if program.pool and kind == "force" else ""
        if kind == "force" and not front:
            return
        seen = self.scene.store.snapshot(program.rank)
        operation = Operation(kind, self.id_of(key), why, front)
        applied = self.scene.store.apply(seen, [operation])
        assert (applied.code == "away") == (not self.world.seats[program.rank])
        if applied.code == "away":
            return
        done = applied.refused == ()
        if kind == "force":
            waits = not program.active and bool(program.pool)
            assert done == waits if self.scene.settings.token_capacity_per_dp_rank is None else waits or not done
            if done:
                self.world.admit(program)
            return
        live = program.active and not self.world.stale(program)
        assert done == (live and bool(program.flight) == (kind == "mark"))
        if done and kind == "mark":
            program.mark = True
        elif done:
            self.world.pause(program, why)

    def begin(self, data: st.DataObject) -> None:
        """The rank's process begins what was sent to it."""
        self.begin_on(data.draw(RANKS, label="rank"))

    def begin_on(self, rank: str) -> None:
        if not self.world.seats[rank]:
            return
        # The first read of a new process may bring what a former one has read, and nothing else. One that would find
        # nothing takes long, so it is left out.
        for _ in range(2):
            if self.sent_to(rank):
                for handout in self.scene.take(rank):
                    self.begun(rank, handout)
        assert self.sent_to(rank) == []

    def sent_to(self, rank: str) -> list[str]:
        """Jobs that the rank's process is to begin."""
        programs = [each for each in self.world.programs.values() if each.rank == rank and not self.world.stale(each)]
        return [token for each in programs for token in each.flight if self.world.jobs[token].state == "queued"]

    def begun(self, rank: str, handout: Handout) -> None:
        """It was to begin it."""
        assert handout.lease.token in self.sent_to(rank)
        job = self.world.jobs[handout.lease.token]
        job.state, job.handout = "running", handout
        self.handouts.append(handout)

    def read_as_a_ghost(self, data: st.DataObject) -> None:
        """A former process of a rank reads entries, and can begin none; they go back to the rank's present process."""
        rank = data.draw(RANKS, label="rank")
        ghosts = [ghost for ghost in self.scene.ghosts if ghost.rank == rank]
        if not ghosts or not self.world.seats[rank]:
            return
        found = ghosts[-1].read(10, 1)
        assert list(ghosts[-1].begin(found)) == []
        self.scene.upkeep.requeue_unbegun(rank, 0)
        self.drain_rank(rank)
        for entry in found:
            job = self.world.jobs.get(entry.token)
            if job is not None and job.state == "queued" and entry.token in self.world.programs[job.key].flight:
                self.world.put_back(entry.token)

    # -- ends -------------------------------------------------------------------------------------------------------

    def complete(self, data: st.DataObject) -> None:
        """Any attempt there ever was says that it is done; what is not the current one changes nothing."""
        late = data.draw(st.integers(1, min(len(self.handouts), 6)), label="late")
        self.complete_one(data, self.handouts[-late])

    def replace(self, data: st.DataObject) -> None:
        """A process is replaced, or its rank lost, in the middle of a request; it completes that all the same. What was
        sent to it, the new one cannot begin."""
        running = [job.handout for job in self.world.jobs.values() if job.handout is not None]
        handout = running[data.draw(st.integers(0, len(running) - 1), label="which")]
        assert handout.lease.placement is not None
        rank = handout.lease.placement.rank
        if data.draw(st.booleans(), label="lost"):
            self.scene.lose(rank, self.world.seats[rank])
            self.world.seats[rank] = ""
        else:
            self.take_rank(rank)
        self.complete_one(data, handout)
        self.begin_on(rank)

    def complete_one(self, data: st.DataObject, handout: Handout) -> None:
        ttl_ms = data.draw(st.sampled_from((0, 60_000)), label="ttl_ms")
        context = data.draw(st.integers(1, 2000), label="context")
        fails = data.draw(st.sampled_from((False, False, True)), label="fails")
        by_another = data.draw(st.booleans(), label="by_another")
        job = self.world.jobs[handout.lease.token]
        program = self.world.programs.get(job.key)
        current = job.handout is handout and program is not None and self.world.may_end(program)
        placement = handout.lease.placement
        assert placement is not None
        outcome = Outcome(
            prompt_tokens=10, context_tokens=context, ttl_ms=ttl_ms, shared_tokens=context // 3, fresh_until_ms=1
        )
        ending = failed("engine_error", "It failed.") if fails else replace(completed("x"), outcome=outcome)
        workers = [*self.scene.ghosts, *self.scene.workers.values()]
        by = [worker for worker in workers if worker.rank == placement.rank][0 if by_another else -1]
        write = Write(handout.lease, handout.logged, (), ending)
        (answer,) = by.write([write])
        if answer.code == "resend":
            (answer,) = by.write([write])
        assert (answer.code == "ok") == current
        if current and program is not None:
            if not fails:
                program.context = program.context.observed(context, is_authoritative=True)
                program.completed += 1
            self.world.end(handout.lease.token, ending.state, ttl=ttl_ms > 0)

    def unended(self) -> list[str]:
        return [token for token, job in self.world.jobs.items() if job.state in ("queued", "running")]

    def cancel(self, data: st.DataObject) -> None:
        """Of a job that waits, was sent or runs."""
        token = data.draw(st.sampled_from(self.unended()))
        assert self.scene.jobs.cancel(self.ref(token)).state == "cancelled"
        self.world.end(token, "cancelled")

    def time_out(self, data: st.DataObject) -> None:
        """A job's own timer is due."""
        token = data.draw(st.sampled_from(self.unended()))
        kinds = [kind for kind in ("queue", "run") if self.client.zscore(self.scene.keys.timers, f"{kind}:{token}")]
        self.client.zadd(self.scene.keys.timers, {f"{kind}:{token}": 1 for kind in kinds})
        swept_steadily(self.client)
        assert sweeper(self.client, lease_ms=LEASE_MS).sweep("tiny").expired == 1
        self.world.end(token, "failed")

    def give_back(self, data: st.DataObject) -> None:
        """A job's lease runs out, or its process hands it back."""
        returned = data.draw(st.booleans(), label="returned")
        running = [token for token, job in self.world.jobs.items() if job.handout is not None]
        token = data.draw(st.sampled_from(running))
        handout = self.world.jobs[token].handout
        assert handout is not None and handout.lease.placement is not None
        if returned:
            assert self.scene.workers[handout.lease.placement.rank].hand_back([handout.lease]) == 1
        else:
            swept_steadily(self.client)
            self.client.zadd(self.scene.keys.leases, {token: 1})
            assert sweeper(self.client, lease_ms=LEASE_MS, max_deliveries=1000).sweep("tiny").requeued == 1
        self.world.put_back(token)

    def finish(self, data: st.DataObject) -> None:
        """A Program's owner says that it is over."""
        key = data.draw(KEYS, label="key")
        there = key in self.world.programs
        self.world.finish(key)
        left = "ending" if key in self.world.programs else "released"
        assert self.scene.upkeep.finish(*key) == (left if there else "gone")

    # -- time -------------------------------------------------------------------------------------------------------

    def time_passes(self, data: st.DataObject) -> None:
        """A Program's timer is due."""
        key = self.pick(data, [key for key, program in self.world.programs.items() if program.timer])
        timer = self.world.programs[key].timer
        self.client.zadd(self.scene.keys.program_timers, {f"{timer}:{self.id_of(key)}": 1}, xx=True)
        done = "released" if timer == "retention" else "paused"
        swept_steadily(self.client)
        rank = self.world.programs[key].rank
        assert self.scene.upkeep.expire() == [(self.id_of(key), rank, done)]
        self.world.due(timer, key)

    def set_clock(self, data: st.DataObject) -> None:
        """The server's clock is set: as seen from it, all stored times of Programs have moved the other way. Set
        forward, timers are due, but for those that it was set back from before."""
        by_ms = data.draw(st.sampled_from((-LONG_MS, -5_000, 5_000, LONG_MS)), label="by_ms")
        timers = self.client.zrange(self.scene.keys.program_timers, 0, -1, withscores=True)
        if timers:
            self.client.zadd(self.scene.keys.program_timers, {timer: due_ms - by_ms for timer, due_ms in timers})
        for key, program in self.world.programs.items():
            if program.pool and not program.active:
                self.scene.shift(self.id_of(key), -by_ms, "force_ms")
                self.client.zincrby(self.scene.keys.place(program.rank)["waiting"], -by_ms, self.id_of(key))
        if by_ms == LONG_MS:
            now_ms = self.client.time()[0] * 1000
            found = self.client.zrangebyscore(self.scene.keys.program_timers, "-inf", now_ms)
            due = [timer.decode().partition(":") for timer in found]
            swept_steadily(self.client)
            self.scene.upkeep.expire()
            keys = {self.id_of(key): key for key in self.world.programs}
            for kind, _, program_id in due:
                self.world.due(kind, keys[program_id])

    # -- what holds -------------------------------------------------------------------------------------------------

    @invariant()
    def programs_are_as_the_model_says(self) -> None:
        """Each one's fields; and there are no others."""
        if not hasattr(self, "scene"):
            return
        for key, program in self.world.programs.items():
            stored = self.scene.store.read(self.id_of(key))
            assert stored is not None, key
            pool = self.client.lrange(self.scene.keys.pool(stored.id), 0, -1)
            assert [ticket.split(b":")[0].decode() for ticket in pool] == program.pool
            works = bool(program.flight) or (bool(program.pool) and not program.active)
            assert (
                stored.number("gen"), stored.text("rank"), stored.text("state"), stored.text("status"),
                stored.number("inflight"), bool(stored.number("mark")), bool(stored.number("ending")),
                bool(stored.number("yielded")), stored.number("completed"),
            ) == (
                program.gen, program.rank, "active" if program.active else "paused", "reasoning" if works else "acting",
                len(program.flight), program.mark, program.ending, program.yielded, program.completed,
            )  # fmt: skip
            assert (stored.number("ctx"), bool(stored.number("falls"))) == (
                program.context.tokens,
                program.context.was_smaller,
            )
            if program.active and not program.mark and not program.pool:
                seen = stored.program()
                assert seen.state is State.ACTIVE
                assert stored.number("private") == private_tokens(seen, stored.number("buf"))
            if program.timer:
                assert self.client.zscore(self.scene.keys.program_timers, f"{program.timer}:{stored.id}") is not None
            before = self.epochs.get(key, (-1, 0))
            assert (program.gen, stored.number("epoch")) >= before
            self.epochs[key] = (program.gen, stored.number("epoch"))
        found = {record.decode().rpartition(":")[2] for record in self.client.scan_iter(self.scene.keys.record("*"))}
        assert found == {self.id_of(key) for key in self.world.programs}

    @invariant()
    def jobs_are_as_the_model_says(self) -> None:
        """Their states, and who holds a lease."""
        if not hasattr(self, "scene"):
            return
        pipe = self.client.pipeline(transaction=False)
        for token in self.world.jobs:
            pipe.hget(self.scene.keys.job(token), "state")
        states = [state.decode() for state in pipe.execute()]
        assert states == [job.state for job in self.world.jobs.values()]

    @invariant()
    def an_audit_finds_nothing(self) -> None:
        """Ledgers, one place for each Program, tenants, indexes, entries and leases."""
        if hasattr(self, "scene"):
            assert Audit(self.client, "tiny").run() == []


@pytest.mark.timeout(3600)
def test_programs_are_as_a_model_says(redis_url: str) -> None:
    """By random events."""
    Programs.url = redis_url
    run_state_machine_as_test(
        Programs,
        settings=settings(
            max_examples=max(STEPS // STEPS_EACH, 1),
            stateful_step_count=STEPS_EACH,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

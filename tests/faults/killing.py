"""Kills of workers at chosen moments in the lives of the generations that they run.

| phase | what the victim is doing |
|---|---|
| load | it was just started, and does not serve yet |
| prefill | it runs a job that has no token yet |
| replay | it has taken a job over, and has not added to its log yet |
| decode | it runs a job in the middle of its tokens |
| end | it runs a job whose last tokens are being made |
| waiting | a choice waits inside it for a slot |
| preempted | a generation that had shown tokens has given its room to others, and waits |
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pool.store.connection import connect
from pool.store.ranks import RankRegistry
from tests.conftest import leaking
from tests.faults.conftest import StartSystem
from tests.faults.steady_load import Ask, SteadyLoad
from tests.system import Part, System
from tests.waiting import wait_until

LOAD, PREFILL, REPLAY, DECODE, END = "load", "prefill", "replay", "decode", "end"
WAITING, PREEMPTED = "waiting", "preempted"
SEED = int(os.environ.get("SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
#: A moment of the wanted kind comes within this time.
MOMENT_S = 120.0
#: A killed worker's work is taken over within this time, nearly always.
TAKEOVER_S = 20.0
#: A job whose log has not grown for so long, and so many times as long as another's on the same rank, is preempted.
STILL_S, TIMES_AS_LONG = 0.3, 4
#: So many tokens before its last one, a job is at its end.
LAST_TOKENS = 4
#: Losses before a token are held against a job: here, not even many of them.
SECTIONS: dict[str, dict[str, Any]] = {
    "worker": {
        "lease_seconds": 1.5,
        "renew_seconds": 0.2,
        "max_deliveries": 50,
        "flush_idle_ms": 50,
        "stall_timeout_seconds": 120,
    },
    "server": {"sync_wait_seconds": 600, "orphan_grace_seconds": 60},
}
#: The longest that a starting worker is left alone before it is killed.
LOAD_S = 3.0


@dataclass(frozen=True, slots=True)
class Held:
    """A job under way. `tokens`: in its log, `begun` of them when its attempt began; `limit`: what it may have;
    `still_s`: for how long the log has not grown."""

    token: str
    rank: str
    tokens: int
    begun: int
    limit: int
    still_s: float

    @property
    def phase(self) -> str:
        """Without those that only the rank knows."""
        if self.tokens == self.begun:
            return REPLAY if self.begun else PREFILL
        return END if self.tokens >= self.limit - LAST_TOKENS else DECODE


class Killer:
    """Kills the system's workers and starts them again at once, without waiting until they serve. `of_all`: the
    share of kills that hit all workers at once, so that nobody can take over until one is back."""

    def __init__(self, system: System, model: str, seed: int, *, of_all: float) -> None:
        self._system = system
        self._share_of_all = of_all
        self._keys = system.keys(model)
        self._client = connect(system.url, max_connections=1)
        self._ranks = RankRegistry(self._client, model)
        self._chance = random.Random(seed)
        self._grown: dict[str, tuple[int, float]] = {}
        #: Kills done, by phase.
        self.done: Counter[str] = Counter()
        #: Of these, such as hit all workers at once.
        self.of_all = 0
        #: Sessions that a rank preempted, as the ranks' last heartbeats before each look told.
        self.preempted = 0

    def close(self) -> None:
        """Close its connection."""
        self._client.connection_pool.disconnect()

    def plan(self, phases: Sequence[str], kills: int) -> list[str]:
        """So many phases in random order, all about equally often, the first of `phases` among them."""
        planned: list[str] = []
        while len(planned) < kills:
            planned += [phases[0], *self._chance.sample(phases[1:], len(phases) - 1)]
        return self._chance.sample(planned[:kills], kills)

    def kill(self, phase: str) -> None:
        """Wait for such a moment, and kill."""
        if phase == LOAD:
            self._kill_loading()
        elif phase == REPLAY:
            self._kill_replaying()
        else:
            self._kill_one_or_all(self._await_victim(phase))
        self.done[phase] += 1

    def _await_victim(self, phase: str, timeout_s: float = MOMENT_S) -> Part:
        """A worker in such a moment."""
        return wait_until(
            lambda: self._victim(phase), description=f"a moment of {phase}", timeout_s=timeout_s, every_s=0.005
        )

    def _kill_one_or_all(self, victim: Part) -> None:
        victims = [victim]
        if self._chance.random() < self._share_of_all:
            victims = self._system.workers
            self.of_all += 1
        self._restart(victims)

    @staticmethod
    def _restart(workers: Sequence[Part]) -> None:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.start()

    def _kill_replaying(self) -> None:
        """Kill a worker, and then whoever takes over its work. That moment is short and may be missed."""
        end_s = time.monotonic() + MOMENT_S
        while True:
            self._restart([self._await_victim(DECODE)])
            try:
                victim = self._await_victim(REPLAY, TAKEOVER_S)
            except AssertionError:
                if time.monotonic() > end_s:
                    raise
            else:
                self._kill_one_or_all(victim)
                return

    def _kill_loading(self) -> None:
        """Kill a worker, and kill it again as it starts."""
        worker = self._chance.choice(self._system.workers)
        served = True
        while served:
            self._restart([worker])
            end_s = time.monotonic() + self._chance.uniform(0, LOAD_S)
            while not (served := self._serves(worker)) and time.monotonic() < end_s:
                time.sleep(0.01)
        self._restart([worker])

    def _serves(self, worker: Part) -> bool:
        return any(rank.pid == worker.pid for rank in self._ranks.live())

    def _victim(self, phase: str) -> Part | None:
        """A worker that is in such a moment now."""
        facts = {rank.id: (rank.pid, rank.facts) for rank in self._ranks.live()}
        held = self._held()
        self.preempted = max([self.preempted, *(each["preempted_total"] for _, each in facts.values())])
        ranks = sorted({job.rank for job in held if self._is_in(phase, job, held, facts)} & facts.keys())
        pids = {facts[rank][0] for rank in ranks}
        found = [worker for worker in self._system.workers if worker.alive and worker.pid in pids]
        return self._chance.choice(found) if found else None

    @staticmethod
    def _is_in(phase: str, job: Held, held: Sequence[Held], facts: Mapping[str, tuple[int, Mapping[str, int]]]) -> bool:
        if job.rank not in facts:
            return False
        figures = facts[job.rank][1]
        if phase == WAITING:
            return figures["queue_depth"] > 0
        if phase == PREEMPTED:
            return (
                figures["preempted_total"] > 0
                and job.phase in (DECODE, END)
                and job.still_s > STILL_S
                and any(other.rank == job.rank and other.still_s * TIMES_AS_LONG < job.still_s for other in held)
            )
        return job.phase == phase

    def _held(self) -> list[Held]:
        """All jobs that are leased to a rank."""
        tokens = [token.decode() for token in self._client.zrange(self._keys.leases, 0, -1)]
        pipe = self._client.pipeline(transaction=False)
        for token in tokens:
            pipe.hmget(self._keys.job(token), "state", "rank", "tokens", "begun_tokens", "n", "options")
        records = pipe.execute()
        now_s = time.monotonic()
        found = []
        for token, (state, rank, logged, begun, choices, options) in zip(tokens, records, strict=True):
            if state != b"running":
                continue
            count = int(logged or 0)
            if self._grown.get(token, (-1, 0.0))[0] != count:
                self._grown[token] = (count, now_s)
            limit = int(choices) * json.loads(options)["max_tokens"]
            still_s = now_s - self._grown[token][1]
            found.append(Held(token, rank.decode(), count, int(begun or 0), limit, still_s))
        return found


def assert_survived(
    start_system: StartSystem,
    name: str,
    model: Mapping[str, Any],
    asks: Sequence[Ask],
    phases: Sequence[str],
    *,
    kills: int,
    clients: int,
    of_all: float,
) -> tuple[SteadyLoad, Killer]:
    """Two workers of one model under a steady load, killed so often: every client got what an undisturbed run gives,
    and nothing is left. Returns load and killer, for what else they have seen."""
    system = start_system(workers=2, sections=SECTIONS, models={name: model}, serves=name)
    load, killer = SteadyLoad(system, asks, clients=clients, seed=SEED), Killer(system, name, SEED, of_all=of_all)
    load.learn()
    load.start()
    plan = killer.plan(phases, kills)
    try:
        for number, phase in enumerate(plan, start=1):
            if load.problems:
                break
            killer.kill(phase)
            print(f"kill {number} of {kills}: {phase}; {load.done.total()} jobs have ended", flush=True)
    finally:
        load.stop()
        killer.close()
    told = f"seed {SEED}: kills {dict(killer.done)}, {killer.of_all} of all; jobs {dict(sorted(load.done.items()))}"
    print(told)
    assert load.problems == [], told
    assert load.taken_over, told
    system.assert_at_rest(timeout_s=30)
    with system.client() as client:
        assert leaking(client) == [], told
        assert client.xlen(system.keys(name).dead) == 0, told
    for part in [*system.apis, *system.workers]:
        assert "Traceback" not in part.output(), f"{told}\n{part.output()[-4000:]}"
    return load, killer

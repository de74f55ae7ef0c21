"""A model's Programs on a real state server, driven by hand: every process's part is one call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Program
from pool.rules.programs.resume import plan_rank
from pool.store.audit import Audit
from pool.store.connection import Client, connect
from pool.store.handouts import Handout, Write, Written
from pool.store.ids import JobRef
from pool.store.jobs import JobStore
from pool.store.placements import Outcome
from pool.store.program_delivery import ProgramDelivery
from pool.store.program_endings import Terms
from pool.store.program_keys import ProgramKeys, program_id_of
from pool.store.program_records import Arrival, Stored
from pool.store.program_upkeep import ProgramUpkeep
from pool.store.programs import Applied, Operation, ProgramStore, operations_of
from tests.builders import LEASE_MS, RESULT_TTL_MS, completed, job_store, new_job, swept_steadily

TENANT = "acme"
#: Where the times of a Program that waits stand in what its rank shows (pool/store/program_waiters.py).
SHOWN = {"queued_ms": 1, "force_ms": 4, "finish_ms": 10, "activated_ms": 11}


def settings(**fields: Any) -> ProgramSettings:
    """Programs of 100 tokens beside their context, forced after five minutes."""
    return ProgramSettings(enabled=True, **fields)


def pid(name: str) -> str:
    """The stored id of a Program of the scene's tenant."""
    return program_id_of(TENANT, name)


@dataclass
class Scene:
    """The store, the upkeep, and a worker's side for each rank that has joined."""

    client: Client
    url: str
    settings: ProgramSettings = field(default_factory=settings)
    workers: dict[str, ProgramDelivery] = field(default_factory=dict)
    #: Processes that had a rank before.
    ghosts: list[ProgramDelivery] = field(default_factory=list)
    max_deliveries: int = 3
    lease_ms: int = LEASE_MS

    def __post_init__(self) -> None:
        self.jobs: JobStore = job_store(self.client, cap=1000)
        self.store = ProgramStore(self.client, self.jobs, "tiny", self.settings)
        self.terms = Terms(self.max_deliveries, RESULT_TTL_MS, letters_kept=100, lease_ms=self.lease_ms)
        self.upkeep = ProgramUpkeep(self.store, self.terms)
        self.keys: ProgramKeys = self.store.keys

    def close(self) -> None:
        """Close the workers' connections."""
        for worker in [*self.workers.values(), *self.ghosts]:
            worker.reader.connection_pool.disconnect()
            worker.writer.connection_pool.disconnect()

    def join(self, rank: str, incarnation: str) -> ProgramDelivery:
        """A process takes a rank."""
        self.upkeep.join(rank, incarnation)
        if rank in self.workers:
            self.ghosts.append(self.workers[rank])
        worker = ProgramDelivery(
            reader=connect(self.url, max_connections=1),
            writer=connect(self.url, max_connections=1),
            model="tiny",
            rank=rank,
            lease_ms=self.lease_ms,
            result_ttl_ms=RESULT_TTL_MS,
            incarnation=incarnation,
        )
        worker.heal()
        self.workers[rank] = worker
        return worker

    def arrive(self, name: str, *, home: str = "a", tokens: int = 100, **fields: Any) -> JobRef:
        """A request of a Program; the id of its job."""
        job = new_job(tenant=TENANT, **fields.pop("job", {}))
        arrival = replace(Arrival(TENANT, name, tokens, force_ms=300_000), **fields)
        self.store.arrive(job, arrival, home=home, is_up=home in self.workers)
        return job.ref

    def plan(self, rank: str = "a", limit: int = 10) -> Applied:
        """What a planner does for a rank."""
        seen = self.store.snapshot(rank)
        plan = plan_rank(seen.rank, self.settings, seen.now_ms, limit)
        return self.store.apply(seen, operations_of(plan, seen))

    def pause(self, name: str, why: str, rank: str = "a") -> Applied:
        """One pause, as a plan."""
        return self.store.apply(self.store.snapshot(rank), [Operation("pause", pid(name), why)])

    def take(self, rank: str = "a", room: int = 10) -> list[Handout]:
        """What the rank's worker begins; jobs on trial as if it ran nothing else."""
        worker = self.workers[rank]
        if self.client.exists(worker.keys.queue) and not self.client.xlen(worker.keys.queue):
            # A server takes its time to end a read that finds nothing.
            return []
        taken = worker.take(room, 1)
        alone = [worker.begin_alone(entry) for entry in taken.alone]
        return taken.handouts + [found for found in alone if isinstance(found, Handout)]

    def end(self, handout: Handout, rank: str = "a", worker: ProgramDelivery | None = None, **fields: Any) -> Written:
        """A worker completes a request, by default without keeping its place; it declares what it is asked to."""
        outcome = Outcome(**{"prompt_tokens": 100, "context_tokens": 110} | fields)
        write = Write(handout.lease, handout.logged, (), replace(completed("x"), outcome=outcome))
        by = worker or self.workers[rank]
        (answer,) = by.write([write])
        if answer.code == "resend" and handout.lease.placement is not None and handout.lease.placement.front:
            (answer,) = by.write([write])
        return answer

    def record(self, name: str) -> Stored | None:
        """The Program's record."""
        return self.store.read(pid(name))

    def field(self, name: str, wanted: str) -> str:
        """One field of it, "" where it is absent."""
        stored = self.record(name)
        return stored.text(wanted) if stored is not None else ""

    def seen(self, name: str, rank: str = "a") -> Program | None:
        """The Program as a snapshot of the rank shows it."""
        view = self.store.snapshot(rank).rank
        return next((each for each in (*view.programs, *view.waiting) if each.id == pid(name)), None)

    def book(self, rank: str = "a") -> dict[str, str]:
        """The rank's book."""
        found = self.client.hgetall(self.keys.place(rank)["book"])
        return {name.decode(): value.decode() for name, value in found.items()}

    def lose(self, rank: str, incarnation: str, *, leaves: bool = False) -> bool:
        """A rank is lost, and no gap in the sweeps keeps it."""
        swept_steadily(self.client)
        return self.upkeep.lose(rank, incarnation, leaves=leaves)

    def due(self, kind: str, name: str) -> None:
        """The Program's timer of this kind is due now, and no gap in the sweeps puts it off."""
        swept_steadily(self.client)
        self.client.zadd(self.keys.program_timers, {f"{kind}:{pid(name)}": 1}, xx=True)

    def shift(self, program: str, by_ms: int, *fields: str) -> None:
        """Times of a Program's record, and what its rank shows of them while it waits, are so much later."""
        for each in fields:
            moved = self.client.hincrby(self.keys.record(program), each, by_ms)
            waiters = self.keys.place(self.client.hget(self.keys.record(program), "rank").decode())["waiters"]
            shown = self.client.hget(waiters, program)
            if shown is not None and each in SHOWN:
                parts = shown.decode().split(":")
                parts[SHOWN[each]] = str(moved)
                self.client.hset(waiters, program, ":".join(parts))

    def state(self, ref: JobRef) -> str:
        """The state of a job."""
        return self.jobs.read(ref).state

    def sound(self) -> bool:
        """Whether an audit finds nothing; what it finds is shown."""
        found = Audit(self.client, "tiny").run()
        assert found == []
        return True

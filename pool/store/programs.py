"""Programs of one model in Redis: arrivals, snapshots of ranks, and plans carried out. No policy: `pool.rules` decides.

Any process may call any of this at any time: each verb is atomic, checks what it relies on, and says what it did.
`pool/store/program_upkeep.py` has what is due by time and by the loss of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import Reason
from pool.rules.programs.capacity import FRESH_INTERVALS
from pool.rules.programs.facts import PauseReason
from pool.rules.programs.resume import RankPlan
from pool.rules.programs.tokens import FIRST_COEFFICIENT
from pool.store.accepting import Accepted
from pool.store.connection import Client, state_errors
from pool.store.jobs import JobStore
from pool.store.program_endings import Declared, run_declared
from pool.store.program_keys import ProgramKeys, program_id_of
from pool.store.program_records import Arrival, Stored, stored_of
from pool.store.program_views import Outline, Snapshot, outlines, snapshot
from pool.store.records import NewJob
from pool.store.running import run
from pool.store.scripts import Command, script

#: Operations of one plan; those behind them wait for the next.
MOST_OPERATIONS = 30
#: How long one planner keeps others from planning for the same rank. It only saves work.
CLAIM_MS = 200


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a plan. `kind`: admit, force, pause or mark; `why`: the reason as it is told; `token`: of the request
    that an admission dispatches; `figures`: of its decision, in tokens: used, required, reserved for growth."""

    kind: str
    program: str
    why: str
    token: str = ""
    figures: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a plan. `code`: ok, version (it was made on an older one: nothing was done) or away (the rank is);
    `refused`: (Program, why) of the operations that were not carried out; `version`: of the book now."""

    code: str
    version: int = 0
    refused: tuple[tuple[str, str], ...] = ()


def operations_of(plan: RankPlan, seen: Snapshot) -> list[Operation]:
    """A plan of the rules as operations, in their order."""
    pauses = [Operation("pause", program, reason.value) for program, reason in plan.pauses]
    marks = [Operation("mark", program, PauseReason.CAPACITY_REPAIR.value) for program in plan.marks]
    admissions = [
        Operation(
            "force" if decision.reason is Reason.FORCED else "admit",
            decision.program,
            decision.reason.value,
            seen.fronts.get(decision.program, ""),
            (decision.used_tokens, decision.required_tokens, round(decision.reserve_tokens)),
        )
        for decision in plan.admissions
    ]
    return [*pauses, *marks, *admissions]


@dataclass
class ProgramWay:
    """How a job of a Program comes in. `rank`: where the Program probably is; `home`: gives the rank to bind it to;
    `rebound`: takes a Program off a rank that lost it, and gives its new rank; `where`: what became of the job."""

    keys: ProgramKeys
    settings: ProgramSettings
    arrival: Arrival
    program: str
    rank: str
    rebound: Callable[[str, str], str]
    others_up: bool = True
    where: str = ""
    generation: int = field(default=-1)

    def command(self, job: NewJob, accepted: Accepted) -> Command:
        """arrive."""
        arrival = self.arrival
        fields = [*accepted["fields"], *arrival.job_fields()]  # type: ignore[misc]
        return script("arrive")(
            **accepted | {"fields": fields},
            **self.keys.of(self.program),
            at=self.keys.place(self.rank),
            id=self.program,
            rank=self.rank,
            elsewhere=int(self.others_up),
            priority=arrival.priority,
            expected="" if arrival.expected_tokens is None else arrival.expected_tokens,
            tokens=arrival.tokens,
            force=arrival.force_ms,
            deadline_force=arrival.deadline_ms,
            most_programs=arrival.max_programs,
            facts=[*arrival.facts(self.settings), *(("last", job.ref.token) if arrival.ends else ())],
            first=arrival.first(),
        )

    def leads_on(self, code: bytes, detail: Sequence[bytes]) -> bool:
        """A Program that is elsewhere is followed; one that its rank has lost is bound anew first."""
        if code == b"moved":
            self.rank = detail[1].decode()
            return True
        if code == b"stale":
            rank = self.rebound(self.program, self.rank)
            # Where it finds no other, it waits where it is.
            self.others_up = rank != self.rank
            self.rank = rank
            return True
        if code == b"ok":
            self.where, self.generation = detail[1].decode(), int(detail[2])
        return False


class ProgramStore:
    """Programs of one model. All methods raise StateUnavailable."""

    def __init__(
        self, client: Client, jobs: JobStore, model: str, settings: ProgramSettings, *, shard: int = 0
    ) -> None:
        self.client = client
        self.jobs = jobs
        self.settings = settings
        self.keys = ProgramKeys(f"{model}:{shard}")

    def arrive(
        self, job: NewJob, arrival: Arrival, *, home: str, is_up: bool = True, key: str | None = None
    ) -> ProgramWay:
        """Accept a job of a Program, as JobStore.submit accepts others. `home`: the rank to bind it to where it is new,
        or where its own rank is away; "" with no rank up; `is_up`: whether `home` is. What is given back says where the
        job went ("" for one that was there already), and the Program's generation."""
        program = program_id_of(arrival.tenant, arrival.name)

        def rebound(lost: str, rank: str) -> str:
            self.displace(lost, rank)
            return home if home == rank or self.rebind(lost, rank, home, "failover") is not None else rank

        # One that is bound elsewhere says so itself.
        way = ProgramWay(self.keys, self.settings, arrival, program, home, rebound, is_up)
        self.jobs.submit(job, key=key, way=way)
        return way

    def bound(self, program: str) -> tuple[str | None, list[str]]:
        """The rank that a Program is bound to, None where there is no such Program, and the ranks of the ring."""
        pipe = self.client.pipeline(transaction=False)
        pipe.hget(self.keys.record(program), "rank")
        pipe.zrange(self.keys.members, 0, -1)
        with state_errors():
            rank, members = pipe.execute()
        return None if rank is None else rank.decode(), [member.decode() for member in members]

    def read(self, program: str) -> Stored | None:
        """The record of a Program, None where there is none."""
        with state_errors():
            return stored_of(program, self.client.hgetall(self.keys.record(program)))

    def parent_of(self, program: str) -> str | None:
        """The stored id of a Program's parent; None for a root, and for one that is not there."""
        with state_errors():
            parent = self.client.hget(self.keys.record(program), "parent")
        return None if parent is None else parent.decode()

    def was_released(self, program: str) -> bool:
        """Whether a generation of it has been released not long ago."""
        with state_errors():
            return bool(self.client.exists(self.keys.of(program)["gone"]))

    def coefficient(self, door: str) -> float:
        """Tokens that a byte of a prompt is taken for, as learnt from those that came through this door."""
        with state_errors():
            learnt = self.client.hget(self.keys.coefficients, door)
        return FIRST_COEFFICIENT if learnt is None else float(learnt)

    def snapshot(self, rank: str) -> Snapshot:
        """What the rules see of a rank."""
        with state_errors():
            return snapshot(self.client, self.keys, rank, self.settings)

    def outlines(self, ranks: Sequence[str]) -> list[Outline]:
        """What the choice of a first rank looks at."""
        with state_errors():
            return outlines(self.client, self.keys, ranks, self.settings)

    def turn(self) -> int:
        """A number that goes up with every call: `program_round_robin` goes by it."""
        with state_errors():
            return int(self.client.hincrby(self.keys.placement, "turn", 1))

    def settle(self, rank: str, version: int) -> Applied:
        """Nothing is to be done for a rank, as it was at this version of its book."""
        return self._apply(rank, version, [], capacity_tokens=None)

    def tell(self, rank: str, source: str) -> None:
        """Note which source of capacity logs have told of a rank, so that each change is told once."""
        with state_errors():
            self.client.hset(self.keys.place(rank)["book"], "told", source)

    def apply(self, seen: Snapshot, operations: Sequence[Operation], *, version: int | None = None) -> Applied:
        """Carry out a plan made on `seen`, the first MOST_OPERATIONS of it, and take the rank off the list of those
        that need one, unless something was refused or left out. `version`: where the caller itself has raised it."""
        current = seen.version if version is None else version
        return self._apply(seen.rank.id, current, operations, capacity_tokens=seen.rank.capacity_tokens)

    def _apply(
        self, rank: str, version: int, operations: Sequence[Operation], *, capacity_tokens: int | None
    ) -> Applied:
        now, keys = operations[:MOST_OPERATIONS], self.keys
        records: list[str] = []
        for each in now:
            record = keys.record(each.program)
            records += [record, keys.pool(each.program), keys.job(each.token) if each.token else record]
        command = script("apply")(
            at=keys.place(rank),
            records=records,
            rank=rank,
            version=version,
            most=self.settings.max_active_programs_per_target,
            capacity=capacity_tokens or 0,
            fresh=round(FRESH_INTERVALS * self.settings.metrics_interval_seconds * 1000),
            more=int(len(now) < len(operations)),
            ids=[each.program for each in now],
            kinds=[each.kind for each in now],
            details=[f"{each.token} {each.why}" if each.token else each.why for each in now],
            figures=["" if each.figures is None else "{} {} {}".format(*each.figures) for each in now],
        )
        with state_errors():
            code, *rest = run(self.client, command)
        if code != b"ok":
            return Applied(code.decode(), int(rest[0]) if rest else 0)
        return Applied("ok", int(rest[0]), tuple((p.decode(), why.decode()) for p, why in rest[1:]))

    def rebind(self, program: str, rank: str, other: str, why: str) -> int | None:
        """Bind a Program without a place to another rank; the version of its book, None where it has one or is gone."""

        def build(declared: Declared) -> Command:
            now = declared.rank
            return script("rebind")(
                to=self.keys.place(other),
                at=self.keys.place(now),
                **self.keys.of(program),
                id=program,
                rank=now,
                other=other,
                why=why,
            )

        with state_errors():
            code, *rest = run_declared(self.client, self.keys, program, build, rank)
        return int(rest[0]) if code == b"ok" else None

    def relocate(self, seen: Snapshot, operation: Operation, source: str) -> Applied:
        """Admit a Program on the rank of `seen` that waits for `source`. Interrupted, it waits for the new one."""
        version = self.rebind(operation.program, source, seen.rank.id, "relocation")
        if version != seen.version + 1:
            return Applied("version", version or 0)
        return self.apply(seen, [operation], version=version)

    def displace(self, program: str, rank: str) -> bool:
        """An idle Program loses a place that its rank has lost; whether it had one."""
        with state_errors():
            reply = run_declared(
                self.client,
                self.keys,
                program,
                lambda declared: script("displace")(
                    at=self.keys.place(declared.rank), **self.keys.of(program), id=program, rank=declared.rank
                ),
                rank,
            )
        return bool(reply[0] == b"paused")

    # -- who plans --------------------------------------------------------------------------------------------------

    def dirty(self, most: int = 16) -> list[str]:
        """Ranks where something has changed that nobody has planned for, longest ago first."""
        with state_errors():
            return [rank.decode() for rank in self.client.zrange(self.keys.dirty, 0, most - 1)]

    def claim(self, what: str, planner: str, for_ms: int = CLAIM_MS) -> bool:
        """Whether this planner shall plan for a rank, "" for the model's tick. Only advice: two planners at once do no
        harm."""
        with state_errors():
            holder = self.client.set(self.keys.claim(what), planner, px=for_ms, nx=True, get=True)
        return holder is None or holder.decode() == planner

    def unclaim(self, what: str) -> None:
        """It is done."""
        with state_errors():
            self.client.delete(self.keys.claim(what))

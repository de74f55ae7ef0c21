"""Many Programs of one model on a real state server, and what happens to one in a turn: arrival, decision, end.

All of it is done by the store's own verbs, but for the mass: one Program of each kind is made by them, and copied
inside the server (`program_copies.lua`). An audit finds nothing wrong with either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.replay import recorded, replay
from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import State, Status
from pool.rules.programs.resume import plan_rank
from pool.rules.programs.windows import ContinuitySample, PauseSample, RequestSample
from pool.store.connection import Client, connect
from pool.store.handouts import Ending, Handout, Write
from pool.store.ids import new_ref
from pool.store.jobs import JobStore
from pool.store.placements import Outcome
from pool.store.program_delivery import ProgramDelivery
from pool.store.program_endings import Terms
from pool.store.program_keys import program_id_of
from pool.store.program_records import Arrival
from pool.store.program_upkeep import Look, ProgramUpkeep
from pool.store.programs import ProgramStore, operations_of
from pool.store.records import NewJob, Output

MODEL = "crowd"
TENANT = "acme"
SEAT = "seat"
#: Of every Program: what the coding agents of the traces send on average.
CONTEXT_TOKENS = 118_000
BUFFER_TOKENS = 100
#: Places of a rank; one of them is free before a decision.
PLACES = 7
#: Room for the growth that is reserved for those that are active; less than one more Program needs.
GROWTH_TOKENS = 80_000
#: Of the Programs without a place, those that wait for one; the others' tools run.
WAITING_SHARE = 0.3
#: No deadline passes while it is measured.
LONG_MS = 3_600_000
COPIES = Path(__file__).with_suffix("").with_name("program_copies.lua")
#: Programs that one call copies, and admissions of one plan at most.
BATCH = 500
LIMIT = 10

SETTINGS = ProgramSettings(
    enabled=True,
    token_capacity_per_dp_rank=PLACES * (CONTEXT_TOKENS + BUFFER_TOKENS) + GROWTH_TOKENS,
    decode_buffer_tokens=BUFFER_TOKENS,
    force_resume_timeout_seconds=LONG_MS / 1000,
    queue_timeout_seconds=LONG_MS / 1000,
)


def name_of(number: int) -> str:
    """What its tenant calls a Program."""
    return f"agent-{number}"


def shares(programs: int, ranks: int) -> dict[str, int]:
    """Programs of each rank by kind: idle ones, whose tool runs; active ones; those that wait."""
    each = programs // ranks
    active = min(PLACES - 1, each - 1)
    waiting = round((each - active) * WAITING_SHARE) if each > 1 else 0
    return {"idle": each - active - waiting, "active": active, "waiting": waiting}


@dataclass
class Crowd:
    """`programs` Programs over `ranks` ranks. `idle`: names of those of each rank that may send a request next."""

    client: Client
    programs: int
    ranks: int
    idle: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    #: CPU seconds of the server's main thread for the last `decide_at_once`.
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.jobs = JobStore(self.client, result_ttl_ms=60_000, pending_per_model=10**9)
        self.store = ProgramStore(self.client, self.jobs, MODEL, SETTINGS)
        self.keys = self.store.keys
        self.upkeep = ProgramUpkeep(self.store, Terms(3, 60_000, letters_kept=100, lease_ms=6000))
        self.names = [f"rank-{number:04}" for number in range(self.ranks)]
        self._workers = {
            rank: ProgramDelivery(
                reader=self.client,
                writer=self.client,
                model=MODEL,
                rank=rank,
                lease_ms=LONG_MS,
                result_ttl_ms=60_000,
                incarnation=SEAT,
            )
            for rank in self.names
        }

    # -- filling ------------------------------------------------------------------------------------------------------

    def fill(self) -> dict[str, int]:
        """Make everything. Bytes of the server's memory that each kind of Program takes, by kind."""
        for rank in self.names:
            self.upkeep.join(rank, SEAT)
            self._workers[rank].heal()
            self._fill_windows(rank)
        counts = shares(self.programs, self.ranks)
        kinds = [kind for kind, count in counts.items() if count]
        first = self.names[0]
        templates = {kind: self._made(kind, first, name_of(at)) for at, kind in enumerate(kinds)}
        numbers = iter(range(len(kinds), self.programs))
        sizes: dict[str, int] = {}
        for kind, template in templates.items():
            others = [rank for rank in self.names for _ in range(counts[kind])][1:]
            before_bytes = self._memory_bytes()
            self._copy(template, kind, others, numbers)
            sizes[kind] = round((self._memory_bytes() - before_bytes) / len(others))
        return sizes

    def _fill_windows(self, rank: str) -> None:
        place, size = self.keys.place(rank), SETTINGS.stats_window_size
        request = RequestSample(CONTEXT_TOKENS, 436, 117_000, 1848, 12.0, 9.0, 0.5, 3, 1_000_000)
        with self.client.pipeline(transaction=False) as pipe:
            pipe.rpush(place["requests"], *[request.packed()] * size)
            pipe.rpush(place["continuity"], *[ContinuitySample(9.0, 30.0).packed()] * size)
            pipe.rpush(place["segments"], *[PauseSample(3).packed()] * size)
            pipe.execute()

    def _made(self, kind: str, rank: str, name: str) -> str:
        """A Program by the store's verbs, in this state; its id."""
        self.arrive(rank, name)
        self.decide(rank)
        self.end(rank, ttl_ms=LONG_MS if kind == "active" else 0)
        if kind == "waiting":
            self.arrive(rank, name)
        if kind != "idle":
            # `end` took it for one that may send the next request.
            self.idle[rank].remove(name)
        return program_id_of(TENANT, name)

    def _copy(self, template: str, kind: str, ranks: Sequence[str], numbers: Iterator[int]) -> None:
        script = self.client.register_script(COPIES.read_text(encoding="utf-8"))
        prefix = self.keys.record("").removesuffix("program:")
        for start in range(0, len(ranks), BATCH):
            part = ranks[start : start + BATCH]
            mine = [next(numbers) for _ in part]
            pairs = [(program_id_of(TENANT, name_of(number)), rank) for number, rank in zip(mine, part, strict=True)]
            script(args=[prefix, template, mine[0], *(item for pair in pairs for item in pair)])
            if kind == "idle":
                for number, rank in zip(mine, part, strict=True):
                    self.idle[rank].append(name_of(number))

    def _memory_bytes(self) -> int:
        return int(self.client.info("memory")["used_memory"])

    # -- a turn -------------------------------------------------------------------------------------------------------

    def arrive(self, rank: str, name: str) -> None:
        """A Program sends a request, and waits for the rank."""
        job = NewJob(
            new_ref("chat", MODEL),
            "chat",
            options='{"max_tokens":436,"temperature":0.0}',
            input="",
            seed=7,
            prompt=b"\1\0\0\0",
            prompt_tokens=1,
            tenant=TENANT,
            queue_timeout_ms=LONG_MS,
        )
        arrival = Arrival(TENANT, name, CONTEXT_TOKENS, force_ms=LONG_MS)
        if self.store.arrive(job, arrival, home=rank).where != "waiting":
            raise RuntimeError("a Program that was to wait went on at once")

    def next_arrives(self, rank: str) -> None:
        """The one whose tool has run longest sends a request."""
        self.arrive(rank, self.idle[rank].pop(0))

    def decide(self, rank: str) -> None:
        """One decision, as a planner makes it. Raises RuntimeError unless it admits exactly one Program."""
        seen = self.store.snapshot(rank)
        plan = plan_rank(seen.rank, SETTINGS, seen.now_ms, LIMIT)
        applied = self.store.apply(seen, operations_of(plan, seen))
        if applied.code != "ok" or applied.refused or len(plan.admissions) != 1:
            raise RuntimeError(f"a decision admitted {len(plan.admissions)} Programs: {applied}")

    def end(self, rank: str, *, ttl_ms: int = 0) -> None:
        """The rank's worker runs what was admitted to its end, and reports that its KV is gone."""
        worker = self._workers[rank]
        (handout,) = worker.take(10, 1).handouts
        placement = handout.lease.placement
        assert placement is not None
        self._complete(worker, handout, ttl_ms)
        name = self.client.hget(self.keys.record(placement.program), "name").decode()
        self.idle[rank].append(name)
        if ttl_ms == 0:
            self._look(rank, placement.program)

    def _complete(self, worker: ProgramDelivery, handout: Handout, ttl_ms: int) -> None:
        outcome = Outcome(CONTEXT_TOKENS, CONTEXT_TOKENS, ttl_ms=ttl_ms, automatic_ms=ttl_ms)
        ending = Ending("completed", (Output("x", "stop", 1),), prompt_tokens=1, outcome=outcome)
        (written,) = worker.write([Write(handout.lease, 0, (), ending)])
        if written.code != "ok":
            raise RuntimeError(f"a request could not end: {written}")

    def _look(self, rank: str, gone: str) -> None:
        seconds, micros = self.client.time()
        rank_set, moved = (
            self.client.hget(self.keys.placement, "ranks"),
            self.client.hget(self.keys.place(rank)["book"], "moved"),
        )
        look = Look(seconds * 1000 + micros // 1000, int(rank_set), int(moved), None, gone=(gone,))
        if not self.upkeep.observe(rank, SEAT, look):
            raise RuntimeError("an observation was dropped")

    def decide_at_once(self, ranks: Sequence[str]) -> None:
        """Decisions for all these ranks, the commands of many at once. Raises RuntimeError as `decide`."""
        decisions = [recorded(self.client, partial(self.decide, rank)) for rank in ranks]
        path = self.client.connection_pool.connection_kwargs["path"]
        self.busy_s = -main_thread_s(self.client)
        replies = replay(path, decisions)
        self.busy_s += main_thread_s(self.client)
        if any(code != b"ok" or refused for code, _, *refused in replies):
            raise RuntimeError("a decision that was recorded could not be carried out")

    # -- the linear scan ----------------------------------------------------------------------------------------------

    def decide_by_scan(self, rank: str) -> None:
        """The same decision by who keeps no order: all Programs are read, and those of the rank looked at."""
        base = self.store.snapshot(rank)
        ids = [key.rpartition(b":")[2].decode() for key in self.client.scan_iter(self.keys.record("*"), count=1000)]
        stored = [found for each in ids if (found := self.store.read(each)) is not None]
        programs = [each.program() for each in stored if each.text("rank") == rank]
        waiting = [each for each in programs if each.state is State.PAUSED and each.status is Status.REASONING]
        assert {each.id for each in waiting} >= {each.id for each in base.rank.waiting}
        plan = plan_rank(base.rank, SETTINGS, base.now_ms, LIMIT)
        self.store.apply(base, operations_of(plan, base))


def main_thread_s(client: Client) -> float:
    """CPU seconds that the server's main thread has used: it carries out all commands."""
    cpu = client.info("cpu")
    return float(cpu["used_cpu_user_main_thread"]) + float(cpu["used_cpu_sys_main_thread"])


def crowd_of(url: str, programs: int, ranks: int) -> Crowd:
    """A crowd over one connection."""
    return Crowd(connect(url, max_connections=1, timeout_s=60), programs, ranks)

"""Programs as plain objects: what the state server should hold after each event, by the words of docs/programs.md."""

from __future__ import annotations

from dataclasses import dataclass, field

from pool.rules.programs.tokens import ContextEstimate
from pool.store.handouts import Handout

#: Tenant and name.
Key = tuple[str, str]


@dataclass
class Job:
    """`state`: queued, running, or how it ended; `handout`: that of its current attempt; `ends`: its Program is over
    with it."""

    key: Key
    state: str = "queued"
    handout: Handout | None = None
    ends: bool = False


@dataclass
class Program:
    """`pool`, `flight`: tokens of jobs that wait, and that are with the rank; `seat`: the process that has its place;
    `timer`: the one that ends it while it is idle; `last`: the job that came last, if its Program is over with it."""

    gen: int
    rank: str
    active: bool = False
    seat: str = ""
    pool: list[str] = field(default_factory=list)
    flight: list[str] = field(default_factory=list)
    mark: bool = False
    ending: bool = False
    last: str = ""
    yielded: bool = False
    completed: int = 0
    context: ContextEstimate = field(default_factory=ContextEstimate)
    timer: str = ""


class World:
    """All of a model's Programs, jobs and ranks. `seats`: the process of each rank, "" while it is away; `closing`: the
    one that left it last, and may still end what it has begun."""

    def __init__(self) -> None:
        self.seats: dict[str, str] = {"": ""}
        self.closing: dict[str, str] = {}
        self.programs: dict[Key, Program] = {}
        self.gone: dict[Key, int] = {}
        self.jobs: dict[str, Job] = {}

    def stale(self, program: Program) -> bool:
        """Whether the rank has lost the Program's place."""
        return program.active and program.seat != self.seats[program.rank]

    def may_end(self, program: Program) -> bool:
        """Whether what the Program's process has begun may still end there."""
        return not self.stale(program) or program.seat == self.closing.get(program.rank, "")

    # -- places -----------------------------------------------------------------------------------------------------

    def arrive(self, key: Key, token: str, tokens: int, home: str, *, ends: bool = False) -> None:
        """A request comes in."""
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = Program(self.gone.get(key, -1) + 1, home)
        else:
            self._move(program, home)
        self.jobs[token] = Job(key, ends=ends)
        program.ending, program.last = False, token if ends else ""
        program.context = program.context.observed(tokens, is_authoritative=False)
        if program.active and not program.mark and not program.pool and not self.stale(program):
            program.flight.append(token)
            program.timer = ""
            return
        program.pool.append(token)
        if not program.active:
            program.timer = ""

    def _move(self, program: Program, home: str) -> None:
        """An idle Program whose rank is away, or has lost its place, goes to its new home."""
        if self.stale(program) and not program.flight:
            self.pause(program, "")
            program.rank = home
        elif not program.active and not program.pool and self.seats[home] and not self.seats[program.rank]:
            program.rank = home

    def admit(self, program: Program) -> None:
        """It becomes active, and its front request goes to the rank."""
        program.active, program.seat, program.yielded, program.mark = True, self.seats[program.rank], False, False
        program.flight.append(program.pool.pop(0))

    def pause(self, program: Program, why: str) -> None:
        """It loses its place; it waits if it has a request, else it is idle."""
        program.active, program.seat, program.mark = False, "", False
        program.yielded = why == "max_segment_yield"
        program.timer = "" if program.pool else "retention"

    def release(self, key: Key) -> None:
        """It is over."""
        self.gone[key] = self.programs.pop(key).gen

    # -- ends of jobs -----------------------------------------------------------------------------------------------

    def end(self, token: str, state: str, *, ttl: bool = False) -> None:
        """A job ends, wherever it is."""
        job = self.jobs[token]
        job.state, job.handout = state, None
        program = self.programs[job.key]
        if token in program.pool:
            self._withdraw(job.key, program, token)
        else:
            done = state == "completed"
            self._rest(job.key, program, token, completed=done, ttl=ttl, ends=done and job.ends)

    def _withdraw(self, key: Key, program: Program, token: str) -> None:
        program.pool.remove(token)
        if program.active or program.pool:
            return
        if program.ending or not program.completed:
            self.release(key)
        else:
            program.timer = "retention"

    def _rest(self, key: Key, program: Program, token: str, *, completed: bool, ttl: bool, ends: bool) -> None:
        program.flight.remove(token)
        program.ending = program.ending or (ends and program.last == token)
        if program.flight:
            return
        stale = self.stale(program)
        if program.pool and not stale:
            program.mark = False
            program.flight.append(program.pool.pop(0))
        elif not program.pool and (program.ending or ends or not (completed or program.completed)):
            self.release(key)
        elif completed and ttl and not program.mark and not stale:
            program.timer = "ttl"
        else:
            self.pause(program, "")

    def put_back(self, token: str) -> None:
        """A job that was with a rank goes back: to the end of its stream, or, where the rank lost it, to the pool."""
        job = self.jobs[token]
        job.state, job.handout = "queued", None
        program = self.programs[job.key]
        program.flight.remove(token)
        if not self.stale(program):
            program.flight.append(token)
            return
        program.pool.insert(0, token)
        if not program.flight:
            self.pause(program, "")

    def drain(self, rank: str) -> None:
        """All that former processes of the rank had goes back, but for what one that leaves may still end."""
        for program in self.programs.values():
            if program.rank != rank or not self.stale(program):
                continue
            if not program.flight:
                self.pause(program, "")
            for token in reversed(program.flight.copy()):
                if self.jobs[token].state == "queued" or not self.may_end(program):
                    self.put_back(token)

    def finish(self, key: Key) -> None:
        """Its owner says that it is over."""
        program = self.programs.get(key)
        if program is None:
            return
        program.ending = True
        for token in program.pool.copy():
            self.end(token, "cancelled")
        if key in self.programs and not program.flight:
            self.release(key)

    # -- time -------------------------------------------------------------------------------------------------------

    def due(self, kind: str, key: Key) -> None:
        """A Program's timer is carried out."""
        program = self.programs[key]
        if kind == "retention":
            self.release(key)
        else:
            program.timer = ""
            self.pause(program, "ttl_expired")

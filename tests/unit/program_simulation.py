"""One rank, played: Programs that come, run, use tools and come back, under the rules as the store applies them.

Time is a number. The engine is simple: a request takes its time whatever the batch, and KV that was told to go is gone
a step later. The order of work is that of the rules: on a completion the yield check, then TTLs, repair, resumes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import decide, standing_of
from pool.rules.programs.facts import Means, Program, Rank, State, Status, Waiting
from pool.rules.programs.force import force_ms
from pool.rules.programs.repair import plan_repair
from pool.rules.programs.resume import plan_rank, yields
from pool.rules.programs.tokens import private_tokens

STEP_MS = 50
BATCH = 8


@dataclass
class Agent:
    """What a Program does: `requests` of `service_ms` each, with tools for `tool_ms` between them. After the first it
    starts `children` and goes on when all have ended. `again_ms`: it comes back as a new Program so long after its end,
    for as long as the simulation runs."""

    id: str
    tokens: int
    requests: int = 1
    service_ms: int = 500
    tool_ms: int = 0
    comes_ms: int = 0
    again_ms: int | None = None
    children: tuple[Agent, ...] = ()
    awaited_by: tuple[str, ...] = ()


@dataclass
class Simulation:
    """`waits_ms`: how long each Program waited for each of its places, with its force wait; `ended_ms`: by Program."""

    settings: ProgramSettings
    capacity: int = 1000
    ttl_ms: int = 0
    means: Means = field(default_factory=Means)
    now_ms: int = 0
    agents: dict[str, Agent] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    until_ms: dict[str, int] = field(default_factory=dict)
    ttl_at_ms: dict[str, int] = field(default_factory=dict)
    leaving: list[tuple[int, int]] = field(default_factory=list)
    waits_ms: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    ended_ms: dict[str, int] = field(default_factory=dict)
    pauses: int = 0

    def add(self, agents: Iterable[Agent]) -> None:
        """Agents that will come at their time."""
        for agent in agents:
            self.agents[agent.id] = agent
            self.left[agent.id] = agent.requests
            self.until_ms[agent.id] = agent.comes_ms

    def run(self, until_ms: int) -> None:
        """Step by step until that time, or until nobody is left."""
        while self.now_ms < until_ms and self.agents:
            self.now_ms += STEP_MS
            self.step()

    def snapshot(self) -> Rank:
        """What the rules see."""
        active = tuple(program for program in self.programs.values() if program.state is State.ACTIVE)
        return Rank(
            id="r",
            capacity_tokens=self.capacity,
            ledger_tokens=sum(private_tokens(program, 0) for program in active),
            leaving_tokens=sum(tokens for _, tokens in self.leaving),
            active=len(active),
            reasoning=sum(program.status is Status.REASONING for program in active),
            means=self.means,
            programs=active,
            waiting=tuple(program for program in self.programs.values() if program.waiting is not None),
        )

    def step(self) -> None:
        """What happened since the last one, and then what the rules make of it."""
        self.leaving = [(gone_ms, tokens) for gone_ms, tokens in self.leaving if gone_ms > self.now_ms]
        for name in [name for name, at_ms in self.until_ms.items() if at_ms <= self.now_ms]:
            del self.until_ms[name]
            program = self.programs.get(name)
            if program is not None and program.state is State.ACTIVE and program.status is Status.REASONING:
                self.complete(program)
            else:
                self.arrive(name)
        for name in [name for name, at_ms in self.ttl_at_ms.items() if at_ms <= self.now_ms]:
            self.pause(name)
        repair = plan_repair(self.snapshot(), self.settings, self.now_ms)
        for name, _ in repair.pauses:
            self.pause(name)
        self.mark(repair.marks)
        self.resume()

    def arrive(self, name: str) -> None:
        """The next request of a Program: it goes on where it has its place, else it waits."""
        agent = self.agents[name]
        program = self.programs.get(name) or Program(
            name, State.PAUSED, Status.ACTING, "r", agent.tokens, awaited_by=agent.awaited_by
        )
        program = replace(program, status=Status.REASONING)
        self.ttl_at_ms.pop(name, None)
        if program.state is State.ACTIVE:
            self.until_ms[name] = self.now_ms + agent.service_ms
        else:
            ahead = sum(other.waiting is not None for other in self.programs.values())
            at_ms = force_ms(self.snapshot(), self.settings, self.now_ms, ahead=ahead)
            program = replace(program, waiting=Waiting(self.now_ms, at_ms))
        self.programs[name] = program

    def complete(self, program: Program) -> None:
        """A request is done: the Program ends, waits for its children, or uses a tool."""
        agent, name = self.agents[program.id], program.id
        self.left[name] -= 1
        if not self.left[name]:
            self.end(program)
            return
        self.programs[name] = program = replace(
            program, status=Status.ACTING, rounds=program.rounds + 1, last_finish_ms=self.now_ms
        )
        if self.left[name] == agent.requests - 1 and agent.children:
            self.add(replace(child, comes_ms=self.now_ms + STEP_MS) for child in agent.children)
        else:
            self.until_ms[name] = self.now_ms + max(agent.tool_ms, STEP_MS)
        if yields(program, self.snapshot(), self.settings, self.now_ms):
            self.pause(name)
            self.programs[name] = replace(self.programs[name], yielded=True)
        elif program.pause_when_idle or not self.ttl_ms:
            self.pause(name)
        else:
            self.ttl_at_ms[name] = self.now_ms + self.ttl_ms

    def end(self, program: Program) -> None:
        """It said that it is done: all of it goes; a parent whose last child it was goes on."""
        agent = self.agents.pop(program.id)
        del self.programs[program.id]
        self.leave(program)
        self.ended_ms[program.id] = self.now_ms
        if agent.again_ms is not None:
            self.add([replace(agent, id=f"{agent.id}'", comes_ms=self.now_ms + agent.again_ms)])
        for parent in agent.awaited_by[:1]:
            if not any(other.awaited_by[:1] == (parent,) for other in self.agents.values()):
                self.until_ms[parent] = self.now_ms + STEP_MS

    def pause(self, name: str) -> None:
        """It loses its place."""
        program = self.programs[name]
        assert (program.state, program.status) == (State.ACTIVE, Status.ACTING)
        self.ttl_at_ms.pop(name, None)
        self.leave(program)
        self.programs[name] = replace(program, state=State.PAUSED, rounds=0, pause_when_idle=False)
        self.pauses += 1

    def leave(self, program: Program) -> None:
        """Its KV is told to go."""
        self.leaving.append((self.now_ms + STEP_MS, private_tokens(program, 0)))

    def mark(self, names: Iterable[str]) -> None:
        """They pause when their requests are done."""
        for name in names:
            self.programs[name] = replace(self.programs[name], pause_when_idle=True)

    def resume(self) -> None:
        """Plans and applies until a plan admits nobody, as the next tick would."""
        while True:
            before = self.snapshot()
            plan = plan_rank(before, self.settings, self.now_ms, BATCH)
            for name, _ in plan.pauses:
                self.pause(name)
            self.mark(plan.marks)
            for decision in plan.admissions:
                self.admit(decision.program)
            if not plan.admissions:
                self.check(before)
                return

    def admit(self, name: str) -> None:
        """It gets a place, and its request runs."""
        program = self.programs[name]
        assert program.waiting is not None
        waited = (self.now_ms - program.waiting.queued_ms, program.waiting.force_ms - program.waiting.queued_ms)
        self.waits_ms.setdefault(name, []).append(waited)
        self.programs[name] = replace(
            program,
            state=State.ACTIVE,
            waiting=None,
            yielded=False,
            rounds=0,
            activated_ms=self.now_ms,
            was_active=True,
        )
        self.until_ms[name] = self.now_ms + self.agents[name].service_ms

    def check(self, rank: Rank) -> None:
        """Never more KV than there is; and whoever waits on an idle rank is admitted."""
        assert rank.ledger_tokens + rank.leaving_tokens <= self.capacity
        if not rank.active and not rank.leaving_tokens:
            standing = standing_of(rank, self.settings, self.now_ms)
            assert not any(decide(each, rank, standing, self.settings, self.now_ms).admitted for each in rank.waiting)

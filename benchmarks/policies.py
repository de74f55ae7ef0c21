"""Other ways to schedule Programs, to compare ours with: rules over the same snapshots, in place of `pool/rules`.

| policy | places are kept | who becomes active |
|---|---|---|
| `plain` | no Programs: requests one by one, KV by what was used last | |
| `binding_only` | Programs are only bound to ranks | all at once |
| `full` | as `pool/rules` says | as `pool/rules` says |
| `offload` | as `full`; the KV of those that pause goes to memory, and comes back where that is cheaper | as `full` |
| `ticks` | until a tick pauses them | see below |
| `ttl_2` | 2 s | as `full` |
| `ttl_0` | never | as `full` |
| `ttl_infinite` | until a repair takes them | as `full` |

`ticks` is the published idea of pausing the smallest and resuming by best fit, in our words and on our parts. A Program
whose tool runs counts for less with every second, by 2^-t. Each 5 s its planner looks: above the capacity it pauses
Programs, those first whose tools run, the smallest context first, until the rest fits; below, it resumes those that
wait, always the largest that still fits. Between ticks only Programs that were never active begin, where there is room.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Means, Program, Rank, Status
from pool.rules.programs.ttl import Retention, retention
from pool.store.programs import Operation
from tasks import programs
from tasks.program_planning import Planner
from workers import program_outcomes

PLAIN, BINDING_ONLY, FULL, OFFLOAD, TICKS = "plain", "binding_only", "full", "offload", "ticks"
#: Seconds for which a place is kept, by policy.
FIXED_TTL_S = {TICKS: 3600.0, "ttl_2": 2.0, "ttl_0": 0.0, "ttl_infinite": 3600.0}
POLICIES = (PLAIN, BINDING_ONLY, FULL, OFFLOAD, TICKS, "ttl_2", "ttl_0", "ttl_infinite")
TICK_MS = 5000

Keeping = Callable[[ProgramSettings, Means, float, float | None], Retention]


def keeping(policy: str) -> Keeping:
    """How long a place is kept after a request, under this policy."""
    if policy not in FIXED_TTL_S:
        return retention
    kept = Retention(FIXED_TTL_S[policy], FIXED_TTL_S[policy])

    def fixed(settings: ProgramSettings, means: Means, miss_impact_s: float, hint_s: float | None) -> Retention:  # noqa: ARG001
        return kept

    return fixed


def install(policy: str) -> None:
    """Put a policy's rules in the place of ours, in this process and those it forks."""
    vars(program_outcomes)["retention"] = keeping(policy)
    if policy == TICKS:
        vars(programs)["Planner"] = TickPlanner


# -- ticks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TickPlan:
    """Ids, in their order: idle Programs that pause, running ones that pause when idle, those that become active."""

    pauses: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    admissions: tuple[str, ...] = ()


def weight_tokens(program: Program, now_ms: int, buffer_tokens: int) -> float:
    """What an active Program counts for: less with each second that its tool runs."""
    tokens = float(program.context_tokens + buffer_tokens)
    if program.status is Status.REASONING:
        return tokens
    acting_s = max(now_ms - program.last_finish_ms, 0) / 1000
    return float(tokens * 2.0 ** -min(acting_s, 1000.0))


def plan_tick(rank: Rank, now_ms: int, buffer_tokens: int, *, is_tick: bool) -> TickPlan:
    """The plan of `ticks` for a rank. Cost: n log n in its Programs."""
    capacity = float(rank.capacity_tokens or 0)
    weights = {each.id: weight_tokens(each, now_ms, buffer_tokens) for each in rank.programs}
    used = sum(weights.values())
    if is_tick and used > capacity:
        return _pauses(rank.programs, weights, used - capacity)
    candidates = [each for each in rank.waiting if is_tick or not each.was_active]
    chosen, free = [], capacity - used
    for each in sorted(candidates, key=lambda program: (-program.context_tokens, program.id)):
        if each.context_tokens + buffer_tokens <= free:
            chosen.append(each.id)
            free -= each.context_tokens + buffer_tokens
    if not chosen and candidates and not rank.programs:
        # One that is too large for the whole capacity would wait for ever.
        chosen = [min(candidates, key=lambda program: (program.context_tokens, program.id)).id]
    return TickPlan(admissions=tuple(chosen))


def _pauses(programs: Sequence[Program], weights: dict[str, float], excess: float) -> TickPlan:
    """The smallest first, those first whose tools run, until the excess is gone."""
    pauses: list[str] = []
    marks: list[str] = []
    for each in sorted(programs, key=lambda one: (one.status is Status.REASONING, one.context_tokens, one.id)):
        if excess <= 0:
            break
        excess -= weights[each.id]
        (marks if each.status is Status.REASONING else pauses).append(each.id)
    return TickPlan(tuple(pauses), tuple(marks))


class TickPlanner(Planner):
    """Plans by `plan_tick`; the rest is as in every planner."""

    def _make_plans(self, rank: str) -> bool:
        # A holder of its own each time: nobody holds a claim twice.
        is_tick = self._store.claim(f"tick-{rank}", secrets.token_hex(8), TICK_MS)
        seen = self._store.snapshot(rank)
        plan = plan_tick(seen.rank, seen.now_ms, self._settings.decode_buffer_tokens, is_tick=is_tick)
        operations = [
            *(Operation("pause", each, "capacity_repair") for each in plan.pauses),
            *(Operation("mark", each, "capacity_repair") for each in plan.marks),
            *(Operation("admit", each, "fits", seen.fronts.get(each, "")) for each in plan.admissions),
        ]
        # What decays counts for less than the KV that is there: the engine makes room itself.
        unbounded = replace(seen, rank=replace(seen.rank, capacity_tokens=None))
        applied = self._store.apply(unbounded, operations)
        self._tell(seen, operations, (), applied)
        return applied.code == "version"

    def _yield_all(self, completed: dict[str, set[str]]) -> None:
        """Nobody yields."""

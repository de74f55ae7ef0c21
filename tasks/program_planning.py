"""Planning for the Programs of one model: a snapshot of a rank, a plan of the rules, and the plan carried out.

Any process may plan at any time: a plan on a version of the book that is no longer the current one does nothing, and
somebody plans again. Claims only save work. In one turn, in this order: on completions, whether a Program yields;
timers that are due; repairs; who becomes active. A tick is a turn in which one process of all looks after every rank,
whether it changed or not: time alone may change what is right (force deadlines, holds, observations that age).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock

from pool.rules.programs.admission import Decision, Reason, low_tokens
from pool.rules.programs.capacity import usage
from pool.rules.programs.cross_rank import plan_relocations
from pool.rules.programs.facts import PauseReason, Program
from pool.rules.programs.order import ordered
from pool.rules.programs.repair import plan_repair
from pool.rules.programs.resume import RankPlan, plan_rank, yields
from pool.rules.programs.tokens import private_tokens
from pool.rules.programs.windows import pooled
from pool.store.program_mending import is_torn, mend
from pool.store.program_sights import Sight
from pool.store.program_upkeep import ProgramUpkeep
from pool.store.program_views import Outline, Snapshot
from pool.store.programs import MOST_OPERATIONS, Applied, Operation, ProgramStore, operations_of
from tasks.program_log import Teller
from tasks.program_ranks import RankKeeper

#: How often a rank is planned for in one turn: because it changed meanwhile, or since a plan made room for another.
TRIES = 6
#: When a rank is looked at again that another process plans for just now.
AGAIN_S = 0.05
#: Batches of timers, and relocations, in one turn.
MOST_BATCHES, MOST_RELOCATIONS = 10, 10
#: Why Programs that are only bound become active.
BOUND = "bound"
#: The part of an interval for which the process that has the tick keeps it.
TICK_SHARE = 0.8


class Planner:
    """Plans for one model. `name`: of this process among planners."""

    def __init__(
        self, store: ProgramStore, upkeep: ProgramUpkeep, keeper: RankKeeper, teller: Teller, *, name: str
    ) -> None:
        self._store = store
        self._settings = store.settings
        self._upkeep = upkeep
        self._keeper = keeper
        self._teller = teller
        self._name = name
        self._lock = Lock()
        self._completed: dict[str, set[str]] = {}
        #: Whether requests complete in this process: then it waits for the ends of holds, which are often shorter than
        #: an interval. The others need not wake for them, too.
        self._serves = False

    def completed(self, rank: str, program: str) -> None:
        """A request of this Program has completed."""
        with self._lock:
            self._serves = True
            self._completed.setdefault(rank, set()).add(program)

    def turn(self, sight: Sight, *, ticks: bool) -> float | None:
        """One turn, from what was just seen; after how many seconds there is more to do, None for nothing. Raises
        StateUnavailable."""
        with self._lock:
            completed, self._completed = self._completed, {}
        if sight.is_quiet:
            return None
        leads = ticks and self._leads()
        again = leads and self._keeper.keep(sight, self._store.outlines(sight.ranks))
        self._yield_all(completed)
        expired, more_due = self._expire() if sight.is_due else ([], False)
        changed = [*sight.dirty, *completed, *expired]
        seen = self._store.outlines(list(dict.fromkeys([*sight.ranks, *changed] if leads else changed)))
        delays = [self._plan(outline.rank.id) for outline in seen if self._has_work(outline, changed, leads=leads)]
        if leads:
            self._relocate(seen)
        if again or more_due:
            return 0.0
        return min((delay for delay in (*delays, self._until_due(sight)) if delay is not None), default=None)

    def _until_due(self, sight: Sight) -> float | None:
        """In how many seconds the next timer is due; None where a tick comes first, or another process waits for it."""
        if not self._serves or sight.due_in_ms is None or sight.is_due:
            return None
        due_in_s = sight.due_in_ms / 1000
        return due_in_s if due_in_s < self._settings.metrics_interval_seconds else None

    def _leads(self) -> bool:
        """Whether this process looks after all ranks in this interval."""
        interval_ms = self._settings.metrics_interval_seconds * 1000
        return self._store.claim("", self._name, max(round(TICK_SHARE * interval_ms), 1))

    def _has_work(self, outline: Outline, changed: list[str], *, leads: bool) -> bool:
        """Whether a rank needs a plan. One that is away has to come back, or be lost, first. Where nobody waits and
        there is room, only a tick looks closer."""
        if not outline.incarnation:
            return False
        if outline.waiting or (leads and (outline.rank.active or outline.rank.ledger_tokens)):
            return True
        low = low_tokens(outline.rank, self._settings)
        if low is not None and usage(outline.rank, self._settings, outline.now_ms).used_tokens > low:
            return True
        if outline.rank.id in changed:
            self._store.settle(outline.rank.id, outline.version)
        return False

    # -- what is due -------------------------------------------------------------------------------------------------

    def _expire(self) -> tuple[list[str], bool]:
        """Carry out timers that are due; the ranks that this changed, and whether more may be due."""
        ranks: list[str] = []
        for _ in range(MOST_BATCHES):
            expired = self._upkeep.expire()
            for each in expired:
                self._teller.expired(each)
            ranks += [each.rank for each in expired]
            if not expired:
                return ranks, False
        return ranks, True

    def _yield_all(self, completed: dict[str, set[str]]) -> None:
        if not completed or self._settings.binding_only:
            return
        for outline in self._store.outlines(list(completed)):
            if outline.incarnation and outline.waiting:
                for program in sorted(completed[outline.rank.id]):
                    self._yield(outline.rank.id, program)

    def _yield(self, rank: str, program: str) -> None:
        """Pause a Program that has just completed a request, where it is its turn to give its place."""
        for _ in range(TRIES):
            seen = self._store.snapshot(rank)
            found = next((each for each in seen.rank.programs if each.id == program), None)
            if found is None or not yields(found, seen.rank, self._settings, seen.now_ms):
                return
            pause = Operation("pause", program, PauseReason.MAX_SEGMENT_YIELD.value)
            applied = self._store.apply(seen, [pause])
            self._tell(seen, [pause], (), applied)
            if applied.code != "version":
                return

    # -- plans -------------------------------------------------------------------------------------------------------

    def _plan(self, rank: str) -> float | None:
        """Plan for a rank, unless somebody does just now; when to look again, None for when it changes."""
        with self._claimed(rank) as is_ours:
            if not is_ours:
                return AGAIN_S
            return 0.0 if self._make_plans(rank) else None

    @contextmanager
    def _claimed(self, rank: str) -> Iterator[bool]:
        if not self._store.claim(rank, self._name):
            yield False
            return
        yield True
        # Where this is not reached, the claim ends by itself.
        self._store.unclaim(rank)

    def _make_plans(self, rank: str) -> bool:
        """Repair, then admit. A plan that makes room is followed by another, and so is one that came too late, or that
        did not look at all who wait; whether even the last one is."""
        goes_on, is_repaired = True, self._settings.binding_only
        for _ in range(TRIES):
            seen = self._store.snapshot(rank)
            if is_torn(seen):
                # Where even that does not help, not before the next tick.
                goes_on = not mend(self._store, seen)
                continue
            self._teller.observed(seen)
            plan = RankPlan() if is_repaired else self._repair(seen)
            if repairs := bool(plan.pauses or plan.marks):
                operations = operations_of(plan, seen)
            else:
                plan, operations, seen = self._schedule(seen)
            applied = self._store.apply(seen, operations)
            self._tell(seen, operations, plan.decisions, applied)
            if applied.code == "version":
                continue
            if gone := [program for program, why in applied.refused if why == "gone"]:
                mend(self._store, replace(seen, version=applied.version), gone)
            is_repaired = True
            left_out = len(operations) > MOST_OPERATIONS or not seen.is_whole
            done = len(operations[:MOST_OPERATIONS]) - len(applied.refused)
            goes_on = applied.code == "ok" and done > 0 and bool(repairs or plan.pauses or left_out)
            if not goes_on:
                break
        return goes_on

    def _repair(self, seen: Snapshot) -> RankPlan:
        repair = plan_repair(seen.rank, self._settings, seen.now_ms)
        return RankPlan(pauses=repair.pauses, marks=repair.marks)

    def _schedule(self, seen: Snapshot) -> tuple[RankPlan, list[Operation], Snapshot]:
        """Who becomes active. Where Programs are only bound, all that wait, whatever there is of room."""
        if not self._settings.binding_only:
            # One more than can be carried out, so that it is known whether some are left.
            plan = plan_rank(seen.rank, self._settings, seen.now_ms, MOST_OPERATIONS + 1)
            return plan, operations_of(plan, seen), seen
        waiting = ordered(seen.rank.waiting, self._settings, seen.now_ms)
        operations = [Operation("force", each.id, BOUND, seen.fronts.get(each.id, "")) for each in waiting]
        return RankPlan(), operations, replace(seen, rank=replace(seen.rank, capacity_tokens=None))

    def _relocate(self, outlines: Sequence[Outline]) -> None:
        """Programs whose last rank has no room for them, to ranks that have."""
        up = [outline.rank.id for outline in outlines if outline.incarnation]
        is_wanted = self._settings.global_queue and not self._settings.binding_only
        if not is_wanted or len(up) < 2 or not any(outline.waiting for outline in outlines):
            return
        seen = {rank: self._store.snapshot(rank) for rank in up}
        for _ in range(MOST_RELOCATIONS):
            ranks, now_ms = [each.rank for each in seen.values()], max(each.now_ms for each in seen.values())
            means = pooled([each.windows for each in seen.values()], self._settings.stats_window_size)
            found = plan_relocations(ranks, self._settings, now_ms, means, 1)
            if not found:
                return
            (relocation,) = found
            decision, source = relocation.decision, relocation.source
            kind = "force" if decision.reason is Reason.FORCED else "admit"
            token = seen[source].fronts.get(decision.program, "")
            operation = Operation(kind, decision.program, decision.reason.value, token)
            applied = self._store.relocate(seen[decision.rank], operation, source)
            self._tell(seen[decision.rank], [operation], [decision], applied)
            seen |= {rank: self._store.snapshot(rank) for rank in (source, decision.rank)}

    # -- logs --------------------------------------------------------------------------------------------------------

    def _tell(
        self, seen: Snapshot, operations: Sequence[Operation], decisions: Sequence[Decision], applied: Applied
    ) -> None:
        """Tell of what was carried out."""
        if applied.code != "ok":
            return
        refused = {program for program, _ in applied.refused}
        by_program = {decision.program: decision for decision in decisions}
        active = {program.id: program for program in seen.rank.programs}
        for each in operations[:MOST_OPERATIONS]:
            if each.program in refused or each.kind == "mark":
                continue
            if each.kind == "pause":
                self._teller.paused(each.program, seen.rank.id, each.why, tokens=self._tokens(active.get(each.program)))
            elif each.program in by_program:
                self._teller.admitted(by_program[each.program])
            else:
                self._teller.bound(each.program, seen.rank.id)

    def _tokens(self, program: Program | None) -> int | None:
        return None if program is None else private_tokens(program, self._settings.decode_buffer_tokens)

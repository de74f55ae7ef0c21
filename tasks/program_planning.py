"""Planning for the Programs of one model: a snapshot of a rank, a plan of the rules, and the plan carried out.

Any process may plan at any time: a plan on a version of the book that is no longer the current one does nothing, and
somebody plans again.
"""

from __future__ import annotations

from threading import Lock

from pool.rules.programs.resume import plan_rank
from pool.store.program_upkeep import ProgramUpkeep
from pool.store.programs import MOST_OPERATIONS, ProgramStore, operations_of
from tasks.program_homes import Homes

#: How often a plan is made anew because the rank has changed meanwhile; then whoever changed it plans, too.
TRIES = 5


class Planner:
    """Plans for one model. `name`: of this process among planners."""

    def __init__(self, model: str, store: ProgramStore, upkeep: ProgramUpkeep, homes: Homes, name: str) -> None:
        self._model = model
        self._store = store
        self._upkeep = upkeep
        self._homes = homes
        self._name = name
        self._lock = Lock()
        self._completed: dict[str, set[str]] = {}

    def completed(self, rank: str, program: str) -> None:
        """A request of this Program has completed."""
        with self._lock:
            self._completed.setdefault(rank, set()).add(program)

    def turn(self, *, ticks: bool) -> bool:  # noqa: ARG002
        """Plan for every rank where something has changed; whether there is more to do at once."""
        self._upkeep.expire()
        for rank in self._store.dirty():
            self._schedule(rank)
        return False

    def _schedule(self, rank: str) -> None:
        for _ in range(TRIES):
            seen = self._store.snapshot(rank)
            plan = plan_rank(seen.rank, self._store.settings, seen.now_ms, MOST_OPERATIONS)
            if self._store.apply(seen, operations_of(plan, seen)).code != "version":
                return

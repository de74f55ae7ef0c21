"""One trial at a time in a process: a job that may kill its worker takes every model of the process with it, so while
one is on trial (`pool/store/trials.py`) no rank of the process begins anything else.
"""

from __future__ import annotations

import threading

from tasks.ports import Runner
from workers.outlet import Outlet


class TrialGate:
    """Shared by the intakes of a process; each is known by its outlet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[Outlet, Runner] = {}
        self._holder: Outlet | None = None

    def join(self, outlet: Outlet, runner: Runner) -> None:
        """A rank of this process begins to serve."""
        with self._lock:
            self._members[outlet] = runner

    def part(self, outlet: Outlet) -> None:
        """A rank serves no longer."""
        with self._lock:
            self._members.pop(outlet, None)
            if self._holder is outlet:
                self._holder = None

    def enter(self, outlet: Outlet) -> bool:
        """Close the gate to all others, for a trial of this rank. False: another rank has closed it."""
        with self._lock:
            if self._holder is None:
                self._holder = outlet
            return self._holder is outlet

    def leave(self, outlet: Outlet) -> None:
        """The trial is over."""
        with self._lock:
            if self._holder is outlet:
                self._holder = None

    def closed_to(self, outlet: Outlet) -> bool:
        """Whether this rank may begin nothing now."""
        holder = self._holder
        return holder is not None and holder is not outlet

    def is_empty(self) -> bool:
        """Whether nothing runs in the process."""
        with self._lock:
            return not any(runner.capacity().in_flight for runner in self._members.values())

    def has_unproven(self) -> bool:
        """Whether any job of the process has not yet stored a token."""
        with self._lock:
            return any(outlet.has_unproven() for outlet in self._members)

"""One trial at a time in a process: a job that may kill its worker takes every model of the process with it, so while
one is on trial (`pool/store/trials.py`) no rank of the process begins anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pool.store.handouts import Handout
from tasks.ports import Runner
from workers.outlet import Outlet


class TrialGate:
    """Shared by the intakes of a process; each is known by its outlet. Thread-safe.

    A rank closes the gate to the others when it has a job to put on trial, and may wait then until the process is empty
    enough. The gate opens when the rank gives that up, or once its trial has stored a token or left the rank.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[Outlet, Runner] = {}
        self._holder: Outlet | None = None
        self._trial: Handout | None = None
        self._begins = 0

    def join(self, outlet: Outlet, runner: Runner) -> None:
        """A rank of this process begins to serve."""
        with self._lock:
            self._members[outlet] = runner

    def part(self, outlet: Outlet) -> None:
        """A rank holds no job any more, and will not."""
        with self._lock:
            self._members.pop(outlet, None)
            if self._holder is outlet:
                self._holder = self._trial = None

    def enter(self, outlet: Outlet) -> bool:
        """Close the gate to all others, for a trial of this rank. False: it is closed to this one."""
        with self._lock:
            if self._is_closed_to(outlet):
                return False
            self._holder = outlet
            return True

    def put_on_trial(self, outlet: Outlet, handout: Handout) -> None:
        """A job that its rank holds is on trial now: nobody begins anything until that is over."""
        with self._lock:
            self._holder, self._trial = outlet, handout

    def leave(self, outlet: Outlet) -> None:
        """This rank has no job to put on trial now. A trial that runs goes on, and ends by itself."""
        with self._lock:
            if self._holder is outlet and self._trial is None:
                self._holder = None

    def closed_to(self, outlet: Outlet) -> bool:
        """Whether this rank may begin nothing now."""
        with self._lock:
            return self._is_closed_to(outlet)

    def _is_closed_to(self, outlet: Outlet) -> bool:
        if self._holder is not None and self._trial is not None and not self._holder.is_unproven(self._trial):
            self._holder = self._trial = None
        return self._holder is not None and (self._holder is not outlet or self._trial is not None)

    @contextmanager
    def beginning(self, outlet: Outlet) -> Iterator[bool]:
        """Begin jobs within the block, unless it gives False: the gate is closed to this rank. Until the block ends
        they count as running: the state server may have begun them already, and nobody holds them yet."""
        with self._lock:
            allowed = not self._is_closed_to(outlet)
            self._begins += allowed
        try:
            yield allowed
        finally:
            with self._lock:
                self._begins -= allowed

    def is_empty(self) -> bool:
        """Whether nothing runs in the process."""
        with self._lock:
            return not self._begins and not any(runner.capacity().in_flight for runner in self._members.values())

    def has_unproven(self) -> bool:
        """Whether any job of the process has not yet stored a token."""
        with self._lock:
            return self._begins > 0 or any(outlet.has_unproven() for outlet in self._members)

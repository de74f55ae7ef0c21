"""The maintenance thread that every API and worker process runs: lease expiry, and Celery results still to be written.

Every process does all of it, so no event waits for one that died; the scripts behind it make doing it twice harmless.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from pool.errors import GenpoolError
from pool.store.sweeping import Sight, Sweeper

log = logging.getLogger("genpool.maintenance")

#: Well under half the shortest lease, so that the sweep's own gap rule does not hold expiry back.
EVERY_S = 0.4
GATHER_S = 0.02


class Maintenance:
    """Sweeps each model at a steady pace until stopped; `models` may grow meanwhile. `chores` run with each sweep, and
    soon after `wake`."""

    def __init__(
        self,
        sweeper: Sweeper,
        models: Sequence[str],
        chores: Sequence[Callable[[], None]] = (),
        every_s: float = EVERY_S,
    ) -> None:
        self._sweeper = sweeper
        self._models = models
        self._chores = tuple(chores)
        self._every_s = every_s
        self._wake = threading.Event()
        self._stopping = False
        #: What fails just now: models, chores, "" for the state server.
        self._failing: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="genpool-maintenance", daemon=True)

    def start(self) -> None:
        """Begin to run in a thread of its own."""
        self._thread.start()

    def wake(self) -> None:
        """Do the chores soon, without waiting for the next sweep."""
        if not self._wake.is_set():
            self._wake.set()

    def stop(self) -> None:
        """End the thread, after one last turn."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        next_sweep_s = 0.0
        while not self._stopping:
            self._wake.wait(max(0.0, next_sweep_s - time.monotonic()))
            self._wake.clear()
            sweeps = time.monotonic() >= next_sweep_s
            if sweeps:
                next_sweep_s = time.monotonic() + self._every_s
            self.turn(sweeps=sweeps)
            # Many endings in a row are one turn.
            time.sleep(GATHER_S)
        self.turn(sweeps=False)

    def turn(self, *, sweeps: bool = True) -> None:
        """One sweep of each model and each chore. Whatever fails, the thread goes on: without it, nobody takes a dead
        worker's jobs. A state server that is away ends the turn; anything else stays with the model it befell, and so
        does a node of a cluster."""
        try:
            if sweeps:
                self._sweep()
            for chore in self._chores:
                self._attempt("chore", chore)
        except (GenpoolError, OSError) as error:
            self._failed("", f"{type(error).__name__}; it is tried again")
        else:
            self._failing.discard("")

    def _sweep(self) -> None:
        try:
            sights = self._sweeper.look(tuple(self._models))
        except Exception as error:
            if self._ends_turn(error):
                raise
            for model in self._models:
                self._attempt(model, partial(self._sweep_alone, model))
            return
        for sight in sights:
            self._attempt(sight.model, partial(self._act, sight))

    def _sweep_alone(self, model: str) -> None:
        (sight,) = self._sweeper.look([model])
        self._act(sight)

    def _act(self, sight: Sight) -> None:
        model, swept = sight.model, self._sweeper.act(sight)
        if swept.requeued or swept.poisoned:
            log.warning("%s: %d jobs of lost workers requeued, %d failed", model, swept.requeued, swept.poisoned)

    def _attempt(self, name: str, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:
            if self._ends_turn(error):
                raise
            # The place, never the values: messages of libraries may quote their input.
            place = "".join(traceback.format_tb(error.__traceback__))
            self._failed(name, f"{name}: unexpected {type(error).__name__}\n{place}")
        else:
            self._failing.discard(name)

    def _ends_turn(self, error: Exception) -> bool:
        return isinstance(error, GenpoolError | OSError) and not self._sweeper.is_spread

    def _failed(self, name: str, what: str) -> None:
        """Say so once, until it passes."""
        if name not in self._failing:
            log.warning("maintenance: %s", what)
        self._failing.add(name)

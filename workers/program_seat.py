"""A rank's seat among Programs: taking it, keeping it, giving it up, and telling what the engine holds meanwhile.

One thread a rank. Everything it does may be done late or twice: a rank without it is taken for away by others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import PauseReason
from pool.store.handouts import Ending, Handout
from pool.store.placements import Outcome
from pool.store.program_upkeep import Look
from pool.store.program_views import Snapshot
from pool.store.rank_delivery import RankDelivery
from pool.store.server_clock import ServerClock
from pool.store.standing import Standing, Stay, standing, stays
from tasks.ports import Finished
from tasks.program_log import Teller, tell
from tasks.programs import Programs
from workers.outlet import STATE_ERRORS
from workers.program_outcomes import Background, Completed, outcome_of, tell_dispatch, tell_end
from workers.program_residence import Residence, Resident

#: After a failed round trip.
RETRY_S = 0.3
#: When the engine is looked at again that was told to let KV go; the time doubles, up to an interval.
AGAIN_S = 0.05
#: What comes within this time of a look is looked at together.
GATHER_S = 0.01


class ProgramSeat:
    """`incarnation`: of this process; `registered`: registers the rank anew and says whether it is this process's;
    `delivery`: reads the rank's stream while the seat is held; `keep_s`: between two looks at the seat."""

    def __init__(
        self,
        programs: Programs,
        settings: ProgramSettings,
        delivery: RankDelivery,
        residence: Residence,
        *,
        registered: Callable[[], bool],
        keep_s: float,
    ) -> None:
        self._programs = programs
        self._settings = settings
        self._delivery = delivery
        self._model, self._rank, self._incarnation = delivery.model, delivery.rank, delivery.incarnation
        self._store = programs.store(self._model)
        self._upkeep = programs.upkeep(self._model)
        self._teller = Teller(self._model, self._store)
        self._residence = residence
        self._registered = registered
        self._keep_s = keep_s
        self._clock = ServerClock(self._store.client)
        self._background = Background()
        #: Whether Programs are here; and whether one has come since that was looked at.
        self._busy = self._roused = False
        self._leaving = self._left = self._stopping = self._failing = False
        self._why = PauseReason.HEALTH_FAILOVER
        self._next_s = 0.0
        self._again_s = AGAIN_S
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="genpool-seat", daemon=True)

    # -- what other threads call -------------------------------------------------------------------------------------

    def take(self) -> None:
        """Take the rank, and move what former processes of it left. Raises StateUnavailable."""
        self._upkeep.join(self._rank, self._incarnation)
        self._drain()
        self._see()

    def start(self) -> None:
        """Begin to run in a thread of its own."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def begun(self, handout: Handout) -> None:
        """A job begins here; one of a Program is a reason to look at the engine."""
        placement = handout.lease.placement
        if placement is None:
            return
        tell_dispatch(handout, placement)
        if not self._busy:
            self.rouse()

    def rouse(self) -> None:
        """Look at the engine soon: a Program has lost its place, and its KV has to go."""
        self._roused = True
        self._wake.set()

    def outcome(self, handout: Handout, finished: Finished) -> Outcome | None:
        """What a completed job tells of its Program, None for one of none."""
        placement = handout.lease.placement
        if placement is None:
            return None
        request = Completed.of(handout, placement, finished, self._clock.now_ms(self._store.keys))
        outcome = outcome_of(request, self._settings, self._background)
        tell_end(request, outcome)
        return outcome

    def left(self, handout: Handout, ending: Ending | None) -> None:
        """A job has left the rank; `ending`: how it ended here."""
        placement = handout.lease.placement
        if placement is not None and ending is not None:
            self._programs.completed(self._model, self._rank, placement.program)

    def leave(self, why: PauseReason = PauseReason.HEALTH_FAILOVER) -> None:
        """Give the rank up soon, in the seat's thread: what has not begun goes elsewhere at once; what runs may end.
        `why`: what is told of Programs that lose their place."""
        self._why = why
        self._leaving = True
        self._wake.set()

    def stop(self) -> None:
        """Give the rank up, if that is still to be done, and end the thread."""
        self._leaving = self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    # -- the seat's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(max(0.0, self._next_s - time.monotonic()))
            self._wake.clear()
            self._attempt()
            time.sleep(GATHER_S)
        # What was handed back meanwhile goes elsewhere, too.
        self._left = False
        self._attempt()

    def _attempt(self) -> None:
        try:
            self._turn()
            self._failing = False
        except STATE_ERRORS as error:
            if not self._failing:
                error_name = type(error).__name__
                tell(logging.WARNING, "program_seat_failed", model=self._model, rank=self._rank, error=error_name)
            self._failing = True
            self._next_s = time.monotonic() + RETRY_S

    def _turn(self) -> None:
        now_s = time.monotonic()
        if self._leaving:
            self._give_up()
            self._next_s = now_s + self._keep_s
        elif self._roused or now_s >= self._next_s:
            self._roused = False
            stands = standing(self._store.client, self._store.keys, self._rank)
            is_awaited = self._keep(stands) and self._observe(stands)
            self._next_s = now_s + self._pause_s(is_awaited)

    def _pause_s(self, is_awaited: bool) -> float:
        """Until the next look. `is_awaited`: Programs may wait for what it shows."""
        if not is_awaited:
            self._again_s = AGAIN_S
            return self._settings.metrics_interval_seconds if self._busy else self._keep_s
        again_s = min(self._again_s, self._settings.metrics_interval_seconds)
        self._again_s = 2 * again_s
        return again_s

    def _give_up(self) -> None:
        if self._left:
            return
        self._upkeep.lose(self._rank, self._incarnation, leaves=True, why=self._why.value)
        self._drain()
        self._left = True

    def _keep(self, stands: Standing) -> bool:
        """Whether this process has the rank. It takes it again when others took it for away; not from a process that
        has registered under its id."""
        if stands.incarnation != self._incarnation:
            self._delivery.seated = self._registered()
            if not self._delivery.seated:
                for program in self._residence.look(0, None).programs:
                    self._residence.drop(program)
                return False
            tell(logging.WARNING, "program_seat_retaken", model=self._model, rank=self._rank)
            self.take()
            return False
        self._delivery.seated = True
        return True

    def _drain(self) -> None:
        while moved := self._upkeep.drained(self._rank):
            for program in dict.fromkeys(moved):
                self._teller.paused(program, self._rank, self._why)
        self._programs.wake(self._model)

    def _observe(self, stands: Standing) -> bool:
        """Tell what the engine holds of Programs, and have go what it holds of those that have no place here. So no
        command to drop can get lost: whatever nobody knows any more is found again each time. Whether the next look is
        awaited: KV is leaving, or requests in the engine shut the rank to Programs that wait."""
        seen = self._see() if stands.is_busy else None
        resident = self._residence.look(stands.sent, seen)
        self._busy = stands.is_busy or bool(resident.tokens)
        is_awaited = False
        if seen is not None:
            look = Look(
                began_ms=seen.now_ms,
                rank_set=seen.rank_set,
                moved_tokens=seen.moved_tokens,
                tokens=resident.held,
                waiting=resident.waiting,
                running=resident.running,
                gone=tuple(stands.leaving.keys() - resident.tokens.keys()),
            )
            installed = self._upkeep.observe(self._rank, self._incarnation, look)
            self._teller.looked(self._rank, look, installed=installed)
            if installed and (look.gone or stands.waiting):
                self._programs.wake(self._model)
            is_awaited = len(look.gone) < len(stands.leaving) or bool(stands.waiting and resident.waiting)
        self._clear(resident)
        return is_awaited

    def _clear(self, resident: Resident) -> None:
        """KV of those that were paused, or lost, or are over, goes."""
        store = self._store
        for program, stay in stays(store.client, store.keys, self._rank, self._incarnation, resident.programs).items():
            if stay is Stay.AWAY:
                self._residence.drop(program)
            elif stay is Stay.PAUSED and program in resident.tokens:
                self._residence.pause(program)

    def _see(self) -> Snapshot:
        """Read the rank; what its windows say is good until the next time."""
        seen = self._store.snapshot(self._rank)
        self._clock.told(self._store.keys, seen.now_ms)
        self._background = Background(seen.rank.means, seen.rank.reasoning, self._residence.return_seconds_per_token())
        return seen

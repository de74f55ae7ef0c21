"""A rank that serves: one loaded copy of a model in this process, from its load until it is freed.

Threads: the runner's (of an engine, the batching loop), the intake's (blocking reads), the outlet's (writes, leases),
and where Programs are scheduled the seat's (workers/program_seat.py). Its place in the registry is older, and may
outlive it (workers/station.py).
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from pool.errors import GenpoolError
from pool.rules.model_states import DRAINING, LOADED, LOADING, STOPPED
from pool.rules.programs.facts import PauseReason
from pool.settings import ModelSettings
from pool.store.connection import connect
from pool.store.delivery import Delivery
from pool.store.handouts import Ending, Handout
from pool.store.placements import Outcome
from pool.store.rank_delivery import RankDelivery
from pool.store.sharing import Sharing
from tasks.config import Settings, state_url
from tasks.ports import Finished
from tasks.programs import Programs
from workers.backends import open_backend
from workers.backends.served import Served
from workers.intake import Intake, reading_client
from workers.memory import returning_memory
from workers.outlet import Outlet
from workers.program_seat import ProgramSeat
from workers.registrar import Registrar
from workers.trials import TrialGate

log = logging.getLogger("genpool.rank")

OnBegun = Callable[[Handout, str], None]
OnLeft = Callable[[Handout, str, Ending | None], None]


class NotWanted(GenpoolError):
    """While the model was loaded, it was decided that it shall not be."""

    code = "model_unloading"


class Rank:
    """Loads `model` and serves it until drained. `of_model`: the model's settings; `registrar`: of its place, where it
    is registered; `limit`: generations in flight; `part`: which of the model's ranks in this process; `gate`: shared
    with its other ranks."""

    def __init__(
        self,
        model: str,
        settings: Settings,
        of_model: ModelSettings,
        registrar: Registrar,
        limit: int,
        *,
        part: int = 0,
        gate: TrialGate,
        on_begun: OnBegun,
        on_left: OnLeft,
        programs: Programs | None = None,
    ) -> None:
        self.model = model
        self._part = part
        self.state = LOADING
        self._settings = settings
        self._model_settings = of_model
        self._registrar = registrar
        self._id, self._incarnation = registrar.id, registrar.incarnation
        self._limit = limit
        self._gate = gate
        self._on_begun = on_begun
        self._on_left = on_left
        self._programs = programs
        self._served: Served | None = None
        self._delivery: Delivery | None = None
        self._seat: ProgramSeat | None = None
        url = state_url(settings)
        self._reader = reading_client(url)
        self._writer = connect(url, max_connections=1)
        self._started = False
        self._drain_until_s = math.inf

    @property
    def _lease_ms(self) -> int:
        return round(self._settings.worker.lease_seconds * 1000)

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(self, is_wanted: Callable[[], bool]) -> None:
        """Load the model and begin to serve; blocks while loading. What it raises leaves nothing behind: NotWanted
        where `is_wanted` says so once the model is loaded, and whatever a load may raise."""
        try:
            served = self._served = self._load(is_wanted)
            if not is_wanted():
                raise NotWanted(f"{self.model} is not wanted any more.")
            self._open(served)
        except BaseException:
            self._abandon()
            raise
        self.state = LOADED
        log.info("%s: serving as %s, %d generations at once", self.model, self._id, self._runner.effective_limit())

    def _abandon(self) -> None:
        """Free what was there before something failed. No job was begun: reading comes last."""
        if self._seat is not None:
            self._seat.stop()
        if hasattr(self, "_outlet"):
            self._runner.stop()
            self._outlet.stop()
            self._gate.part(self._outlet)
        self._close()

    def _close(self) -> None:
        self.state = STOPPED
        self._registrar.on_hint = self._registrar.on_kv_leaves = self._registrar.card = None
        for client in (self._reader, self._writer):
            client.connection_pool.disconnect()
        if self._delivery is not None:
            self._delivery.close()
        if self._served is not None:
            with returning_memory():
                self._served.close()
            self._served = None

    def _load(self, is_wanted: Callable[[], bool]) -> Served:
        started = time.monotonic()
        try:
            served = open_backend(self.model, self._model_settings, self._settings, self._limit, self._part, is_wanted)
        except GenpoolError as error:
            if is_wanted():
                raise
            raise NotWanted(f"{self.model} is not wanted any more.") from error
        log.info("%s: loaded in %.1f s", self.model, time.monotonic() - started)
        _tune_interpreter()
        return served

    def _open(self, served: Served) -> None:
        card = served.card
        self._runner = served.runner
        self._sharing = Sharing(self.model, self._id, lambda: self._registrar.wish.ranks > 1)
        delivery = self._delivery = self._deliver()
        delivery.heal()
        self._outlet = Outlet(
            delivery,
            self._runner,
            flush_idle_ms=self._settings.worker.flush_idle_ms,
            renew_ms=round(self._settings.worker.renew_seconds * 1000),
            stall_timeout_s=self._settings.worker.stall_timeout_seconds,
            on_left=self._left,
            engine=card.fingerprint if served.same_bytes else "",
            outcome_of=self._outcome,
            sharing=self._sharing,
        )
        self._sit(delivery, served)
        self._intake = Intake(
            delivery,
            self._runner,
            self._outlet,
            card=card,
            vocabulary=served.vocabulary,
            gate=self._gate,
            on_begun=self._begun,
            sharing=self._sharing,
        )
        self._registrar.registry.publish(card)
        self._registrar.on_hint, self._registrar.card = self._outlet.nudge, card
        self._runner.start(self._outlet)
        self._outlet.start()
        if self._seat is not None:
            self._registrar.on_kv_leaves = self._seat.rouse
            self._seat.start()
        self._intake.start()
        self._started = True

    def _deliver(self) -> Delivery:
        """What this rank reads: where Programs are scheduled, its own stream too."""
        given: dict[str, Any] = {
            "reader": self._reader,
            "writer": self._writer,
            "model": self.model,
            "rank": self._id,
            "lease_ms": self._lease_ms,
            "result_ttl_ms": self._settings.state.result_ttl_seconds * 1000,
        }
        return Delivery(**given) if self._programs is None else RankDelivery(**given, incarnation=self._incarnation)

    def _sit(self, delivery: Delivery, served: Served) -> None:
        """Take the rank's seat, before anything is read."""
        if self._programs is None or not isinstance(delivery, RankDelivery):
            return
        settings = self._programs.settings_of(self.model)
        assert settings is not None, "Programs are on"
        self._seat = ProgramSeat(
            self._programs,
            settings,
            delivery,
            served.residence(self._outlet.held, settings.on_pause),
            registered=self._registrar.beat,
            keep_s=self._settings.worker.renew_seconds,
        )
        self._seat.take()

    # -- what the host asks ------------------------------------------------------------------------------------------

    def generations(self) -> list[dict[str, Any]]:
        """The jobs held now, without text."""
        if not self._started:
            return []
        now_ms = time.time() * 1000
        return [
            {
                "id": held.handout.task_id,
                "model": self.model,
                "rank": self._id,
                "attempt": held.lease.attempt,
                "choices": held.handout.n,
                "tokens": held.next_seq,
                "age_seconds": round(max(0.0, now_ms - held.handout.created_ms) / 1000, 1),
            }
            for held in self._outlet.held()
        ]

    def figures(self) -> dict[str, Any]:
        """Telemetry, JSON-safe; none before the engine is there."""
        return self._runner.telemetry() if hasattr(self, "_runner") else {}

    def set_limit(self, limit: int) -> None:
        """Generations in flight at most from now on, as far as the engine was loaded for so many; running ones
        finish."""
        if self._started and limit != self._limit:
            self._limit = limit
            self._runner.set_limit(limit)
            self._intake.room()

    def broken(self) -> bool:
        """Whether a thread of a serving rank has died: the process must end, so that its leases do."""
        parts = (self._runner, self._intake, self._outlet, self._seat) if self.state == LOADED else ()
        return any(not part.is_alive() for part in parts if part is not None)

    def stalled(self) -> bool:
        """Whether the engine's thread hangs: only the end of the process helps."""
        return self._started and self.state in (LOADED, DRAINING) and self._outlet.is_stalled()

    # -- stopping ----------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """End a drain's grace now: what still runs is handed back."""
        self._drain_until_s = 0.0

    def drain_within(self, grace_s: float) -> None:
        """A drain, begun or not, ends within this time at the latest."""
        self._drain_until_s = min(self._drain_until_s, time.monotonic() + grace_s)

    def drain(self, grace_s: float, why: PauseReason = PauseReason.HEALTH_FAILOVER) -> None:
        """Stop reading, let running generations finish for `grace_s`, hand the rest back, and free the model. `why`:
        what is told of Programs that lose their place here."""
        if not self._started or self.state == STOPPED:
            return
        self.drain_within(grace_s)
        self.state = DRAINING
        self._intake.stop()
        if self._seat is not None:
            # Programs go elsewhere now; what runs of them may still end here.
            self._seat.leave(why)
        log.info("%s: draining; %d generations may finish for %g s", self.model, len(self._outlet.held()), grace_s)
        while self._outlet.held() and time.monotonic() < self._drain_until_s:
            time.sleep(0.02)
        self._runner.stop()
        self._outlet.stop()
        # Again, for what the state server was not there to take when reading stopped.
        self._intake.give_back()
        self._gate.part(self._outlet)
        if self._seat is not None:
            self._seat.stop()
        self._close()

    # -- callbacks ------------------------------------------------------------------------

    def _begun(self, handout: Handout) -> None:
        if self._seat is not None:
            self._seat.begun(handout)
        self._on_begun(handout, self.model)

    def _left(self, handout: Handout, state: str, ending: Ending | None) -> None:
        self._intake.room()
        if self._seat is not None:
            self._seat.left(handout, ending)
        self._on_left(handout, state, ending)

    def _outcome(self, handout: Handout, finished: Finished) -> Outcome | None:
        return None if self._seat is None else self._seat.outcome(handout, finished)


def _tune_interpreter() -> None:
    """Make this process's threads hand over quickly, and its garbage collector leave the loaded model alone.

    The engine's thread runs Python between its matrix products; by default the outlet would wait up to 5 ms
    for each of its turns.
    """
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)

"""A rank: one copy of a model that this process serves, from whatever runs it to the registry.

Threads: the runner's (of an engine, the batching loop), the intake's (blocking reads), the outlet's (writes, leases),
the registrar's (heartbeat, hints about held jobs), and where Programs are scheduled the seat's
(workers/program_seat.py).
"""

from __future__ import annotations

import gc
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pool.settings import ModelSettings
from pool.store.connection import connect
from pool.store.delivery import Delivery
from pool.store.handouts import Ending, Handout
from pool.store.keys import node_channel
from pool.store.placements import Outcome
from pool.store.rank_delivery import RankDelivery
from pool.store.ranks import RankRegistry
from tasks.config import Settings, state_url
from tasks.ports import Finished, Runner
from tasks.programs import Programs
from workers.backends import open_backend
from workers.backends.served import Served
from workers.intake import Intake, reading_client
from workers.outlet import STATE_ERRORS, Outlet
from workers.program_seat import ProgramSeat
from workers.trials import TrialGate

log = logging.getLogger("genpool.rank")

LOADING, LOADED, DRAINING, FAILED, STOPPED = "loading", "loaded", "draining", "failed", "stopped"

#: How long the registrar waits for a hint before it looks at the time.
LISTEN_S = 0.5
#: What is told of why a model could not be loaded.
MAX_ERROR_CHARS = 500

OnBegun = Callable[[Handout, str], None]
OnLeft = Callable[[Handout, str, Ending | None], None]


class Rank:
    """Loads `model` and serves it until stopped. `node`: this process's Celery node name; `limit`: generations in
    flight; `gate`: shared with the process's other ranks."""

    def __init__(
        self,
        model: str,
        settings: Settings,
        node: str,
        limit: int,
        *,
        gate: TrialGate,
        on_begun: OnBegun,
        on_left: OnLeft,
        programs: Programs | None = None,
    ) -> None:
        self.model = model
        self.state = LOADING
        self.error = ""
        self._settings = settings
        self._model_settings: ModelSettings = settings.models[model]
        self._node = node
        self._id = node
        self._incarnation = secrets.token_hex(8)
        self._limit = limit
        self._gate = gate
        self._on_begun = on_begun
        self._on_left = on_left
        self._programs = programs
        self._seat: ProgramSeat | None = None
        url = state_url(settings)
        self._reader = reading_client(url)
        self._writer = connect(url, max_connections=1)
        self._registrar = connect(url, max_connections=3)
        self._registry = RankRegistry(self._registrar, model)
        self._stopping = threading.Event()
        self._started = False
        self._silent = False
        self._drain_until_s = 0.0
        #: Tokens generated until the last heartbeat, and when that was.
        self._thread = threading.Thread(target=self._register, name="genpool-registrar", daemon=True)

    @property
    def _lease_ms(self) -> int:
        return round(self._settings.worker.lease_seconds * 1000)

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the model and begin to serve; blocks while loading. An error is kept in `error`, and raised."""
        try:
            self._served = self._load()
            self._open(self._served)
        except BaseException as error:
            self.state = FAILED
            self.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
            raise
        self.state = LOADED
        self._beat()
        log.info("%s: serving as %s, %d generations at once", self.model, self._id, self._runner.effective_limit())

    def _load(self) -> Served:
        started = time.monotonic()
        served = open_backend(self.model, self._settings, self._limit)
        log.info("%s: loaded in %.1f s", self.model, time.monotonic() - started)
        _tune_interpreter()
        return served

    def _open(self, served: Served) -> None:
        self._card = served.card
        self._runner: Runner = served.runner
        self._claim_id()
        delivery = self._delivery = self._deliver()
        delivery.heal()
        self._outlet = Outlet(
            delivery,
            self._runner,
            flush_idle_ms=self._settings.worker.flush_idle_ms,
            renew_ms=round(self._settings.worker.renew_seconds * 1000),
            stall_timeout_s=self._settings.worker.stall_timeout_seconds,
            on_left=self._left,
            engine=self._card.fingerprint if served.same_bytes else "",
            outcome_of=self._outcome,
        )
        self._sit(delivery, served)
        self._intake = Intake(
            delivery,
            self._runner,
            self._outlet,
            card=self._card,
            vocabulary=served.vocabulary,
            gate=self._gate,
            on_begun=self._begun,
        )
        self._registry.publish(self._card)
        self._runner.start(self._outlet)
        self._outlet.start()
        self._thread.start()
        if self._seat is not None:
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
            registered=self._beat,
            keep_s=self._settings.worker.renew_seconds,
        )
        self._seat.take()

    def _claim_id(self) -> None:
        """Register under the node's name, or `name-2`, ... when a living process of that name serves the model."""
        for number in range(1, 1000):
            self._id = self._node if number == 1 else f"{self._node}-{number}"
            if self._beat():
                return
        raise RuntimeError(f"no free rank id for {self._node}")

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

    def facts(self) -> dict[str, Any]:
        """State and telemetry, JSON-safe."""
        facts: dict[str, Any] = {
            "model": self.model,
            "rank": self._id,
            "state": self.state,
            "last_error": self.error,
            "configured_target_inflight": self._model_settings.target_inflight,
        }
        if hasattr(self, "_runner"):
            facts |= self._runner.telemetry()
        return facts

    def resize(self, by: int) -> None:
        """Allow `by` more (or fewer) generations in flight."""
        self._limit = max(1, self._limit + by)
        if self._started:
            self._runner.set_limit(self._limit)
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

    def drain(self, grace_s: float) -> None:
        """Stop reading, let running generations finish for `grace_s`, hand the rest back, and leave the registry."""
        if not self._started or self.state == STOPPED:
            return
        self.state = DRAINING
        self._intake.stop()
        if self._seat is not None:
            # Programs go elsewhere now; what runs of them may still end here.
            self._seat.leave()
        self._drain_until_s = time.monotonic() + grace_s
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
        self._stopping.set()
        self._thread.join()
        try:
            self._registry.retire(self._id, self._incarnation)
        except STATE_ERRORS as error:
            log.warning("%s: leaving the registry: %s", self.model, type(error).__name__)
        self._delivery.close()
        self._registrar.connection_pool.disconnect()
        self._served.close()
        self.state = STOPPED

    # -- callbacks and the registrar's thread ------------------------------------------------------------------------

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

    def _beat(self) -> bool:
        return self._registry.beat(self._id, self._incarnation, lease_ms=self._lease_ms, facts=self.facts())

    def _register(self) -> None:
        """Heartbeat and hints. A hint about a held job (a cancel, a new watcher) makes the outlet look."""
        while not self._stopping.is_set():
            pubsub = self._registrar.pubsub()
            try:
                pubsub.subscribe(node_channel(self._id))
                self._listen(pubsub)
            except STATE_ERRORS as error:
                if not self._silent:
                    log.warning("%s: heartbeat: %s; it goes on as soon as it can", self.model, type(error).__name__)
                self._silent = True
                self._stopping.wait(0.5)
            finally:
                pubsub.close()

    def _listen(self, pubsub: Any) -> None:
        next_beat = 0.0
        while not self._stopping.is_set():
            if time.monotonic() >= next_beat:
                self._beat()
                self._silent = False
                if self._registry.card_fingerprint() != self._card.fingerprint:
                    # A state server that came back empty has lost it.
                    self._registry.publish(self._card)
                next_beat = time.monotonic() + self._settings.worker.renew_seconds
            message = pubsub.get_message(ignore_subscribe_messages=True, timeout=LISTEN_S)
            if message is not None:
                self._outlet.nudge()


def _tune_interpreter() -> None:
    """Make this process's threads hand over quickly, and its garbage collector leave the loaded model alone.

    The engine's thread runs Python between its matrix products; by default the outlet would wait up to 5 ms
    for each of its turns.
    """
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)

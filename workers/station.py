"""One model in this process, loaded or not: the process stays, and loads and unloads as an admin wants it.

| the rank | when | what it does next |
|---|---|---|
| loading | the model is wanted | serves; or frees what it has, where it is no longer wanted |
| loaded | | |
| draining | it is no longer wanted, or the process leaves | ends what it has begun, hands back the rest, frees it |
| waiting | there are as many replicas as there may be | loads when one leaves |
| unloaded | it is not wanted | waits |
| failed | it could not be loaded; nothing is left of the try | tries again when that is asked for |

A process that cannot load its model at its start, without anybody having asked for that, ends: its supervisor has to
know. One that cannot free it in time ends, too: then the kernel frees it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import redis

from pool.errors import GenpoolError, StateUnavailable
from pool.rules.model_states import DRAINING, FAILED, LOADING, STOPPED, UNLOADED, WAITING
from pool.rules.programs.facts import PauseReason
from pool.store.ranks import Wish
from tasks.catalogue import Catalogue
from tasks.config import Settings
from tasks.launch import DEVICES_VARIABLE
from tasks.programs import Programs
from workers.memory import collect
from workers.outlet import STATE_ERRORS
from workers.rank import NotWanted, OnBegun, OnLeft, Rank
from workers.registrar import Registrar
from workers.trials import TrialGate

log = logging.getLogger("genpool.station")

RETRY_S = 0.5
#: What is told of why a model could not be loaded.
MAX_ERROR_CHARS = 500
#: How long behind its time to drain a model may take to be freed, at most, before the process ends for it.
FREE_S = 10.0
#: Nobody looks for so long where a process has not got on.
STOPPED_S = 2.0

#: One model of this process is loaded at a time: two at once would need room for what each needs only while it loads.
_LOADS = threading.Lock()


class Station:
    """`part`: which of the model's ranks in this process; `catalogue`: where the model's settings are; `limit`:
    generations in flight at most, beside those settings; `on_failed`: the process shall end, because it cannot do what
    it was started for."""

    def __init__(
        self,
        model: str,
        settings: Settings,
        node: str,
        limit: int | None,
        *,
        part: int = 0,
        catalogue: Catalogue,
        gate: TrialGate,
        on_begun: OnBegun,
        on_left: OnLeft,
        on_failed: Callable[[str], None],
        programs: Programs | None = None,
    ) -> None:
        self.model = model
        self.error = ""
        self._settings = settings
        self._catalogue = catalogue
        self._limit = limit
        self.part = part
        self._resized = 0
        self._gate = gate
        self._on_begun = on_begun
        self._on_left = on_left
        self._on_failed = on_failed
        self._programs = programs
        #: Of a rank that is there, it has its own.
        self._state = LOADING
        self._rank: Rank | None = None
        #: The rank that loads just now.
        self._coming: Rank | None = None
        self._tried: int | None = None
        self._has_tried = False
        #: A load has failed, and the state server has not heard of it.
        self._untold = self._gives_up = False
        #: A load that has failed here is still asked for, and whether the whole model has failed is to be looked at.
        self._look_again = False
        #: The change at which it has.
        self._all_failed: int | None = None
        self._free_by_s: float | None = None
        #: When `stalled` was asked last, and how long it was not while there is something to be freed.
        self._asked_s, self._slack_s = time.monotonic(), 0.0
        self._leaving = threading.Event()
        self._news = threading.Event()
        self._registrar = Registrar(model, settings, node, facts=self.facts, on_wish=self._wished)
        self._thread = threading.Thread(target=self._run, name="genpool-station", daemon=True)

    def start(self) -> None:
        """Begin to run in a thread of its own."""
        self._thread.start()

    # -- what the host asks ------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """What the model does in this process."""
        rank = self._rank
        return self._state if rank is None else rank.state

    def generations(self) -> list[dict[str, Any]]:
        """The jobs held now, without text."""
        rank = self._rank
        return [] if rank is None else rank.generations()

    def facts(self) -> dict[str, Any]:
        """State and telemetry, JSON-safe."""
        rank, of_model = self._rank, self._catalogue.last(self.model)
        return {
            "model": self.model,
            "rank": self._registrar.id,
            "state": self.state,
            "last_error": self.error,
            "catalogue_version": self._catalogue.version,
            "catalogue_error": self._catalogue.error,
            "configured_target_inflight": of_model.target_inflight,
            "replica_max": of_model.replica_max,
            "device": os.environ.get(DEVICES_VARIABLE, ""),
            **({} if rank is None else rank.figures()),
        }

    @property
    def target(self) -> int:
        """Generations in flight that it is asked for: as the catalogue has it now, no more than `-c` says, and as an
        operator has resized it."""
        configured = self._catalogue.last(self.model).target_inflight
        return max(1, (configured if self._limit is None else min(configured, self._limit)) + self._resized)

    def retarget(self) -> None:
        """Go by `target`: the catalogue may have been read again."""
        rank = self._rank
        if rank is not None:
            rank.set_limit(self.target)

    def resize(self, by: int) -> None:
        """Allow `by` more (or fewer) generations in flight than is configured, until the process ends."""
        self._resized += by
        self.retarget()

    def broken(self) -> bool:
        """Whether a thread has died that others rely on: the process must end, so that its leases do."""
        if self._leaving.is_set():
            return False
        rank = self._rank
        return not self._thread.is_alive() or (rank is not None and rank.broken())

    def stalled(self) -> bool:
        """Whether the engine's thread hangs, or frees the model for too long: only the end of the process helps. To be
        asked every second or so: nobody asking for long means that the whole process was stopped."""
        rank, asked_s, self._asked_s = self._rank, self._asked_s, time.monotonic()
        pause_s = self._asked_s - asked_s
        if pause_s > STOPPED_S:
            self._slack_s += pause_s
        free_by_s = self._free_by_s
        is_late = free_by_s is not None and self._asked_s > free_by_s + self._slack_s
        return is_late or (rank is not None and rank.stalled())

    def hurry(self) -> None:
        """End a drain's grace now: what still runs is handed back."""
        rank = self._rank
        if rank is not None:
            rank.hurry()

    def drain(self, grace_s: float) -> None:
        """Leave: stop reading, let running generations finish for `grace_s`, hand the rest back, leave the registry."""
        self._leaving.set()
        self._news.set()
        rank = self._rank
        if rank is not None:
            # It may be draining already, for longer than that.
            rank.drain_within(grace_s)
        self._thread.join()
        if self._rank is not None:
            self._rank.drain(grace_s)
            self._rank = None
        self._state = STOPPED
        self._registrar.stop()

    # -- the registrar's thread --------------------------------------------------------------------------------------

    def _wished(self, wish: Wish) -> None:
        """Something else is wanted, or the time to drain is told again: it may have become shorter; or what failed
        here is still asked for."""
        self._look_again = wish.is_asked
        if wish.loaded:
            self._free_by_s = None
        elif self._rank is not None or self._coming is not None:
            patience_s = min(FREE_S, self._settings.worker.stall_timeout_seconds)
            free_by_s = time.monotonic() + wish.drain_ms / 1000 + patience_s
            if self._free_by_s is None:
                self._slack_s = 0.0
                self._free_by_s = free_by_s
            self._free_by_s = min(self._free_by_s, free_by_s)
            rank = self._rank
            if rank is not None and rank.state == DRAINING:
                rank.drain_within(wish.drain_ms / 1000)
        self._news.set()

    # -- the station's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._retry(self._register)
        while not self._leaving.is_set():
            self._news.clear()
            if not self._retry(self._turn):
                self._news.wait()

    def _register(self) -> bool:
        self._registrar.claim()
        self._registrar.start()
        return False

    def _retry(self, part: Callable[[], bool]) -> bool:
        """What the part says; where the state server fails it, it is done again."""
        while not self._leaving.is_set():
            try:
                return part()
            except STATE_ERRORS as error:
                log.warning("%s: %s; trying again", self.model, type(error).__name__)
                self._leaving.wait(RETRY_S)
        return False

    def _turn(self) -> bool:
        """Do what is wanted; whether there may be more to do."""
        wish = self._registrar.wish
        if self._untold and self._tried is not None:
            self._tell_failure(self._tried)
            wish = self._registrar.wish
        elif self._look_again and self._state == FAILED and self._tried == wish.change != self._all_failed:
            # Whoever else was loading it when this rank failed may have died of that.
            self._tell_model(wish.change)
        self._look_again = False
        if self._rank is not None and not wish.loaded:
            self._unload(self._rank, wish)
            return True
        if self._rank is None and wish.loaded and not self._must_wait(wish):
            return self._load(wish)
        if self._rank is None and not wish.loaded and self._state != UNLOADED:
            self._become(UNLOADED)
        return False

    def _must_wait(self, wish: Wish) -> bool:
        """Whether to load would be in vain: it has failed, or there is still no place."""
        return (self._state == FAILED and self._tried == wish.change) or (self._state == WAITING and not wish.has_place)

    def _become(self, state: str, error: str = "") -> None:
        self._state, self.error = state, error
        self._free_by_s = None
        self._registrar.beat()

    def _load(self, wish: Wish) -> bool:
        is_first, self._has_tried, self._tried = not self._has_tried, True, wish.change
        self._become(LOADING)
        if not self._registrar.wish.loaded:
            return True
        if not self._registrar.wish.has_place:
            self._has_tried, self._tried = not is_first, None
            self._become(WAITING)
            log.info("%s: there are as many replicas as there may be; this one waits", self.model)
            return self._registrar.wish.has_place
        try:
            self._start()
        except NotWanted:
            collect()
            return True
        except (redis.exceptions.RedisError, StateUnavailable):
            # It says nothing of the model.
            collect()
            self._has_tried = not is_first
            raise
        except Exception as error:  # noqa: BLE001 - whatever a load raises is told by name
            collect()
            self._failed(error, wish, is_first=is_first)
            return True
        self._registrar.beat()
        self._registrar.lifecycle.loaded()
        return True

    def _start(self) -> None:
        of_model = self._catalogue.last(self.model)
        rank = Rank(
            self.model,
            self._settings,
            of_model,
            self._registrar,
            self.target,
            part=self.part,
            gate=self._gate,
            on_begun=self._on_begun,
            on_left=self._on_left,
            programs=self._programs,
        )
        try:
            # A server elsewhere needs no room here, and may be awaited for long.
            with nullcontext() if of_model.backend == "openai_remote" else _LOADS:
                if not self._is_wanted():
                    raise NotWanted(f"{self.model} is not wanted any more.")
                # From now on it has something to free; before, it waited for other models.
                self._coming = rank
                rank.start(self._is_wanted)
            self._rank = rank
        finally:
            self._coming = None

    def _is_wanted(self) -> bool:
        return self._registrar.wish.loaded and not self._leaving.is_set()

    def _failed(self, error: Exception, wish: Wish, *, is_first: bool) -> None:
        told = error.message if isinstance(error, GenpoolError) else f"{type(error).__name__}: {error}"
        told = told[:MAX_ERROR_CHARS]
        log.error("%s: cannot be loaded: %s", self.model, told)
        self._state, self.error, self._untold = FAILED, told, True
        self._gives_up = is_first and not wish.is_asked

    def _tell_failure(self, change: int) -> None:
        """Both as a rank and for the model; again, where the state server was away."""
        self._become(FAILED, self.error)
        self._tell_model(change)
        self._untold = False
        if self._gives_up:
            self._on_failed(self.model)

    def _tell_model(self, change: int) -> None:
        if self._registrar.lifecycle.load_failed(change, self._registrar.id, self.error):
            self._all_failed = change

    def _unload(self, rank: Rank, wish: Wish) -> None:
        log.info("%s: unloading", self.model)
        rank.drain(wish.drain_ms / 1000, PauseReason.MODEL_UNLOADING)
        self._state, self._rank = UNLOADED, None
        del rank
        collect()
        self._retry(self._renew_life)
        self._free_by_s = None
        log.info("%s: unloaded", self.model)

    def _renew_life(self) -> bool:
        self._registrar.renew_life()
        return False

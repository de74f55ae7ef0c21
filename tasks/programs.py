"""Programs in one process: who they are bound to, how long they wait, and the thread that plans for them.

Every API and worker process has one and plans for all models, so no Program waits for a process that died; what two of
them do at once does no harm (`pool/store/programs.py`).
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pool.errors import GenpoolError
from pool.program_settings import ProgramSettings
from pool.store.connection import Client
from pool.store.jobs import JobStore
from pool.store.nodes import is_spread
from pool.store.program_endings import Terms
from pool.store.program_sights import Sight, sights
from pool.store.program_upkeep import ProgramUpkeep
from pool.store.programs import ProgramStore
from tasks.config import Settings
from tasks.program_homes import Homes, Newcomer
from tasks.program_log import Teller, tell, tell_calibrations
from tasks.program_planning import Planner
from tasks.program_ranks import RankKeeper
from tasks.program_times import ArrivalTimes, Patience

#: What comes within this time of a turn is planned for together.
GATHER_S = 0.01
#: Longest sleep.
MOST_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a process holds for the Programs of one model."""

    store: ProgramStore
    upkeep: ProgramUpkeep
    homes: Homes
    patience: Patience
    planner: Planner


class Programs:
    """Programs of all models that this process knows, disabled ones too: what they hold must end. Thread-safe."""

    def __init__(self, client: Client, jobs: JobStore, settings: Settings, *, terms: Terms) -> None:
        self._client = client
        self._jobs = jobs
        self._terms = terms
        self._of_model = settings.programs.of_model
        self._settings = {model: self._of_model(model) for model in settings.models}
        self._enabled = [name for name, model in settings.models.items() if model.enabled]
        self._name = secrets.token_hex(8)
        self._parts: dict[str, _Parts] = {}
        self._lock = threading.Lock()
        self._woken: set[str] = set()
        self._event = threading.Event()
        self._stopping = False
        #: When models are looked at again before their next tick.
        self._again_s: dict[str, float] = {}
        #: What fails just now: models, "" for the state server.
        self._failing: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="genpool-programs", daemon=True)

    # -- what the process asks ---------------------------------------------------------------------------------------

    def settings_of(self, model: str) -> ProgramSettings | None:
        """The settings of a model, None where there is no such model or its Programs are off."""
        settings = self._settings.get(model)
        return settings if settings is not None and settings.enabled else None

    def add(self, models: Iterable[str]) -> None:
        """These are models now, too."""
        added = {model: self._of_model(model) for model in models if model not in self._settings}
        if added:
            # Replaced, so that whoever looks through it sees one or the other.
            self._settings = self._settings | added
            self._event.set()

    def store(self, model: str) -> ProgramStore:
        """The model's Programs."""
        return self._of(model).store

    def upkeep(self, model: str) -> ProgramUpkeep:
        """Their upkeep."""
        return self._of(model).upkeep

    def home(
        self, model: str, *, key: str, prompt_tokens: int, program: str = "", relatives: tuple[str, ...] = ()
    ) -> tuple[str, bool]:
        """The rank for a Program ("" for none), and whether it is up; what an arrival needs as `home` and `is_up`.
        `key`: its Claim's hash_key; `prompt_tokens`: of this request; `program`: its id as stored, so that one with a
        rank that is up keeps it; `relatives`: stored ids of its parent and root. Two round trips. Raises
        StateUnavailable."""
        return self._of(model).homes.home(Newcomer(key, prompt_tokens, program, relatives))

    def arrival_times(self, model: str, rank: str, *, deadline_seconds: float | None = None) -> ArrivalTimes:
        """How long a request that comes to `rank` waits: `force_ms` and `deadline_ms` of its Arrival, and
        `queue_timeout_ms` of its job. `deadline_seconds`: its hint. Raises StateUnavailable."""
        return self._of(model).patience.times(rank, deadline_seconds)

    def wake(self, model: str) -> None:
        """Something has changed: plan soon."""
        with self._lock:
            self._woken.add(model)
        self._event.set()

    def completed(self, model: str, rank: str, program: str) -> None:
        """A request of a Program has completed on a rank: it may have to yield to one that waits."""
        self._of(model).planner.completed(rank, program)
        self.wake(model)

    def _of(self, model: str) -> _Parts:
        with self._lock:
            if model not in self._parts:
                self._parts[model] = self._made(model)
            return self._parts[model]

    def _made(self, model: str) -> _Parts:
        store = ProgramStore(self._client, self._jobs, model, self._settings[model])
        upkeep = ProgramUpkeep(store, self._terms)
        homes, teller = Homes(store), Teller(model, store)
        keeper = RankKeeper(store, upkeep, homes, teller, lease_ms=self._terms.lease_ms)
        planner = Planner(store, upkeep, keeper, teller, name=self._name)
        return _Parts(store, upkeep, homes, Patience(store), planner)

    # -- the thread --------------------------------------------------------------------------------------------------

    def start(self, serves: Collection[str] | None = None) -> None:
        """Begin to plan, in a thread of its own, when woken and each `metrics_interval_seconds`. `serves`: models that
        this process runs, None for one that hands on requests of all: those it warns about."""
        told = self._enabled if serves is None else [model for model in self._enabled if model in serves]
        tell_calibrations({model: self._settings[model] for model in told})
        self._thread.start()

    def stop(self) -> None:
        """End the thread. What it leaves undone any other process does."""
        self._stopping = True
        self._event.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        ticks_s: dict[str, float] = {}
        while not self._stopping:
            ticks_s = dict.fromkeys(self._settings, 0.0) | ticks_s
            at_s = min([*ticks_s.values(), *self._again_s.values()], default=math.inf)
            self._event.wait(min(max(0.0, at_s - time.monotonic()), MOST_IDLE_S))
            self._event.clear()
            with self._lock:
                woken, self._woken = self._woken, set()
            now_s = time.monotonic()
            woken |= {model for model, again_s in self._again_s.items() if again_s <= now_s}
            ticking = {model for model, tick_s in ticks_s.items() if tick_s <= now_s}
            for model in ticking:
                ticks_s[model] = now_s + self._settings[model].metrics_interval_seconds
            self.turn(ticking, woken)
            # Many changes in a row are one turn.
            time.sleep(GATHER_S)

    def turn(self, ticking: Collection[str], woken: Collection[str] = ()) -> set[str]:
        """Plan for these models; those that are to be looked at again before their next tick. Whatever fails, the
        thread goes on: a state server that is away ends the turn, and ticks find what it left undone; anything else
        stays with the model it befell, and so does a node of a cluster."""
        models = sorted({*ticking, *woken})
        for model in models:
            self._again_s.pop(model, None)
        try:
            for model, sight in zip(models, self._look(models), strict=True):
                self._attempt(model, sight, ticks=model in ticking)
        except (GenpoolError, OSError) as error:
            self._failed(error)
        else:
            self._failing.discard("")
        return set(self._again_s)

    def _look(self, models: Sequence[str]) -> Sequence[Sight | None]:
        """These models in one trip; None where something is wrong with one of them: each by itself then."""
        try:
            return sights(self._client, [self._of(model).store.keys for model in models])
        except Exception as error:
            if self._ends_turn(error):
                raise
            return [None] * len(models)

    def _attempt(self, model: str, sight: Sight | None, *, ticks: bool) -> None:
        try:
            parts = self._of(model)
            (sight,) = [sight] if sight is not None else sights(self._client, [parts.store.keys])
            again_s = parts.planner.turn(sight, ticks=ticks)
            if again_s is not None:
                self._again_s[model] = time.monotonic() + again_s
        except Exception as error:
            if self._ends_turn(error):
                raise
            self._failed(error, model)
        else:
            self._failing.discard(model)

    def _ends_turn(self, error: Exception) -> bool:
        return isinstance(error, GenpoolError | OSError) and not is_spread(self._client)

    def _failed(self, error: Exception, model: str = "") -> None:
        """Say so once, until it passes. The place, never the values: messages of libraries may quote their input."""
        if model not in self._failing:
            kind, place = type(error).__name__, _place(error)
            tell(logging.WARNING, "program_planning_failed", model=model or None, error=kind, place=place)
        self._failing.add(model)


def _place(error: Exception) -> str:
    """Where it came from, innermost first: functions and lines."""
    frames = traceback.extract_tb(error.__traceback__)
    return ",".join(f"{Path(frame.filename).stem}.{frame.name}:{frame.lineno}" for frame in reversed(frames))

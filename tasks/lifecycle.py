"""Loading and unloading models on an admin's word, for the API and the command line alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pool.errors import GenpoolError, UnknownModel
from pool.rules.model_states import FAILED, LOADED, UNLOADED
from pool.store.lifecycle import Lifecycle, Wanted
from pool.store.ranks import Rank
from tasks.services import Services

#: How often an awaited change is looked at.
LOOK_S = 0.1


class ModelLoadFailed(GenpoolError):
    """A load that was waited for has failed."""

    code = "model_load_failed"


class Superseded(GenpoolError):
    """Something else was asked for before what was waited for was done."""

    code = "superseded"


@dataclass(frozen=True, slots=True)
class Standing:
    """A model as a whole. `is_changed`: whether this call has changed what is wanted."""

    model: str
    wanted: Wanted
    ranks: list[Rank]
    is_changed: bool = False

    @property
    def state(self) -> str:
        """As `pool.rules.model_states` has it."""
        return self.wanted.state(self.ranks)

    def shown(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "id": self.model,
            "object": "model",
            "state": self.state,
            "wanted": UNLOADED if self.wanted.unloads and not self.wanted.loads_next else LOADED,
            "change": self.wanted.change,
            "changed": self.is_changed,
            "accepting_new_requests": self.wanted.takes_jobs,
            "loaded_replicas": sum(rank.state == LOADED for rank in self.ranks),
            "last_error": self.wanted.last_error or None,
        }


class ModelAdmin:
    """Changes what is wanted of the models of a catalogue. All methods raise StateUnavailable, and UnknownModel
    (`unknown_model`) for one that is not in it, or not enabled."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def look(self, model: str) -> Standing:
        """A model as it is now."""
        wanted, ranks = self._lifecycle(model).look()
        return Standing(model, wanted, ranks)

    def load(self, model: str) -> Standing:
        """Have it loaded; while it is being unloaded, as soon as that is over."""
        changed = self._lifecycle(model).load()
        return self._standing(model, changed.code)

    def unload(self, model: str, drain_s: float | None = None) -> Standing:
        """Refuse new jobs from now on, end those that wait, and have it unloaded. `drain_s`: how long running ones may
        take, None for the model's own setting. Those that wait have ended when this returns."""
        lifecycle = self._lifecycle(model)
        if drain_s is None:
            drain_s = self._services.catalogue.models[model].drain_timeout_seconds
        changed = lifecycle.unload(round(drain_s * 1000))
        self._services.sweeper.unloading(model).go_on()
        return self._standing(model, changed.code)

    def settle(self, before: Standing, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> Standing:
        """Wait until what is wanted is done, or the time or `is_over` says so; the model then. `before`: what `load` or
        `unload` gave.

        Raises ModelLoadFailed, and Superseded where somebody else has changed what is wanted.
        """
        until_s = time.monotonic() + timeout_s
        unloads = before.wanted.unloads and not before.wanted.loads_next
        change = before.wanted.change + before.wanted.loads_next
        while True:
            now = self.look(before.model)
            if now.wanted.change > change or (now.wanted.unloads and not now.wanted.loads_next) != unloads:
                raise Superseded(f"Something else was asked of {now.model} meanwhile: it is {now.state}.")
            if now.state == FAILED and not now.wanted.unloads:
                why = now.wanted.last_error or "see its ranks"
                raise ModelLoadFailed(f"{now.model} could not be loaded: {why.rstrip('.')}.")
            if now.state == (UNLOADED if unloads else LOADED) or time.monotonic() >= until_s or is_over():
                return now
            time.sleep(LOOK_S)

    def _standing(self, model: str, code: str) -> Standing:
        wanted, ranks = self._lifecycle(model).look()
        return Standing(model, wanted, ranks, is_changed=code != "same")

    def _lifecycle(self, model: str) -> Lifecycle:
        if model not in self._services.submitter.models():
            raise UnknownModel("No model of this name is served here.", param="model", code="unknown_model")
        return Lifecycle(self._services.client, model)

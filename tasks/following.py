"""`genpool up` follows the catalogue of models: workers come and go as it is read again, and the others stay.

| a model | its workers here |
|---|---|
| added, enabled, or of more replicas | are started. One that cannot be is tried again and again, and ends nobody else |
| removed, disabled, or of fewer replicas | those it has too many drain as at a shutdown, and end |
| put back while they stop | they are started again once they have ended |
| changed otherwise | stay as they are |

A thread of its own asks for the version, as often as any other process does, so that a state server that is slow to
answer holds up nobody who looks after children; these belong to the supervisor's thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace

from pool.errors import GenpoolError
from pool.settings import ModelSettings
from pool.store.connection import connect
from tasks.catalogue import LOOK_S, Catalogue
from tasks.config import Settings, state_url
from tasks.launch import READY_TIMEOUT_S, WORKERS_STAGE, workers
from tasks.supervisor import Child, Supervisor

log = logging.getLogger("genpool.following")


class Following:
    """`settings`: what the supervisor's children were started with; `events`: whether workers send task events."""

    def __init__(self, settings: Settings, supervisor: Supervisor, *, events: bool) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._events = events
        self._client = connect(state_url(settings), max_connections=1, timeout_s=READY_TIMEOUT_S)
        self._catalogue = Catalogue(settings, self._client)
        self._models = self._catalogue.models
        self._wanted = self._workers(self._models)
        #: Workers there have been, by name.
        self._known = set(self._wanted)
        self._is_silent = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="genpool-following", daemon=True)

    def start(self) -> None:
        """Begin to ask; the state server is there."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.connection_pool.disconnect()

    def turn(self) -> None:
        """Start and stop what the models of now ask for. For the supervisor's thread."""
        models = self._catalogue.models
        if models is not self._models:
            self._models, self._wanted = models, self._workers(models)
        for name in self._known - self._wanted.keys():
            self._supervisor.retire(name)
        there = self._supervisor.names()
        for name, child in self._wanted.items():
            if name not in there:
                self._known.add(name)
                self._supervisor.add(child, WORKERS_STAGE)

    def _workers(self, models: Mapping[str, ModelSettings]) -> dict[str, Child]:
        settings = self._settings.model_copy(update={"models": dict(models)})
        return {child.name: replace(child, vital=False) for child in workers(settings, events=self._events)}

    def look(self) -> None:
        """Ask once. A state server that is away is told of once, until it is back; while all stops, it may be."""
        try:
            self._catalogue.follow()
        except (GenpoolError, OSError) as error:
            if not self._is_silent and not self._supervisor.is_stopping:
                log.warning("the catalogue cannot be asked for: %s; it is tried again", type(error).__name__)
                self._is_silent = True
        else:
            self._is_silent = False

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self.look()

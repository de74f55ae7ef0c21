"""A model of a worker process that waits until another one of it is loaded."""

from __future__ import annotations

import threading
import time

import pytest

from pool.rules.model_states import LOADING, UNLOADED
from pool.settings import ModelSettings, WorkerSettings
from pool.state_settings import StateSettings
from pool.store.lifecycle import Lifecycle
from tasks.config import Settings
from tasks.services import open_services
from tests.waiting import wait_until
from workers import station
from workers.trials import TrialGate


def test_a_model_that_waits_for_another_ones_load_has_nothing_to_free(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unloaded meanwhile: however long the other one takes, the process need not end for that. Then it is
    unloaded without having been loaded."""
    settings = Settings(
        state=StateSettings(url=redis_url),
        worker=WorkerSettings(lease_seconds=1.5, renew_seconds=0.2),
        models={"tiny": ModelSettings(source="random:1")},
    )
    services = open_services(settings)
    lock = threading.Lock()
    monkeypatch.setattr(station, "_LOADS", lock)
    monkeypatch.setattr(station, "FREE_S", 0.1)
    monkeypatch.setattr(station.Rank, "_load", lambda *_: pytest.fail("nobody wants it"))
    waiting = station.Station(
        "tiny",
        settings,
        "tiny@here",
        None,
        catalogue=services.catalogue,
        gate=TrialGate(),
        on_begun=lambda *_: None,
        on_left=lambda *_: None,
        on_failed=lambda _: None,
    )
    try:
        with lock:
            waiting.start()
            wait_until(lambda: waiting.state == LOADING and waiting._has_tried, description="it to wait")
            Lifecycle(services.client, "tiny").unload(0)
            wait_until(lambda: not waiting._registrar.wish.loaded, description="it to hear of the unload")
            until_s = time.monotonic() + 1
            wait_until(lambda: time.monotonic() > until_s, description="the time to free it to be over")
            assert not waiting.stalled()
        wait_until(lambda: waiting.state == UNLOADED, description="it to be unloaded")
    finally:
        waiting.drain(0)
        services.close()

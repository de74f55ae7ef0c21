"""The watchdog over the batching loop: hanging is told from being stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pool.rules.admission import Budgets
from tests.scripted.engine import ScriptedEngine
from workers.loop import BatchingLoop
from workers.outlet import Watchdog

TIMEOUT_S = 60.0


@pytest.fixture
def hanging(folder: Path) -> Iterator[BatchingLoop]:
    """A loop that makes no turn."""
    engine = ScriptedEngine(delay_ms=0, log_path=folder / "log")
    yield BatchingLoop(engine, Budgets(), 8)
    engine.close()


def test_a_loop_without_turns_is_stalled_after_the_timeout(hanging: BatchingLoop) -> None:
    """Asked all the time: not before the timeout, but then."""
    now_s = 0.0
    watchdog = Watchdog(hanging, TIMEOUT_S, clock=lambda: now_s)
    for _ in range(60):
        now_s += 1
        assert not watchdog.is_stalled()
    now_s += 1
    assert watchdog.is_stalled()


def test_a_process_that_was_stopped_gets_its_time_again(hanging: BatchingLoop) -> None:
    """Nobody asked for longer than the timeout, because the whole process was stopped: that is no hang. One that goes
    on without turns is."""
    now_s = 0.0
    watchdog = Watchdog(hanging, TIMEOUT_S, clock=lambda: now_s)
    now_s += 3600
    assert not watchdog.is_stalled()
    for _ in range(60):
        now_s += 1
        assert not watchdog.is_stalled()
    now_s += 1
    assert watchdog.is_stalled()

"""When a disk has written offloaded KV: at whatever moment that is, it is noted, and what waits for it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pool.rules.admission import Budgets
from tasks.ports import Event, Kept
from tests.engine.looping import generation, run
from tests.scripted.blocks import BlockEngine
from tests.waiting import wait_until
from workers.hints import HintAnswer, HintOutcome, HintResult
from workers.loop import BatchingLoop
from workers.offload import OffloadBudget, OffloadStore


class Deaf:
    """A sink that takes everything."""

    def congested(self) -> bool:
        """Never."""
        return False

    def deliver(self, events: Sequence[Event]) -> None:
        """Nobody looks at them."""


def test_an_idle_loop_goes_on_when_the_disk_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written frees its room, and the next one is begun, without anything else happening to the loop."""
    loop = BatchingLoop(BlockEngine(blocks=16, recompute_exact=False), Budgets(), 8, offload=_disk(tmp_path))
    for number, holder in enumerate("pqr"):
        loop.submit(generation(holder, range(60 * number + 20, 60 * number + 80), holder=holder))
        run(loop)
    monkeypatch.setattr("workers.loop.IDLE_WAIT_S", 3600)
    loop.start(Deaf())
    for holder in "pqr":
        assert loop.hint(holder, "offload") is HintAnswer.ACCEPTED
    results: list[HintResult] = []

    def are_applied() -> bool:
        results.extend(loop.hint_results())
        return len(results) == 3

    wait_until(are_applied, description="three hints to end")
    assert {result.outcome for result in results} == {HintOutcome.APPLIED}
    assert not loop.holdings()
    loop.stop()


class EndsBetween(Future[Any]):
    """Is done from the second question on."""

    asked = False

    def done(self) -> bool:
        """Whether it is."""
        asked, self.asked = self.asked, True
        return asked and super().done()


def test_what_ends_while_it_is_looked_at_is_noted(tmp_path: Path) -> None:
    """A write is settled sooner or later, at whatever moment it ends."""
    store = OffloadStore(_disk(tmp_path), clock=lambda: 0.0, wake=lambda: None)
    store.put("p", Kept("", np.arange(9, dtype=np.int32), b"KV" * 1000))
    ((_, task),) = store._tasks
    task.result(30)
    task.__class__ = EndsBetween
    store.poll()
    store.poll()
    assert store.disk_bytes == 2000
    store.close()


def _disk(folder: Path) -> OffloadBudget:
    return OffloadBudget(0, 2**20, folder)

"""What a loop keeps of a hundred thousand sessions: nothing."""

from __future__ import annotations

import gc
import sys

import pytest

from tests.engine.looping import generation, looped
from tests.scripted.blocks import BlockEngine
from workers.loop import BatchingLoop

SESSIONS = 100_000
#: As many as any of the loop's bounded memories hold, twice over.
WARM_UP = 10_000


def serve(loop: BatchingLoop, first: int, last: int) -> None:
    """Sessions of one and two tokens: some are cancelled, some come twice, some are refused."""
    for number in range(first, last):
        loop.submit(generation(f"job-{number}", (20, 21, 22 + number % 300), max_tokens=1 + number % 2))
        if number % 50 == 0:
            loop.admit(generation(f"job-{number}"))
            loop.admit(generation("too-long", range(20, 400), max_tokens=4000))
            loop.cancel(f"job-{number}", 1)
        if number % 4 == 0:
            loop.tick()
    while loop.capacity().in_flight:
        loop.tick()


@pytest.mark.timeout(600)
def test_memory_is_bounded_over_a_hundred_thousand_sessions() -> None:
    """The interpreter holds as many blocks of memory afterwards as after the first ten thousand, but for one
    in a hundred sessions."""
    loop = looped(BlockEngine(blocks=32), limit=8)
    serve(loop, 0, WARM_UP)
    gc.collect()
    before = sys.getallocatedblocks()
    serve(loop, WARM_UP, SESSIONS)
    gc.collect()
    assert sys.getallocatedblocks() - before < SESSIONS / 100
    loop.check_integrity()
    telemetry = loop.telemetry()
    ended = telemetry["completed_sessions"] + telemetry["cancelled_sessions"]
    assert (ended, telemetry["rejected_admissions_total"]) == (SESSIONS, 2 * SESSIONS / 50)

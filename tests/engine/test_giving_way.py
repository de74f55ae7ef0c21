"""Who gives way for whom, and what becomes of what was saved."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from pool.rules.admission import Budgets
from tasks.ports import Event, Generation, TokenIds
from tests.engine.looping import generation, run, tokens_of, undisturbed
from tests.scripted.blocks import BlockEngine
from workers.loop import BatchingLoop


def words(count: int, *, seed: int = 0) -> list[int]:
    """Token ids of a prompt."""
    return np.random.default_rng(seed).integers(17, 400, count).tolist()


def alone(given: Generation) -> list[int]:
    """Its tokens when nothing else is there."""
    return undisturbed(BlockEngine(recompute_exact=False), given)[0]


class Refusing(BlockEngine):
    """What was saved can never be restored."""

    def restore(
        self, session: str, epoch: int, blob: bytes, prompt: TokenIds, positions: int, scope: str = ""
    ) -> bool | None:
        return super().restore(session, epoch, blob[:-1], prompt, positions, scope)


def test_a_session_that_cannot_be_restored_does_not_wait_for_room(caplog: pytest.LogCaptureFixture) -> None:
    """It is fed again as soon as there is room, beside others that run, and says the same."""
    loop = BatchingLoop(Refusing(blocks=12, recompute_exact=False), Budgets(kv_overcommit=4.0), 8)
    given = [generation(f"{number}", words(20, seed=number), max_tokens=60) for number in range(6)]
    for each in given:
        loop.submit(each)
    events: list[Event] = []
    came_back_beside_others = False
    with caplog.at_level(logging.WARNING, logger="genpool.loop"):
        while loop.capacity().in_flight:
            misses = loop.telemetry()["cache_misses_total"]
            report = loop.tick()
            events += report.events
            active = loop.telemetry()["active_sessions"]
            came_back_beside_others |= loop.telemetry()["cache_misses_total"] > misses and active > 1
    assert came_back_beside_others
    assert [tokens_of(events, each.job) for each in given] == [alone(each) for each in given]
    assert "cannot be restored" in caplog.text


def test_a_head_has_nobody_exported_for_what_others_share() -> None:
    """A turn outside the batch computed half of its prompt itself, but another one in the batch begins with it: what
    exporting it frees is not the room that the head lacks."""
    loop = BatchingLoop(BlockEngine(blocks=64), Budgets(max_batch_size=1, max_prefill_tokens_per_tick=512), 6)
    loop.submit(generation("before", words(160)))
    run(loop)
    loop.submit(generation("other", words(16, seed=1), max_tokens=369))
    loop.submit(generation("large", words(700, seed=2), max_tokens=37))
    loop.tick()
    prompt = [*words(160), *words(150, seed=3)]
    for number in range(2):
        loop.submit(generation(f"turn-{number}", prompt, max_tokens=14))
        loop.tick()
        loop.tick()
    scheduler = loop._scheduler
    turns = [session for session in scheduler._decoding if session.id.startswith("turn")]
    first, second = sorted(turns, key=lambda session: session.arrival)
    assert (first.cached, second.cached) == (160, 304)
    loop.cancel("other", 1)
    loop._read_mail()
    (head,) = scheduler._waiting
    scheduler._decoding[:] = [second, first]
    assert first.room - first.cached > 736 - (1024 - loop.engine.kv_usage().held) > 32
    assert scheduler._exported_for(head) is None
    assert loop.engine.sole([(first.id, 1)]) == 32
    given = [generation("large", words(700, seed=2), max_tokens=37), generation("turn-1", prompt, max_tokens=14)]
    events = run(loop)
    assert tokens_of(events, "large") == undisturbed(BlockEngine(), given[0])[0]


def test_sessions_that_waiting_ones_replace_are_followed() -> None:
    """Preempted sessions hold nothing while they wait; the books are compared in every turn."""
    loop = BatchingLoop(BlockEngine(blocks=12, recompute_exact=False), Budgets(kv_overcommit=4.0), 8)
    for number in range(6):
        loop.submit(generation(f"{number}", words(20, seed=number), max_tokens=60, holder=f"p{number}"))
    seen = set()
    while loop.capacity().in_flight:
        loop.tick()
        loop.check_integrity()
        assert sum(loop.holdings().values()) == loop.resident_tokens()
        seen.add(len(loop.holdings()))
    assert len(seen) > 1
    assert loop.telemetry()["preempted_total"] > 0

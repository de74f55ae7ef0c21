"""How long generations wait for their next token while prompts arrive, on an engine whose clock is its work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from pool.rules.admission import Budgets
from pool.rules.pacing import BURST_TARGETS
from tasks.ports import Event, Generation, Member, StepResult
from tests.engine.looping import generation, tokens_of, undisturbed
from tests.scripted.blocks import BlockEngine
from workers.loop import BatchingLoop

TARGET_S = 0.25
CALL_S, ROW_S, TOKEN_S = 0.01, 0.004, 0.002


class Timed(BlockEngine):
    """Steps take what a call, decode rows and prompt tokens cost; `prefills`: prompt tokens of each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now_s = 0.0
        self.prefills: list[int] = []

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        chunks = [len(member.tokens) for member in batch if member.start == 0 or len(member.tokens) > 1]
        self.prefills.append(sum(chunks))
        self.now_s += CALL_S + TOKEN_S * sum(chunks) + ROW_S * (len(batch) - len(chunks))
        return super().step(batch)


class Readers:
    """A loop of 16 places that is ticked by hand, and when each job's tokens came."""

    def __init__(self, *, target_s: float, limit: int = 2048) -> None:
        self.engine = Timed(blocks=2048, context_length=8192)
        budgets = Budgets(max_batch_size=16, max_active_sessions=16, max_prefill_tokens_per_tick=limit)
        self.loop = BatchingLoop(
            self.engine, budgets, 16, reuse="off", target_step_s=target_s, clock=lambda: self.engine.now_s
        )
        self.given: list[Generation] = []
        self.events: list[Event] = []
        self.times_s: dict[str, list[float]] = {}

    def submit(self, count: int, prompt_tokens: int, max_tokens: int) -> list[str]:
        """So many generations of different prompts; their names."""
        names = []
        for number in range(len(self.given), len(self.given) + count):
            prompt = [17 + (number + at * (number + 1)) % 400 for at in range(prompt_tokens)]
            self.given.append(generation(f"job-{number}", prompt, max_tokens=max_tokens))
            self.loop.submit(self.given[-1])
            names.append(f"job-{number}")
        return names

    def tick(self, count: int = 1) -> None:
        """Let the loop work."""
        for _ in range(count):
            events = self.loop.tick().events
            self.events += events
            for job in {event.job for event in events if tokens_of([event], event.job)}:
                self.times_s.setdefault(job, []).append(self.engine.now_s)

    def finish(self) -> None:
        """Until all have ended; everybody's tokens are those of one that runs alone."""
        for _ in range(20_000):
            if not self.loop.capacity().in_flight:
                break
            self.tick()
        for each in self.given:
            assert [tokens_of(self.events, each.job)] == undisturbed(BlockEngine(context_length=8192, blocks=512), each)

    def gaps_s(self, names: Sequence[str]) -> list[float]:
        """Of all these, the longest first."""
        times_s = [self.times_s[name] for name in names]
        return sorted((b - a for each in times_s for a, b in pairwise(each)), reverse=True)


def longest_gap(target_s: float) -> tuple[float, float, int]:
    """Eight that run, and a prompt of 4,096 tokens: their longest gap, the newcomer's wait for its first token, and the
    most prompt tokens between two decode steps."""
    readers = Readers(target_s=target_s)
    running = readers.submit(8, 20, 150)
    readers.tick(10)
    arrived_s, steps = readers.engine.now_s, len(readers.engine.prefills)
    (newcomer,) = readers.submit(1, 4096, 2)
    readers.finish()
    first_s = readers.times_s[newcomer][0] - arrived_s
    return readers.gaps_s(running)[0], first_s, max(readers.engine.prefills[steps:])


def test_a_long_prompt_leaves_gaps_short() -> None:
    """From its first piece on, whose cost nobody knew for certain, and it still gets most of the time."""
    gap_s, first_s, most = longest_gap(TARGET_S)
    assert gap_s < 1.2 * TARGET_S
    assert first_s < 1.5 * 4096 * TOKEN_S
    assert most < 128
    gap_s, _, most = longest_gap(0.0)
    assert gap_s > 4.0
    assert most == 2048


@pytest.mark.parametrize("early", [1, 3])
def test_a_burst_is_decoded_in_full_batches(early: int) -> None:
    """Where some prompts of sixteen came a moment sooner: those wait once for the others, and nobody waits again."""
    readers = Readers(target_s=TARGET_S)
    readers.submit(1, 60, 1)
    readers.tick()
    names = readers.submit(early, 65, 20)
    readers.tick()
    names += readers.submit(16 - early, 65, 20)
    readers.finish()
    gaps_s = readers.gaps_s(names)
    assert gaps_s[early - 1] > (16 - early) * 65 * TOKEN_S
    assert gaps_s[early] == pytest.approx(CALL_S + 16 * ROW_S)


def test_a_burst_does_not_take_for_ever() -> None:
    """Prompts that came together are still cut where they are long."""
    readers = Readers(target_s=TARGET_S, limit=100_000)
    readers.submit(1, 60, 1)
    readers.tick()
    readers.submit(4, 4000, 3)
    readers.finish()
    assert 1000 < max(readers.engine.prefills) <= BURST_TARGETS * TARGET_S / TOKEN_S


def test_nobody_waits_for_ever_where_decoding_takes_all_the_time() -> None:
    """The target is less than a step of decode rows takes: prompts still get three quarters of the time."""
    readers = Readers(target_s=0.001)
    readers.submit(15, 20, 400)
    readers.tick(10)
    arrived_s = readers.engine.now_s
    (newcomer,) = readers.submit(1, 4096, 2)
    readers.finish()
    assert readers.times_s[newcomer][0] - arrived_s < 1.5 * 4096 * TOKEN_S

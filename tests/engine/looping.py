"""Drives a batching loop in tests, tick by tick from the test's own thread, and reads its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pool.rules.admission import Budgets
from tasks.payloads import Sampling
from tasks.ports import Engine, Event, Finished, Generation, Tokens
from workers.loop import BatchingLoop
from workers.residence import PrefixReuse

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
SEEDED = Sampling(temperature=0.9, top_p=0.95, ignore_eos=True)


def looped(engine: Engine, *, limit: int = 8, reuse: PrefixReuse = "exact", **budgets: Any) -> BatchingLoop:
    """A loop without a thread."""
    return BatchingLoop(engine, Budgets(**({"max_prefill_tokens_per_tick": 64} | budgets)), limit, reuse=reuse)


def generation(job: str = "a", prompt: Sequence[int] = range(20, 40), **fields: Any) -> Generation:
    """A greedy generation of eight tokens."""
    defaults: dict[str, Any] = {"attempt": 1, "sampling": GREEDY, "max_tokens": 8, "seed": 11}
    return Generation(job=job, prompt=np.array(prompt, dtype=np.int32), **(defaults | fields))


def run(loop: BatchingLoop, *, ticks: int = 3000) -> list[Event]:
    """Tick until nothing is left, and return all events."""
    events: list[Event] = []
    for _ in range(ticks):
        report = loop.tick()
        events += report.events
        loop.engine.check_integrity()
        if not loop.capacity().in_flight:
            loop.check_integrity()
            return events
    raise AssertionError("the loop did not come to an end")


def tokens_of(events: Sequence[Event], job: str = "a", choice: int = 0) -> list[int]:
    """Token ids delivered for one choice."""
    return [
        token
        for event in events
        if isinstance(event, Tokens) and (event.job, event.choice) == (job, choice)
        for token in event.token_ids
    ]


def text_of(events: Sequence[Event], job: str = "a") -> str:
    """Text delivered for a job's first choice."""
    return "".join(event.text for event in events if isinstance(event, Tokens) and event.job == job)


def finished(events: Sequence[Event], job: str = "a") -> Finished:
    """How a job ended by itself."""
    (found,) = [event for event in events if isinstance(event, Finished) and event.job == job]
    return found


def undisturbed(engine: Engine, given: Generation) -> list[list[int]]:
    """The tokens of each choice of a generation that runs alone, all its choices one after the other, nothing shared,
    on an engine that nobody else uses."""
    loop = looped(engine, limit=1, reuse="off", max_prefill_tokens_per_tick=10_000)
    loop.submit(given)
    events = run(loop)
    return [tokens_of(events, given.job, choice) for choice in range(given.n)]

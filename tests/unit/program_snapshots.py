"""Builders of snapshots: a Program, one that waits, and a rank whose figures agree with the Programs it shows."""

from __future__ import annotations

from typing import Any

import hypothesis

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Means, Program, Rank, State, Status, Waiting
from pool.rules.programs.tokens import private_tokens

NOW_MS = 1_000_000
#: For properties: the time an example takes says nothing on a busy machine.
PROPERTY = hypothesis.settings(deadline=None, max_examples=50)
#: A full window: a Program grows by 10 tokens a round, and keeps its place for 2 rounds, so that 4 are protected.
WARM = Means(
    full=True,
    growth_tokens=10,
    prompt_tokens=100,
    output_tokens=20,
    end_to_end_s=1,
    decode_s=1,
    segment_rounds=2,
    throughput_per_s=2,
)


def settings(**fields: Any) -> ProgramSettings:
    """Scheduling is on, and nothing is reserved for output, so that private tokens are the context."""
    return ProgramSettings(**({"enabled": True, "decode_buffer_tokens": 0} | fields))


def running(name: str, tokens: int = 100, **fields: Any) -> Program:
    """An active Program of `r` with a request in flight."""
    return Program(
        **({"id": name, "state": State.ACTIVE, "status": Status.REASONING, "rank": "r", "context_tokens": tokens})
        | {"activated_ms": NOW_MS - 1000, "was_active": True}
        | fields
    )


def idle(name: str, tokens: int = 100, **fields: Any) -> Program:
    """An active Program of `r` between two requests."""
    return running(name, tokens, **({"status": Status.ACTING} | fields))


def waiting(
    name: str, tokens: int = 100, *, waited_ms: int = 0, wait_ms: int = 60_000, priority: int = 0, **fields: Any
) -> Program:
    """A paused Program of `r` that has waited for so long, and resumes by force after `wait_ms`."""
    queued_ms = NOW_MS - waited_ms
    front = Waiting(queued_ms=queued_ms, force_ms=queued_ms + wait_ms, priority=priority)
    return running(name, tokens, **({"state": State.PAUSED, "waiting": front, "was_active": False} | fields))


def rank(*programs: Program, capacity: int | None = 1000, **fields: Any) -> Rank:
    """The rank `r` with those of the Programs that are active there and those that wait."""
    active = tuple(program for program in programs if program.state is State.ACTIVE)
    buffer_tokens = fields.pop("buffer_tokens", 0)
    figures: dict[str, Any] = {
        "id": "r",
        "capacity_tokens": capacity,
        "ledger_tokens": sum(private_tokens(program, buffer_tokens) for program in active),
        "active": len(active),
        "reasoning": sum(program.status is Status.REASONING for program in active),
        "programs": active,
        "waiting": tuple(program for program in programs if program.waiting is not None),
    }
    return Rank(**(figures | fields))

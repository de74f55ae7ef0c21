"""Programs among the callers: requests that name one, and agents that take several turns and then say goodbye."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.chaos.clients import Callers, Work

#: Programs that single requests of any door belong to: few, so that requests of one overlap.
SHARED_PROGRAMS = 10
#: One request in so many of these ends its Program.
ENDS_EVERY = 12
#: Between two turns of an agent, its tool runs for so long at most: both shorter and longer than places are kept.
TOOL_S = 2.5
#: Turns of an agent.
TURNS = (2, 6)
#: The doors of an agent's turns: those whose client sees the end.
AGENT_DOORS = ("sync", "stream", "plain stream", "background", "twice")


def of_program(work: Work, program: str, **hints: Any) -> Work:
    """The same work as a request of a Program."""
    context = {"program_id": program} | hints
    return replace(work, body=dict(work.body) | {"vllm_xargs": {"agentic_context": context}})


def of_some_program(work: Work, rng: random.Random) -> Work:
    """The same work as a request of one of a few Programs, with hints of its own."""
    hints: dict[str, Any] = {}
    if rng.random() < 0.3:
        hints["priority"] = rng.randrange(3)
    if rng.random() < 0.3:
        hints["expected_output_length"] = rng.choice((10, 100, 300))
    if rng.random() < 0.3:
        hints["kv_retention_ttl_seconds"] = rng.choice((0, 0.5, 3))
    if rng.randrange(ENDS_EVERY) == 0:
        hints["expected_resume"] = False
    return of_program(work, f"shared-{rng.randrange(SHARED_PROGRAMS)}", **hints)


@dataclass(frozen=True)
class Agent:
    """One agent's run: its turns in order. `says`: whether the last turn says that it is the last; else it finishes by
    the route of its own."""

    program: str
    turns: Sequence[Work]
    says: bool

    def run(self, callers: Callers, seed: int) -> None:
        """Take the turns, each once the one before it has ended, with a tool between."""
        rng = random.Random(seed)
        for number, work in enumerate(self.turns):
            if number:
                time.sleep(rng.uniform(0, TOOL_S))
            last = self.says and number == len(self.turns) - 1
            turn = of_program(work, self.program, step_id=number, **({"expected_resume": False} if last else {}))
            callers.call(rng.choice(AGENT_DOORS), turn, rng.getrandbits(32))
        if not self.says:
            callers.finish(self.program, rng.getrandbits(32))

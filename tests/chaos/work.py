"""What the callers ask for, drawn by the run's seed, with the text that an undisturbed run gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx

from tests.chaos.agents import TURNS, Agent, of_some_program
from tests.chaos.clients import Callers, Work
from tests.system import SCRIPTED, TINY

#: How often each door is taken.
DOORS = {
    "sync": 18,
    "stream": 18,
    "plain stream": 10,
    "background": 18,
    "twice": 6,
    "celery": 18,
    "leaver": 6,
    "canceller": 6,
}
#: Part of the works that belong to Programs, and of the draws that are an agent's whole run.
IN_PROGRAMS, AGENTS = 0.4, 0.08
#: One job in so many kills every worker that runs it.
POISON_EVERY = 400
#: Distinct requests to the real engine.
TINY_POOL = 24
MAX_TOKENS = 240
#: So many of them run undisturbed at once: about one a worker.
TOGETHER = 3
#: Conversations that agents have with the real engine.
CONVERSATIONS = 4
#: One in so many begins with the same long text as all of these.
SHARING_EVERY = 2
SHARED = "You live on a small island where people tell each other what the sea has brought them in the night. " * 4


class WorkSource:
    """Draws what callers do. `_pool`, `_talks`: works of the real engine, their texts from an undisturbed run."""

    def __init__(self, seed: int, url: str) -> None:
        self._rng = random.Random(seed)
        self._drawn = 0
        bodies = [_tiny_body(number) for number in range(TINY_POOL)]
        talks = [_turn_body(talk, turn) for talk in range(CONVERSATIONS) for turn in range(TURNS[1])]
        with ThreadPoolExecutor(TOGETHER) as pool:  # company changes no text
            texts = list(pool.map(lambda body: _answer(url, body), bodies + talks))
        works = [Work(TINY, body, (text,)) for body, text in zip(bodies + talks, texts, strict=True)]
        self._pool = works[:TINY_POOL]
        self._talks = [works[at : at + TURNS[1]] for at in range(TINY_POOL, len(works), TURNS[1])]
        for number in range(4):
            work = self._scripted(number)
            found = _answer(url, work.body)
            assert found == work.texts[0], "the scripted engine does not follow its script"

    def draw(self, callers: Callers) -> Callable[[], None]:
        """What one caller does from beginning to end."""
        self._drawn += 1
        if self._drawn % POISON_EVERY == 0:
            return partial(callers.call, "background", self._maybe_of_program(self._poison()), self._seed())
        if self._rng.random() < AGENTS:
            return partial(self._agent().run, callers, self._seed())
        (door,) = self._rng.choices(list(DOORS), weights=list(DOORS.values()))
        work = self._rng.choice(self._pool) if self._rng.random() < 0.3 else self._scripted(self._drawn)
        if door != "celery":
            work = self._maybe_of_program(work)
        return partial(callers.call, door, work, self._seed())

    def _seed(self) -> int:
        return self._rng.getrandbits(32)

    def _maybe_of_program(self, work: Work) -> Work:
        return of_some_program(work, self._rng) if self._rng.random() < IN_PROGRAMS else work

    def _agent(self) -> Agent:
        count = self._rng.randint(*TURNS)
        if self._rng.random() < 0.5:
            turns = self._rng.choice(self._talks)[:count]
        else:
            turns = [self._scripted(self._drawn * 10 + number) for number in range(count)]
        return Agent(f"agent-{self._drawn}", turns, says=self._rng.random() < 0.5)

    def _scripted(self, number: int) -> Work:
        piece = f"{number:05d}."
        count = self._rng.choice((1, 3, 10, 20, 40))
        history = "".join(f"{turn} said something long before. |" for turn in range(self._rng.choice((0, 0, 0, 200))))
        body = {"model": SCRIPTED, "input": f"{history}repeat {count} {piece}", "max_output_tokens": 4000}
        return Work(SCRIPTED, body, (piece * count,))

    def _poison(self) -> Work:
        after = self._rng.choice((0, 3))
        body = {"model": SCRIPTED, "input": f"crash {after}", "max_output_tokens": 4000}
        return Work(SCRIPTED, body, ("",), outcomes=("failed",), error_code="poison")


def _tiny_body(number: int) -> dict[str, Any]:
    greedy = number % 4 < 2
    shared = {"instructions": SHARED} if number % SHARING_EVERY else {}
    return {
        "model": TINY,
        **shared,
        "input": f"Tell me about number {number} and what came after it.",
        "max_output_tokens": MAX_TOKENS + 20 * number,
        "temperature": 0.0 if greedy else 0.9,
        "seed": 1000 + number,
    }


def _turn_body(talk: int, turn: int) -> dict[str, Any]:
    """A turn of a conversation: all that was said before, and one line more."""
    said = "".join(f"What does box {talk} hold after {number} days? " for number in range(turn + 1))
    return _tiny_body(talk) | {"input": said, "max_output_tokens": 60 + 10 * turn}


def _answer(url: str, body: Any) -> str:
    """The text of an undisturbed run."""
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    answer.raise_for_status()
    return "".join(part["text"] for item in answer.json()["output"] for part in item["content"])

"""What the callers ask for, drawn by the run's seed, with the text that an undisturbed run gives."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.chaos.clients import Work
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
#: One job in so many kills every worker that runs it.
POISON_EVERY = 400
#: Distinct requests to the real engine.
TINY_POOL = 24
MAX_TOKENS = 240
#: So many of them run undisturbed at once: about one a worker.
TOGETHER = 3
#: One in so many begins with the same long text as all of these.
SHARING_EVERY = 2
SHARED = "You live on a small island where people tell each other what the sea has brought them in the night. " * 4


class WorkSource:
    """Draws doors and works. `references` are the texts of the real engine's pool, from an undisturbed run."""

    def __init__(self, seed: int, url: str) -> None:
        self._rng = random.Random(seed)
        self._drawn = 0
        self._pool = [_tiny_body(number) for number in range(TINY_POOL)]
        with ThreadPoolExecutor(TOGETHER) as pool:  # company changes no text
            self._references = list(pool.map(lambda body: _answer(url, body), self._pool))
        for number in range(4):
            work = self._scripted(number)
            found = _answer(url, work.body)
            assert found == work.texts[0], "the scripted engine does not follow its script"

    def draw(self) -> tuple[str, Work, int]:
        """A door, a work, and a seed for the client's own choices."""
        self._drawn += 1
        if self._drawn % POISON_EVERY == 0:
            return "background", self._poison(), self._rng.getrandbits(32)
        (door,) = self._rng.choices(list(DOORS), weights=list(DOORS.values()))
        if self._rng.random() < 0.3:
            at = self._rng.randrange(TINY_POOL)
            work = Work(TINY, self._pool[at], (self._references[at],))
        else:
            work = self._scripted(self._drawn)
        return door, work, self._rng.getrandbits(32)

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


def _answer(url: str, body: Any) -> str:
    """The text of an undisturbed run."""
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    answer.raise_for_status()
    return "".join(part["text"] for item in answer.json()["output"] for part in item["content"])

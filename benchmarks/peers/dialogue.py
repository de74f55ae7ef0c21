"""The client's side of a benchmark's dialogue. Standard library only: peers import it in their own environments.

| line in | what it does | line out |
|---|---|---|
| `enqueue N` | submits N jobs, one after another | seconds taken |
| `round_trips N` | N times: submits one job and waits until its result is seen | list of N times in ms |

And the worker's side, where jobs end when they are told to:

| line in | what it does | line out |
|---|---|---|
| `take N` | begins N jobs, as they come | how many it holds |
| `end N` | ends N of them, in random order, at its rate | list of `[token, monotonic time in ns before it was ended]` |
| `burst N` | the same, as fast as it can | the same |
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

Job = TypeVar("Job")

#: Jobs ended in one round trip when it is to be fast.
BURST = 50

#: What every queue carries: 400 characters of prompt, as an agent's short turn has.
PROMPT = "The state of the work and what is to be done next, in short words. " * 6
assert len(PROMPT) == 402


#: The arguments of one generation.
CALL: dict[str, Any] = {"model": "noop", "prompt": PROMPT, "max_tokens": 1, "temperature": 0.0}
#: The result of a generation that generates nothing.
RESULT: dict[str, Any] = {
    "model": "noop",
    "state": "completed",
    "outputs": [{"text": "", "finish_reason": "stop", "tokens": 1}],
    "usage": {"prompt_tokens": 100, "output_tokens": 1},
}


def serve(enqueue: Callable[[], object], round_trip: Callable[[], object]) -> None:
    """Answer until the input ends. Both callables submit one job; `round_trip` returns when its result is seen."""
    for line in sys.stdin:
        word, count = line.split()
        if word == "enqueue":
            started_s = time.perf_counter()
            for _ in range(int(count)):
                enqueue()
            answer: object = time.perf_counter() - started_s
        elif word == "round_trips":
            answer = [_timed_ms(round_trip) for _ in range(int(count))]
        else:
            raise ValueError(f"unknown word {word!r}")
        print(json.dumps(answer), flush=True)


def _timed_ms(round_trip: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    round_trip()
    return (time.perf_counter() - started_s) * 1000


def answer_text(token: str) -> str:
    """The text that a job of this token gets, so that everyone can tell whether they got their own."""
    return f"answer-to-{token}"


def serve_endings(
    take: Callable[[], list[Job]], end: Callable[[list[Job]], None], token_of: Callable[[Job], str], *, rate: float
) -> None:
    """Answer until the input ends. `rate`: jobs a second that `end` ends, one by one."""
    held: list[Job] = []
    shuffled = random.Random(1)
    for line in sys.stdin:
        word, number = line.split()
        count = int(number)
        if word == "take":
            while len(held) < count:
                held += take()
            shuffled.shuffle(held)
            answer: object = len(held)
        else:
            due, held = held[:count], held[count:]
            answer = _ended(due, end, token_of, 1 / rate) if word == "end" else _burst(due, end, token_of)
        print(json.dumps(answer), flush=True)


def _ended(
    jobs: list[Job], end: Callable[[list[Job]], None], token_of: Callable[[Job], str], pause_s: float
) -> list[tuple[str, int]]:
    times, started_s = [], time.monotonic()
    for number, job in enumerate(jobs):
        time.sleep(max(0.0, started_s + number * pause_s - time.monotonic()))
        times.append((token_of(job), time.monotonic_ns()))
        end([job])
    return times


def _burst(jobs: list[Job], end: Callable[[list[Job]], None], token_of: Callable[[Job], str]) -> list[tuple[str, int]]:
    times = []
    for start in range(0, len(jobs), BURST):
        part = jobs[start : start + BURST]
        at_ns = time.monotonic_ns()
        times += [(token_of(job), at_ns) for job in part]
        end(part)
    return times

"""The client's side of a benchmark's dialogue. Standard library only: peers import it in their own environments.

| line in | what it does | line out |
|---|---|---|
| `enqueue N` | submits N jobs, one after another | seconds taken |
| `round_trips N` | N times: submits one job and waits until its result is seen | list of N times in ms |
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

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

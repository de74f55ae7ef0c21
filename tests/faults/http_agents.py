"""Agents at a node: turns of exactly so many tokens over HTTP, and what became of their Programs."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import httpx

from pool.store.program_keys import ProgramKeys
from pool.store.records import JobRecord
from tests.scripted.engine import scripted_vocabulary
from tests.system import SCRIPTED, System

_VOCABULARY = scripted_vocabulary()
#: For an answer; systems have a shorter `sync_wait_seconds`.
WAIT_S = 90.0
#: Behind this line the scripted engine says x for as long as it is let.
ENDLESS = "|repeat 60000 x\n"


def prompt(name: str, tokens: int, *, said: int = 0, line: str = ENDLESS) -> list[int]:
    """A prompt of exactly so many tokens, which begins with a name. `line`: its script; the last `said` tokens are what
    it has said before."""
    head, filler, script, x = map(_encoded, (name, ".", line, "x"))
    missing = tokens - len(head) - len(script) - said
    assert missing >= 0, "too short"
    return [*head, *filler * missing, *script, *x * said]


@cache
def _encoded(text: str) -> tuple[int, ...]:
    return tuple(_VOCABULARY.encode(text, special=False))


def send(system: System, ids: list[int], *, output: int = 1, **context: Any) -> httpx.Response:
    """One request of a Program for `output` tokens, and its answer when it has ended. Its job is kept in the system's
    `accepted`."""
    url = f"{system.api_url(system.apis[0])}/v1/completions"
    asked = {"model": SCRIPTED, "prompt": ids, "max_tokens": output, "vllm_xargs": {"agentic_context": context}}
    answer = system.http.post(url, json=asked, timeout=WAIT_S)
    if "id" in answer.json():
        system.accepted.append(answer.json()["id"])
    return answer


def turn(system: System, ids: list[int], **options: Any) -> JobRecord:
    """The same for one that must succeed: its record."""
    answer = send(system, ids, **options)
    assert answer.status_code == 200, answer.text
    return system.record(answer.json()["id"])


class Event(NamedTuple):
    """A transition of a Program, by its stored id; `ms`: by the state server's clock."""

    ms: int
    what: str
    reason: str
    program: str
    rank: str


def events(system: System) -> list[Event]:
    """All of them, oldest first."""
    with system.client() as client:
        found = client.xrange(ProgramKeys(f"{SCRIPTED}:0").program_events)
    return [
        Event(int(entry.split(b"-")[0]), *(fields[name.encode()].decode() for name in Event._fields[1:]))
        for entry, fields in found
    ]


def pauses(system: System) -> Counter[str]:
    """How often each Program was paused."""
    return Counter(event.program for event in events(system) if event.what == "pause")

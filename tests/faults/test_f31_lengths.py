"""F31: what does not fit is refused with both numbers before it is queued; what just fits runs, whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults.conftest import StartSystem
from tests.faults.raw_http import Answer, port_of, post
from tests.system import SCRIPTED, System

CONTEXT = 64
RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
SCRIPT = "|say xyz"
#: The template ends a conversation with a line feed; a token is a byte.
LEAST = len(SCRIPT) + 1


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """One worker whose sessions hold 64 tokens."""
    return start_shared_system(workers=1, delay_ms=1, context_tokens=CONTEXT)


def ask(system: System, door: str, prompt: Any, **fields: Any) -> Answer:
    """A request with this prompt."""
    given = {"input": prompt} if door == RESPONSES else {"messages": prompt}
    return post(port_of(system), door, json.dumps({"model": SCRIPTED, **given, **fields}).encode())


def text(tokens: int) -> str:
    """A prompt of that many tokens."""
    return "." * (tokens - LEAST) + SCRIPT


def queued(system: System) -> int:
    """Jobs that the model holds."""
    with system.client() as client:
        return int(client.xlen(system.keys().queue)) + int(client.zcard(system.keys().index))


def test_f31_over_the_context_is_refused_with_both_numbers(system: System) -> None:
    """The prompt alone, and prompt and output together; a million tokens as quickly as one too many."""
    for tokens in (CONTEXT, CONTEXT + 1, 10**6):
        error = ask(system, RESPONSES, text(tokens)).error(400)
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]
        assert tokens == 10**6 or str(tokens) in error["message"]
    for tokens, more in ((60, 5), (10, 55), (1 + LEAST, 64)):
        error = ask(system, RESPONSES, text(tokens), max_output_tokens=more).error(400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_output_tokens")
        assert f"{tokens} tokens" in error["message"] and f"{CONTEXT} tokens" in error["message"]
    chat = [{"role": "user", "content": text(60)}]
    assert ask(system, CHAT, chat, max_tokens=5).error(400)["code"] == "context_length_exceeded"
    assert queued(system) == 0
    system.assert_recovered()


def test_f31_what_just_fits_runs_and_is_counted_whole(system: System) -> None:
    """One token of room is used; usage tells the whole prompt, so nothing was cut."""
    for tokens, more in ((CONTEXT - 1, 1), (60, 4), (10, 54)):
        answer = ask(system, RESPONSES, text(tokens), max_output_tokens=more)
        assert answer.status == 200, answer.body
        response = answer.json()
        assert response["usage"]["input_tokens"] == tokens
        assert response["output"][0]["content"][0]["text"] == "xyz"[:more]
    unlimited = ask(system, RESPONSES, text(CONTEXT - 1)).json()
    assert (unlimited["status"], unlimited["usage"]["output_tokens"]) == ("incomplete", 1)
    system.assert_recovered()


@pytest.mark.parametrize("prompt", ["", [], [""], [{"role": "user", "content": ""}], None, 5, {}])
def test_f31_an_empty_prompt_is_refused(system: System, prompt: Any) -> None:
    """Named, and nothing is queued; blanks are text."""
    assert str(ask(system, RESPONSES, prompt).error(400)["param"]).startswith("input")
    assert str(ask(system, CHAT, prompt).error(400)["param"]).startswith("messages")
    assert queued(system) == 0


def test_f31_blanks_are_a_prompt(system: System) -> None:
    """A single blank is a token, and runs."""
    answer = ask(system, RESPONSES, " ", max_output_tokens=1)
    assert answer.status == 200, answer.body
    assert answer.json()["usage"]["input_tokens"] == 2
    system.assert_recovered()

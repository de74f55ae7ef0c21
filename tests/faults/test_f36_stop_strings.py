"""F36: stop strings over the edges of tokens: never shown in part, and what only looked like one is not lost."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.payloads import MAX_STOP_CHARS, MAX_STOP_STRINGS
from tests.faults.conftest import StartSystem
from tests.faults.reading_text import are_joins, read_in_all_ways, script
from tests.system import SCRIPTED, System

SKY = (b"red ", b"gr", b"ee", b"n sky")
CAT = "\N{GRINNING CAT FACE WITH SMILING EYES}"


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """One worker that emits what it is told."""
    return start_shared_system(workers=1, delay_ms=5)


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        pytest.param(SKY, ["green"], "red ", id="over three tokens"),
        pytest.param(SKY, "green", "red ", id="one stop string that is no list"),
        pytest.param(SKY, ["greenhouse"], "red green sky", id="no match: all of it"),
        pytest.param(SKY, ["sky is"], "red green sky", id="no match at the very end"),
        pytest.param(SKY, ["n s"], "red gree", id="inside a token"),
        pytest.param(SKY, ["red"], "", id="at the beginning"),
        pytest.param(SKY, ["sky"], "red green ", id="at the end"),
        pytest.param(SKY, ["een", "reen"], "red g", id="complete at once: the longest"),
        pytest.param(SKY, ["green sky", "ee"], "red gr", id="the first to be complete"),
        pytest.param(
            SKY, [f"x{n}" for n in range(MAX_STOP_STRINGS - 1)] + ["ky"], "red green s", id="as many as may be"
        ),
        pytest.param((b" \xf0\x9f", b"\x98\xb8A"), [CAT], " ", id="a character that is cut"),
        pytest.param((b" \xf0\x9f", b"\x98\xb8A"), [f"{CAT}B"], f" {CAT}A", id="withheld behind a cut character"),
    ],
)
def test_f36_stop_strings(system: System, pieces: tuple[bytes, ...], stop: Any, text: str) -> None:
    """The text before the match, and `stop` as the reason, streamed or not; no delta ever held more than that."""
    told = read_in_all_ways(system, script(*pieces), stop=stop)
    assert {way: (found.text, found.ended) for way, found in told.items()} == dict.fromkeys(told, (text, "stop"))


def test_f36_withheld_text_is_shown_at_the_token_limit(system: System) -> None:
    """The limit cuts a stop string off in the middle: it was none."""
    told = read_in_all_ways(system, script(*SKY), stop=["green"], max_output_tokens=3)
    assert {(found.text, found.ended) for found in told.values()} == {("red gree", "length")}


def test_f36_only_what_may_become_a_stop_string_waits(system: System) -> None:
    """Text in front of it is shown with its own token."""
    told = read_in_all_ways(system, script(*SKY), stop=["n skyline"])
    for way in ("response stream", "chat stream", "replay"):
        assert are_joins(told[way].deltas, ("red ", "gr", "ee", "n sky"))
    told = read_in_all_ways(system, script(*SKY), stop=["greenhouse"])
    assert are_joins(told["response stream"].deltas, ("red ", "green sky"))


@pytest.mark.parametrize(
    "stop",
    ["", [""], ["a", ""], ["x"] * (MAX_STOP_STRINGS + 1), ["x" * (MAX_STOP_CHARS + 1)], [1], 5, ["a", None], {"a": 1}],
    ids=repr,
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_f36_stop_strings_that_cannot_be_are_refused(system: System, path: str, stop: Any) -> None:
    """By name, before anything is queued."""
    prompt = {"input": "say x"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "say x"}]}
    url = f"{system.api_url(system.apis[0])}{path}"
    answer = system.http.post(url, json={"model": SCRIPTED, "stop": stop, **prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].partition("[")[0] == "stop"

"""F28: a number that is none, or too much, is refused with its field's name; workers never hear of it."""

from __future__ import annotations

import json

import pytest

from tests.faults.conftest import StartSystem
from tests.faults.raw_http import Answer, port_of, post
from tests.system import SCRIPTED, System

DOORS = {
    "/v1/responses": {"input": "say x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "say x"}]},
}
#: As they stand in the body: most are no Python value.
NUMBERS = {
    "max_tokens": ["0", "-1", "1.5", '"10"', "true", str(2**31), str(2**63), "1e999", "NaN", "-0", "9" * 5000],
    "temperature": ["NaN", "Infinity", "-Infinity", "-1", '"0"', "1e999", "9" * 400, "[]", "2.0000001"],
    "top_p": ["NaN", "Infinity", "-1", '"0"', "0", "1.0000001", "false"],
    "n": ["0", "-1", str(10**6), "1.0", '"1"', "true", "NaN"],
    "seed": ["-1", str(2**64), '"x"', "1e3", "NaN", "true"],
    "min_tokens": ["-1", str(2**64), "NaN"],
    "queue_timeout_seconds": ["0", "-1", "NaN", "1e999", '"5"'],
}
#: Accepted: the default, the edge, and so cold that it is greedy.
GOOD = {"max_tokens": ["null", "1"], "temperature": ["null", "1e-9", "0", "2"], "top_p": ["null", "1e-9", "1"]}


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """One node, one worker."""
    return start_shared_system(workers=1, delay_ms=1)


def ask(system: System, door: str, field: str, literal: str) -> Answer:
    """A request that is right but for one field, which stands there as it is given."""
    known = json.dumps({"model": SCRIPTED, **DOORS[door]})
    name = "max_output_tokens" if (door, field) == ("/v1/responses", "max_tokens") else field
    return post(port_of(system), door, f'{known[:-1]}, "{name}": {literal}}}'.encode())


@pytest.mark.parametrize("door", DOORS)
def test_f28_what_is_no_number_of_that_field_is_refused(system: System, door: str) -> None:
    """400 and the field's name (or, of a number that no parser takes, that it is too large); an answer that is itself
    JSON; nothing queued, nothing begun."""
    seen = system.scripted_log.read_text()
    for field, literals in NUMBERS.items():
        for literal in literals:
            error = ask(system, door, field, literal).error(400)
            named = {field, "max_output_tokens"} if field == "max_tokens" else {field}
            if len(literal) == 5000:
                assert "too large" in error["message"]
            else:
                assert error["param"] in named, (field, literal[:20], error)
                assert error["param"] in error["message"]
    with system.client() as client:
        assert client.xlen(system.keys().queue) == client.zcard(system.keys().lanes["backlog"]) == 0
        assert client.zcard(system.keys().index) == 0
    assert system.scripted_log.read_text() == seen
    system.assert_recovered()


@pytest.mark.parametrize("door", DOORS)
def test_f28_edges_and_defaults_run(system: System, door: str) -> None:
    """null is the default, 1e-9 is greedy: no division by it, no NaN."""
    for field, literals in GOOD.items():
        for literal in literals:
            answer = ask(system, door, field, literal)
            assert answer.status == 200, (field, literal, answer.body)
            assert '"x"' in json.dumps(answer.json())
    system.assert_recovered()

"""F30: bytes that are no text, text that is no text, text in another encoding: refused or kept whole, never a 500."""

from __future__ import annotations

import json

import pytest

from tests.faults.conftest import StartSystem
from tests.faults.raw_http import Answer, port_of, post, send
from tests.system import SCRIPTED, System

RESPONSES = "/v1/responses"
LONE = "\\ud800"
#: Text like any other: right to left, zero width, four bytes, joined, NUL, a byte order mark, a line separator.
TEXTS = ["\u202eabc\u200b\u200d", "\U0001f9d1\u200d\U0001f680", "a\u0000b", "\ufeffx", "\u2028\u0085", "\U0010ffff"]


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """One node, one worker, with time for texts of a few hundred tokens."""
    return start_shared_system(workers=1, delay_ms=1)


def ask(system: System, raw: str | bytes, **headers: str) -> Answer:
    """A body as it is given."""
    return post(port_of(system), RESPONSES, raw.encode() if isinstance(raw, str) else raw, **headers)


def body(**fields: str) -> str:
    """A request whose fields stand there as they are given, as JSON literals."""
    known = {"model": f'"{SCRIPTED}"', "input": '"say x"', **fields}
    return "{" + ", ".join(f'"{name}": {literal}' for name, literal in known.items()) + "}"


BAD_BYTES = [
    b"\xff\xfe{}",
    b'{"model": "scripted", "input": "\xff"}',
    b'{"model": "scripted", "input": "\xc0\xaf"}',
    b'{"model": "scripted", "input": "\xed\xa0\x80"}',
    '{"model": "scripted", "input": "x"}'.encode("utf-16"),
    '{"model": "scripted", "input": "\u4e2d"}'.encode("gbk"),
]


def test_f30_bytes_that_are_no_text_are_refused(system: System) -> None:
    """Also overlong forms and encoded surrogates; the error does not repeat them."""
    for raw in BAD_BYTES:
        assert ask(system, raw).error(400)["code"] == "invalid_json"
    system.assert_recovered()


def test_f30_lone_surrogates_are_refused_wherever_they_stand(system: System) -> None:
    """In text, stop strings, names, ids, metadata and field names, and named; a pair of them is a character."""
    fields = {
        "input": f'"{LONE}"',
        "instructions": f'"a{LONE}"',
        "stop": f'["{LONE}"]',
        "model": f'"{LONE}"',
        "user": f'"{LONE}"',
        "program_id": f'"{LONE}"',
        "metadata": f'{{"k": "{LONE}"}}',
    }
    for field, literal in fields.items():
        assert str(ask(system, body(**{field: literal})).error(400)["param"]).startswith(field)
    assert ask(system, body(**{LONE: "1"})).error(400)["code"] == "unknown_parameter"
    assert ask(system, body(metadata=f'{{"{LONE}": "v"}}')).error(400)
    pair = ask(system, body(input='"say \\ud83d\\ude00"'))
    assert pair.status == 200
    assert "\U0001f600" in json.dumps(pair.json(), ensure_ascii=False)
    system.assert_recovered()


def test_f30_nul_is_text_in_a_prompt_and_nothing_in_a_name(system: System) -> None:
    """Kept in the prompt; 400 in ids and names."""
    for field in ("model", "user"):
        assert ask(system, body(**{field: '"a\\u0000b"'})).error(400)["param"] == field
    for path in ("/v1/responses/a%00b", "/v1/models/a%00b", "/v1/responses/%ff%fe", "/v1/responses/a%0d%0ab"):
        send(port_of(system), "GET", path).error(404)
    system.assert_recovered()


def test_f30_all_text_comes_back_as_it_went(system: System) -> None:
    """Echoed by the script, whole and streamed."""
    for text in TEXTS:
        script = json.dumps(f"say {text}")
        whole = ask(system, body(input=script))
        assert whole.status == 200, whole.body
        assert whole.json()["output"][0]["content"][0]["text"] == text
        stream = ask(system, body(input=script, stream="true")).body.decode("utf-8")
        events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert deltas == text
    system.assert_recovered()


@pytest.mark.parametrize(
    "content_type",
    ["application/json; charset=gbk", "text/plain", "application/json; charset=utf-16", "multipart/form-data", "x"],
)
def test_f30_other_encodings_are_refused_by_name(system: System, content_type: str) -> None:
    """415, not a guess."""
    assert ask(system, body(), Content_Type=content_type).error(415)["code"] == "unsupported_media_type"


def test_f30_a_missing_content_type_is_refused(system: System) -> None:
    """Nothing is assumed."""
    send(port_of(system), "POST", RESPONSES, body=body().encode()).error(415)
    system.assert_recovered()

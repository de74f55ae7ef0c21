"""What is refused before queueing: each case a 400 (404, 413, 415) in OpenAI's shape that names the field, and nothing
stored."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from pool.store.ranks import Card
from pool.store.server import StateServer
from tests.webapp.conftest import settings_for
from tests.webapp.playing_worker import CONTEXT_LENGTH, MODEL, PlayingWorker
from tests.webapp.refusals import error_of
from webapp.app import create_app
from workers.engines.tiny import tiny_vocabulary

#: A worker has published the model, so everything is checked before queueing.
pytestmark = pytest.mark.usefixtures("worker")


@pytest.fixture(scope="module")
def http(state_server: StateServer) -> Iterator[FlaskClient]:
    """Flask's own client of one application for all these tests; the state server is emptied between them."""
    app = create_app(settings_for(state_server.url))
    yield app.test_client()
    app.extensions["genpool"].close()


RESPONSES = "/v1/responses"
CHAT = "/v1/chat/completions"
ROUTES = {RESPONSES: {"input": "hi"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}


def post(http: FlaskClient, route: str, **fields: Any) -> TestResponse:
    """A request that is right but for `fields`. NaN and the like travel as Python writes them."""
    body = json.dumps({"model": MODEL, **ROUTES[route], **fields})
    return http.post(route, data=body, content_type="application/json")


NUMBERS = [
    *(("max_tokens", v) for v in (0, -1, 1.5, "10", True, 2**31, 2**63, 10**400, float("inf"), float("nan"), 1.0)),
    *(("temperature", v) for v in (float("nan"), float("inf"), -1, -1e-9, 2.1, "0", True)),
    *(("top_p", v) for v in (float("nan"), 0, -1, 1.1, "1", False)),
    *(("top_k", v) for v in (-1, 2**31, 1.0, "1", True)),
    *(("min_p", v) for v in (-0.1, 1.1, "0", True)),
    *((f"{kind}_penalty", v) for kind in ("presence", "frequency") for v in (-2.1, 2.1, "1", True, float("nan"))),
    *(("repetition_penalty", v) for v in (0, -1, 101, "1", True)),
    *(("logit_bias", v) for v in ([], 5, {"x": 1}, {"-1": 1}, {"01": 1}, {"5": 101}, {"5": "1"}, {"5": None})),
    *(("stop_token_ids", v) for v in (5, [-1], ["5"], [True], [2**31], [5] * 65)),
    *(("top_logprobs", v) for v in (-1, 21, "1", True, 1.0)),
    *(("seed", v) for v in (-1, 2**63, 2**64, "x", 1.5, True)),
    *(("min_tokens", v) for v in (-1, "1", True, 2**40)),
    *(("stop", v) for v in ("", [""], ["a"] * 5, "x" * 257, 5, [5], {"a": 1})),
    *(("stream", v) for v in (1, "true", [])),
    *(("store", v) for v in (0, "false")),
    *(("ignore_eos", v) for v in (1, "no")),
    *(("user", v) for v in (5, "x" * 257, "line\nbreak", "nul\0")),
    *(("model", v) for v in ("", 5, "nul\0", "x" * 300)),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("field", "value"), NUMBERS, ids=lambda value: repr(value)[:24])
def test_wrong_values_name_their_field(
    http: FlaskClient, worker: PlayingWorker, route: str, field: str, value: Any
) -> None:
    """Wrong types, non-finite and out-of-range values: 400 with `param`; nothing is stored."""
    name = "max_output_tokens" if (route, field) == (RESPONSES, "max_tokens") else field
    error = error_of(post(http, route, **{name: value}))
    assert re.split(r"[.\[]", error["param"])[0] == name
    assert error["type"] == "invalid_request_error"
    assert worker.held == 0


@pytest.mark.parametrize("n", [0, -1, 17, 10**6, "2", True, 1.0])
def test_choices_are_bounded(http: FlaskClient, n: Any) -> None:
    """n is 1 to 16, in chat only."""
    assert error_of(post(http, CHAT, n=n))["param"] == "n"
    assert error_of(post(http, RESPONSES, n=n))["code"] == "unknown_parameter"


@pytest.mark.parametrize("text", ["1e999", "-1e999", "NaN", "-Infinity"])
def test_numbers_beyond_floats_name_their_field(http: FlaskClient, text: str) -> None:
    """Literals that JSON or floats do not have are refused where they stand."""
    body = f'{{"model": "{MODEL}", "input": "hi", "temperature": {text}}}'
    error = error_of(http.post(RESPONSES, data=body, content_type="application/json"))
    assert error["param"] == "temperature"


UNSUPPORTED = {
    RESPONSES: {
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": "required",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        "conversation": "conv_1",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"},
        "truncation": "auto",
        "prompt": {"id": "p"},
        "stream_options": {"include_obfuscation": True},
    },
    CHAT: {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "functions": [{"name": "f"}],
        "response_format": {"type": "json_object"},
        "best_of": 2,
        "echo": True,
        "modalities": ["text", "audio"],
        "audio": {"voice": "x", "format": "wav"},
        "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "low",
        "web_search_options": {},
        "background": True,
        "program_id": "p",
    },
}


@pytest.mark.parametrize(
    ("route", "field"), [(route, field) for route, table in UNSUPPORTED.items() for field in table]
)
def test_unsupported_options_are_refused_by_name(
    http: FlaskClient, worker: PlayingWorker, route: str, field: str
) -> None:
    """An option that genpool lacks is never ignored in silence."""
    error = error_of(post(http, route, **{field: UNSUPPORTED[route][field]}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert field in error["message"]
    assert worker.held == 0


NEUTRAL = {
    RESPONSES: {
        "tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "top_logprobs": 0, "include": [],
        "reasoning": {"effort": None}, "truncation": "disabled", "frequency_penalty": 0, "previous_response_id": None,
        "lane": None, "parallel_tool_calls": False, "temperature": None, "max_output_tokens": None, "metadata": None,
        "store": False, "service_tier": "auto", "stream_options": {"include_obfuscation": False}, "stream": None,
    },
    CHAT: {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0,
        "logit_bias": {}, "presence_penalty": 0.0, "modalities": ["text"], "n": None, "stop": None, "seed": None,
        "functions": [], "stream_options": None, "max_tokens": 3, "max_completion_tokens": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("route", NEUTRAL)
def test_neutral_values_are_accepted(http: FlaskClient, worker: PlayingWorker, route: str) -> None:
    """null, empty and default values ask for nothing."""
    with worker.answering("x"):
        answer = post(http, route, **NEUTRAL[route])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("route", ROUTES)
def test_neutral_means_exactly_neutral(http: FlaskClient, route: str) -> None:
    """`false` is not the number 0."""
    assert error_of(post(http, route, frequency_penalty=False))["param"] == "frequency_penalty"
    assert error_of(post(http, route, top_logprobs=False))["param"] == "top_logprobs"


def test_bias_names_the_id_and_the_limit(http: FlaskClient, route: str = CHAT) -> None:
    """Of a bound that is broken, and of an id that the model does not have."""
    error = error_of(post(http, route, logit_bias={"5": 1, "17": -100.5}))
    assert error["param"] == "logit_bias[17]"
    assert "-100" in error["message"]
    for field, value in (("logit_bias", {"5": 1, "512": 1}), ("stop_token_ids", [5, 512])):
        error = error_of(post(http, route, **{field: value}))
        assert error["param"] == field
        assert "512" in error["message"]
        assert "511" in error["message"]


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (RESPONSES, {"top_logprobs": 1}, "top_logprobs"),
        (RESPONSES, {"include": "message.output_text.logprobs"}, "include"),
        (RESPONSES, {"include": [5]}, "include[0]"),
        (RESPONSES, {"logprobs": True}, "logprobs"),
    ],
)
def test_logprobs_are_asked_for_as_the_route_has_it(
    http: FlaskClient, worker: PlayingWorker, route: str, fields: dict[str, Any], param: str
) -> None:
    """Alternatives alone, or another route's way, are refused."""
    assert error_of(post(http, route, **fields))["param"] == param
    assert worker.held == 0


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("field", ["grammar", "guided_json", "structured_outputs", "bad_words", "typical_p"])
def test_options_of_other_servers_are_refused_by_name(http: FlaskClient, route: str, field: str) -> None:
    """None is ignored."""
    error = error_of(post(http, route, **{field: "x"}))
    assert error["param"] == field
    assert field in error["message"]


def test_what_the_models_engine_lacks_is_refused_by_name(make_app: Callable[..., Flask], worker: PlayingWorker) -> None:
    """As its card says, before queueing, with the field that this route has for it."""
    blob = tiny_vocabulary().to_blob()
    worker.registry.publish(Card(CONTEXT_LENGTH, CONTEXT_LENGTH, "without", blob, logprobs=False, seed=False))
    http = make_app().test_client()
    for route, fields, param in (
        (CHAT, {"logprobs": True}, "logprobs"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (CHAT, {"seed": 1}, "seed"),
    ):
        error = error_of(post(http, route, **fields))
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")
        assert "engine" in error["message"]
    assert worker.held == 0


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("value", [1, None, "x"])
def test_unknown_fields_are_refused(http: FlaskClient, route: str, value: Any) -> None:
    """A misspelt option is an error, whatever its value; its name comes back cut and printable."""
    error = error_of(post(http, route, temprature=value))
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
    error = error_of(post(http, route, **{"\ud800\n" + "x" * 500: value}))
    assert error["param"] == "??" + "x" * 62


MESSAGES = [
    ([], "messages"),
    ("hi", "messages"),
    ([5], "messages[0]"),
    ([{"role": "tool", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "a"}, {"role": "user", "content": "\ud800"}], "messages[1].content"),
    ([{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "a", "name": "bob"}], "messages[0].name"),
    ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ([{"role": "user", "content": "a", "colour": "red"}], "messages[0].colour"),
    ([{"role": "user", "content": ""}], "messages"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES, ids=range(len(MESSAGES)))
def test_wrong_messages_name_the_place(http: FlaskClient, worker: PlayingWorker, messages: Any, param: str) -> None:
    """The path to the fault, as in messages[0].content[0].type."""
    assert error_of(post(http, CHAT, messages=messages))["param"] == param
    assert worker.held == 0


INPUTS = [
    ("", "input"),
    ([], "input"),
    (5, "input"),
    ({"prompt": 1}, "input"),
    ([""], "input[0]"),
    ([{"role": "user", "content": ""}], "input"),
    ("\ud800", "input"),
    ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "input[0].type"),
    ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "input_text", "text": "x", "size": 1}]}], "input[0].content[0].size"),
    ([{"role": "robot", "content": "x"}], "input[0].role"),
]


@pytest.mark.parametrize(("value", "param"), INPUTS, ids=range(len(INPUTS)))
def test_wrong_inputs_name_the_place(http: FlaskClient, worker: PlayingWorker, value: Any, param: str) -> None:
    """Empty inputs, unknown items and parts, wrong roles."""
    assert error_of(post(http, RESPONSES, input=value))["param"] == param
    assert worker.held == 0


def test_an_answer_can_be_sent_back_as_input(http: FlaskClient, worker: PlayingWorker) -> None:
    """Output items of one response are input items of the next, unchanged."""
    with worker.answering("x"):
        first = post(http, RESPONSES).json
        assert first is not None
        history = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "and?"}]
        answer = post(http, RESPONSES, input=history)
    assert answer.status_code == 200, answer.text


METADATA = [
    ({str(i): "x" for i in range(17)}, "metadata"),
    ({"k" * 65: "x"}, "metadata"),
    ({"k": "v" * 513}, "metadata.k"),
    ({"k": 5}, "metadata.k"),
    ({"k": "\ud800"}, "metadata.k"),
    ([], "metadata"),
]


@pytest.mark.parametrize(("metadata", "param"), METADATA, ids=range(len(METADATA)))
def test_metadata_is_bounded(http: FlaskClient, metadata: Any, param: str) -> None:
    """At most 16 pairs, keys of 64 and values of 512 characters, text only."""
    assert str(error_of(post(http, RESPONSES, metadata=metadata))["param"]).startswith(param)


def test_contradictions_are_refused(http: FlaskClient) -> None:
    """Fields that cannot both be meant."""
    assert error_of(post(http, CHAT, max_tokens=3, max_completion_tokens=4))["param"] == "max_tokens"
    assert error_of(post(http, CHAT, max_tokens=3, min_tokens=4))["param"] == "min_tokens"
    assert error_of(post(http, RESPONSES, max_output_tokens=3, min_tokens=4))["param"] == "min_tokens"
    assert error_of(post(http, CHAT, stream_options={"include_usage": True}))["param"] == "stream_options"


@pytest.mark.parametrize("field", ["model", "input"])
@pytest.mark.parametrize("value", ["absent", None])
def test_required_fields(http: FlaskClient, field: str, value: Any) -> None:
    """A missing field and null are the same."""
    body = {"model": MODEL, "input": "hi", field: value}
    if value == "absent":
        del body[field]
    error = error_of(http.post(RESPONSES, json=body))
    assert (error["param"], error["code"]) == (field, "missing_required_parameter")


@pytest.mark.parametrize("model", ["nope", "disabled", "../etc", "TINY"])
def test_unknown_models_are_404(http: FlaskClient, model: str) -> None:
    """Only enabled models of the catalogue are served."""
    error = error_of(post(http, RESPONSES, model=model), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def prompt_tokens(http: FlaskClient, worker: PlayingWorker, text: str) -> int:
    """How long a prompt is, as usage tells."""
    with worker.answering("x"):
        answer = post(http, RESPONSES, input=text, max_output_tokens=1)
    assert answer.status_code == 200, answer.text
    return int(answer.get_json()["usage"]["input_tokens"])


def test_context_is_a_hard_limit(http: FlaskClient, worker: PlayingWorker) -> None:
    """prompt + max tokens at the context runs; one more is refused with both numbers, before queueing."""
    held = prompt_tokens(http, worker, "hi")
    left = CONTEXT_LENGTH - held
    with worker.answering("x"):
        assert post(http, RESPONSES, max_output_tokens=left).status_code == 200
    error = error_of(post(http, RESPONSES, max_output_tokens=left + 1))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_output_tokens")
    assert str(held) in error["message"] and str(CONTEXT_LENGTH) in error["message"]
    assert error_of(post(http, RESPONSES, input="z" * 3000))["code"] == "context_length_exceeded"
    assert worker.held == 0


RAW = [
    (b"", 400),
    (b"   ", 400),
    (b"[" * 4000, 400),
    (b'{"a":' * 600 + b"1" + b"}" * 600, 400),
    (b'{"input":' * 65 + b"1" + b"}" * 65, 400),
    (b"3", 400),
    (b"null", 400),
    (b"[]", 400),
    (b'"x"', 400),
    (b"\xff\xfe", 400),
    (b'{"model": "\xff"}', 400),
    (b'{"model": "tiny", "model": "tiny", "input": "x"}', 400),
    (b'{"model": "tiny", "input": [{"role": "user", "role": "user", "content": "x"}]}', 400),
    (b"{" + b'"seed": ' + b"9" * 3900 + b"}", 400),
    (b'{"model": "tiny"', 400),
    (b'{"model": "tiny", "input": "x"} trailing', 400),
    (b'{"model": "tiny", "input": "' + b"x" * 5000 + b'"}', 413),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("body", "status"), RAW, ids=[raw[:16].decode("latin-1") for raw, _ in RAW])
def test_bodies_that_are_no_request(
    http: FlaskClient, worker: PlayingWorker, route: str, body: bytes, status: int
) -> None:
    """Broken, nested, scalar, duplicate-keyed and oversize bodies are the client's error, never ours."""
    error_of(http.post(route, data=body, content_type="application/json"), status)
    assert worker.held == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {},
        {"Content-Type": "application/json; charset=gbk"},
        {"Content-Type": "application/json", "Content-Encoding": "br"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip, gzip"},
        {"Content-Type": "application/x-www-form-urlencoded"},
    ],
    ids=str,
)
def test_other_media_types_are_415(http: FlaskClient, headers: dict[str, str]) -> None:
    """UTF-8 JSON only, plain or compressed in one of two ways."""
    error = error_of(http.post(RESPONSES, data=b'{"model": "tiny", "input": "x"}', headers=headers), 415)
    assert error["code"] == "unsupported_media_type"


def test_text_comes_back_as_it_was(http: FlaskClient, worker: PlayingWorker) -> None:
    """Right-to-left marks, zero-width joiners, emoji and NUL in a prompt are text like any other."""
    text = "a\0b \u202eabc\u200d \U0001f9d1\u200d\U0001f680"
    with worker.answering(text, "\u2028\x85"):
        answer = post(http, RESPONSES, input=text, instructions=text)
        stream = post(http, RESPONSES, input=text, stream=True)
    assert answer.status_code == 200, answer.text
    response = answer.get_json()
    assert response["instructions"] == text
    assert response["output"][0]["content"][0]["text"] == text + "\u2028\x85"
    stream.data.decode("ascii")

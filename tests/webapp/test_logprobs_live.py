"""Log-probabilities in answers: on each route, whole and streamed, now and later, in the official client's types."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from openai.types.responses.response_output_text import Logprob

from pool.store.log import TokenLogprobs
from tests.webapp.api_process import ApiProcess
from tests.webapp.playing_worker import MODEL, PlayingWorker
from tests.webapp.test_shapes_live import EVENT, data
from workers.engines.tiny import tiny_vocabulary

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2},
    COMPLETIONS: {"prompt": "x", "logprobs": 2},
    RESPONSES: {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
}
EOS = 2


def byte(value: int) -> int:
    """The token of one byte."""
    return 3 + value


def with_logprobs(token: int, logprob: float = -0.5) -> tuple[int, TokenLogprobs]:
    """A token that was the second likeliest, after `!`."""
    return token, TokenLogprobs(logprob, ((byte(ord("!")), -0.25), (token, logprob)))


#: "hé", whose second character is cut in two; then a stop string's beginning that was none; then the end.
ENTRIES = [
    ((byte(ord("h")),), "h"),
    ((byte(0xC3),), ""),
    ((byte(0xA9), byte(ord("s"))), "é"),
    ((byte(ord("t")), EOS), "st"),
]
SHOWN = [b"h", b"\xc3", b"\xa9", b"s", b"t"]


@pytest.fixture
def told(raw: httpx.Client, worker: PlayingWorker) -> Callable[..., Any]:
    """A request for log-probabilities and its whole answer, or its events."""

    def ask(route: str, *, end: str = "stop", **fields: Any) -> Any:
        body = {"model": MODEL, **ASKED[route], **fields}
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(raw.post, route, json=body)
            turn = worker.take()
            for ids, text in ENTRIES:
                worker.tell(turn, *map(with_logprobs, ids), text=text)
            worker.finish(turn, end)
            text = answer.result().text
        return list(data(iter(text.splitlines()))) if fields.get("stream") else json.loads(text)

    return ask


def listed(logprobs: list[dict[str, Any]]) -> list[bytes]:
    """The bytes of each token; the list is checked on the way."""
    for token in logprobs:
        Logprob.model_validate(token)
        assert token["logprob"] == -0.5
        assert [other["token"] for other in token["top_logprobs"]] == ["!", token["token"]]
        assert [other["logprob"] for other in token["top_logprobs"]] == [-0.25, -0.5]
    return [bytes(token["bytes"]) for token in logprobs]


def test_chat_tells_them(told: Callable[..., Any]) -> None:
    """Of the tokens that are shown: not of the one that ended it; half a character has its bytes."""
    answer = told(CHAT)
    ChatCompletion.model_validate(answer)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "hést"
    assert choice["logprobs"]["refusal"] is None
    assert listed(choice["logprobs"]["content"]) == SHOWN
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["h", "\ufffd", "\ufffd", "s", "t"]


def test_a_chats_stream_tells_the_same(told: Callable[..., Any]) -> None:
    """Each chunk those of the text it shows; chunks without text none."""
    *chunks, done = told(CHAT, stream=True)
    assert done == "[DONE]"
    seen = []
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        (choice,) = chunk["choices"]
        logprobs = choice["logprobs"]
        if choice["delta"].get("content"):
            tokens = listed(logprobs["content"])
            assert choice["delta"]["content"] in b"".join([b"", *seen, *tokens]).decode()
            seen += tokens
        else:
            assert logprobs is None
    assert seen == SHOWN


def test_completions_tell_them_in_columns(told: Callable[..., Any]) -> None:
    """Offsets count characters; bytes that are no text are written out; the drawn token is among the likeliest."""
    answer = told(COMPLETIONS)
    Completion.model_validate(answer)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "s", "t"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["top_logprobs"] == [{"!": -0.25, token: -0.5} for token in logprobs["tokens"]]
    chunks = [chunk for chunk in told(COMPLETIONS, stream=True) if chunk != "[DONE]"]
    columns = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["text"]]
    assert {name: [*chain.from_iterable(each[name] for each in columns)] for name in logprobs} == logprobs


def test_the_drawn_token_is_told_however_unlikely(raw: httpx.Client, worker: PlayingWorker) -> None:
    """Completions have it in `top_logprobs` beside the likeliest."""
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(raw.post, COMPLETIONS, json={"model": MODEL, "prompt": "x", "logprobs": 1})
        turn = worker.take()
        worker.tell(turn, (byte(ord("a")), TokenLogprobs(-9999.0, ((byte(ord("b")), -0.125),))), text="a")
        worker.finish(turn)
    assert answer.result().json()["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -0.125, "a": -9999.0}]


def test_responses_tell_them_on_request(raw: httpx.Client, told: Callable[..., Any], other_node: ApiProcess) -> None:
    """In the answer, when it is polled, and on another node."""
    answer = told(RESPONSES)
    Response.model_validate(answer)
    (part,) = answer["output"][0]["content"]
    assert listed(part["logprobs"]) == SHOWN
    assert answer["top_logprobs"] == 2
    assert raw.get(f"{RESPONSES}/{answer['id']}").json()["output"] == answer["output"]
    with httpx.Client(base_url=other_node.base_url, timeout=20) as elsewhere:
        assert elsewhere.get(f"{RESPONSES}/{answer['id']}").json()["output"] == answer["output"]


def test_a_responses_stream_tells_them(raw: httpx.Client, told: Callable[..., Any]) -> None:
    """With each delta and with each event that tells the whole; a replay is the same, from any number on."""
    events = told(RESPONSES, stream=True, end="length")
    for event in events:
        EVENT.validate_python(event)
    by_type: dict[str, list[Any]] = {}
    for event in events:
        by_type.setdefault(event["type"], []).append(event)
    assert [*chain(*(listed(event["logprobs"]) for event in by_type["response.output_text.delta"]))] == SHOWN
    (done,), (part,) = by_type["response.output_text.done"], by_type["response.content_part.done"]
    (item,), (end,) = by_type["response.output_item.done"], by_type["response.incomplete"]
    assert listed(done["logprobs"]) == listed(part["part"]["logprobs"]) == SHOWN
    assert item["item"] == end["response"]["output"][0]
    assert listed(item["item"]["content"][0]["logprobs"]) == SHOWN
    replay = f"{RESPONSES}/{end['response']['id']}?stream=true"
    assert list(data(raw.get(replay).iter_lines())) == events
    assert list(data(raw.get(f"{replay}&starting_after=5").iter_lines())) == events[6:]


def test_an_answer_may_be_sent_back_with_them(
    raw: httpx.Client, worker: PlayingWorker, told: Callable[..., Any]
) -> None:
    """As clients do that keep the history themselves."""
    output = told(RESPONSES)["output"]
    with worker.answering("x"):
        body = {"model": MODEL, "input": [*output, {"role": "user", "content": "And?"}]}
        assert raw.post(RESPONSES, json=body).status_code == 200


def test_other_doors_jobs_tell_them_as_responses_do(raw: httpx.Client, told: Callable[..., Any]) -> None:
    """A chat's job, read by its id."""
    answer = raw.get(f"{RESPONSES}/{told(CHAT)['id']}").json()
    assert listed(answer["output"][0]["content"][0]["logprobs"]) == SHOWN


def test_they_are_as_described(raw: httpx.Client, told: Callable[..., Any]) -> None:
    """By /openapi.json."""
    document = raw.get("/openapi.json").json()
    for route, name in ((CHAT, "ChatCompletion"), (COMPLETIONS, "Completion"), (RESPONSES, "Response")):
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        Draft202012Validator(schema).validate(told(route))


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_each_choice_has_its_own(raw: httpx.Client, worker: PlayingWorker, route: str) -> None:
    """Also where their tokens come by turns."""
    vocabulary = tiny_vocabulary()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(raw.post, route, json={"model": MODEL, **ASKED[route], "n": 2})
        turn = worker.take()
        for index in range(4):
            token = byte(ord("a") + index)
            worker.tell(turn, with_logprobs(token), text=vocabulary.token_bytes(token).decode(), choice=index % 2)
        worker.finish(turn)
    for choice, letters in zip(answer.result().json()["choices"], ("ac", "bd"), strict=True):
        logprobs = choice["logprobs"]
        names = logprobs["tokens"] if route == COMPLETIONS else [each["token"] for each in logprobs["content"]]
        assert "".join(names) == letters


def test_nobody_who_did_not_ask_gets_any(raw: httpx.Client, worker: PlayingWorker) -> None:
    """null or empty, on each route."""
    with worker.answering("x"):
        chat = raw.post(CHAT, json={"model": MODEL, "messages": ASKED[CHAT]["messages"]}).json()
        completion = raw.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"}).json()
        response = raw.post(RESPONSES, json={"model": MODEL, "input": "x"}).json()
    assert chat["choices"][0]["logprobs"] is completion["choices"][0]["logprobs"] is None
    assert response["output"][0]["content"][0]["logprobs"] == []

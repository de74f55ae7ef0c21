"""What answers look like: each is valid by the official client's own types, none of whose fields is left to chance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, get_args

import httpx
import openai as sdk
import pytest
from openai import OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import Field, TypeAdapter

from tests.webapp.api_process import ApiProcess
from tests.webapp.playing_worker import MODEL, PlayingWorker

pytestmark = pytest.mark.usefixtures("worker")

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": MODEL, "input": "Say"},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Say"}]},
    "/v1/completions": {"model": MODEL, "prompt": "Say"},
}
CHUNKED = [route for route in ROUTES if route != "/v1/responses"]
#: By `type`, so that an error speaks of one kind of event.
EVENT: TypeAdapter[Any] = TypeAdapter(Annotated[get_args(ResponseStreamEvent)[0], Field(discriminator="type")])


def own_error_code(response: dict[str, Any]) -> dict[str, Any]:
    """The response with an error code that the client's types list: ours say more."""
    error = response["error"]
    return response | {"error": error and error | {"code": "server_error"}}


def data(lines: Iterator[str]) -> Iterator[Any]:
    """The JSON of server-sent events; `[DONE]` as it is."""
    for line in lines:
        if line.startswith("data: "):
            text = line.removeprefix("data: ")
            yield text if text == "[DONE]" else json.loads(text)


@pytest.fixture
def ended(raw: httpx.Client, worker: PlayingWorker) -> Callable[..., Any]:
    """A request and its whole answer, of a job with 5 cached tokens."""

    def ask(route: str, **fields: Any) -> Any:
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(raw.post, route, json={**ROUTES[route], **fields})
            turn = worker.take()
            worker.say(turn, "Hel", "lo")
            worker.finish(turn, cached_tokens=5)
            text = answer.result().text
        return list(data(iter(text.splitlines()))) if fields.get("stream") else json.loads(text)

    return ask


# --- whole answers


@pytest.mark.parametrize(
    ("route", "shape"),
    [("/v1/responses", Response), ("/v1/chat/completions", ChatCompletion), ("/v1/completions", Completion)],
)
def test_an_answer_is_one_of_the_clients_own(ended: Callable[..., Any], route: str, shape: Any) -> None:
    """Every required field is there and of its type."""
    shape.model_validate(ended(route))


def test_items_and_models_are_too(raw: httpx.Client, ended: Callable[..., Any]) -> None:
    """The list with its first and last id, and a model."""
    job = ended("/v1/responses")["id"]
    items = ResponseItemList.model_validate(raw.get(f"/v1/responses/{job}/input_items").json())
    assert items.first_id == items.last_id == items.data[0].id
    Model.model_validate(raw.get(f"/v1/models/{MODEL}").json())


def test_a_response_is_valid_in_every_state(raw: httpx.Client, worker: PlayingWorker) -> None:
    """Queued, running, and ended in each way."""
    seen = []

    def look(job: str) -> None:
        answer = raw.get(f"/v1/responses/{job}").json()
        seen.append(Response.model_validate(own_error_code(answer)).status)

    for end in ("completed", "incomplete", "failed", "cancelled"):
        job = raw.post("/v1/responses", json={**ROUTES["/v1/responses"], "background": True}).json()["id"]
        look(job)
        turn = worker.take()
        worker.say(turn, "some")
        look(job)
        if end == "failed":
            worker.fail(turn, "engine_error")
        elif end == "cancelled":
            raw.post(f"/v1/responses/{job}/cancel")
        else:
            worker.finish(turn, "stop" if end == "completed" else "length")
        look(job)
        assert seen[-3:] == ["queued", "in_progress", end]


# --- usage


def test_usage_is_the_records_own(raw: httpx.Client, ended: Callable[..., Any]) -> None:
    """What the engine reported, in all shapes, polled and replayed."""
    response = ended("/v1/responses")
    usage = response["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 5
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0
    assert usage["total_tokens"] == usage["input_tokens"] + 2
    assert raw.get(f"/v1/responses/{response['id']}").json()["usage"] == usage
    *_, last = data(raw.get(f"/v1/responses/{response['id']}?stream=true").iter_lines())
    assert last["response"]["usage"] == usage


@pytest.mark.parametrize("route", CHUNKED)
@pytest.mark.parametrize("stream", [False, True])
def test_usage_of_choices_is_the_records_own(ended: Callable[..., Any], route: str, stream: bool) -> None:
    """Whole and streamed."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = ended(route, **options)
    usage = answer[-2]["usage"] if stream else answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + 2


# --- streams


@pytest.mark.parametrize(
    ("route", "shape"),
    [("/v1/responses", None), ("/v1/chat/completions", ChatCompletionChunk), ("/v1/completions", Completion)],
)
def test_each_event_is_one_of_the_clients_own(ended: Callable[..., Any], route: str, shape: Any) -> None:
    """By the type of a stream's events, and of its chunks."""
    events = ended(route, stream=True)
    if shape is None:
        for event in events:
            assert EVENT.validate_python(event).type == event["type"]
        return
    assert events.pop() == "[DONE]"
    for chunk in events:
        for choice in chunk["choices"]:
            # The type of a completion's chunk is that of a whole one, which always has a reason.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        shape.model_validate(chunk)


@pytest.mark.parametrize("end", ["failed", "cancelled", "incomplete"])
def test_each_last_event_is_one_of_the_clients_own(raw: httpx.Client, worker: PlayingWorker, end: str) -> None:
    """However a response ends."""
    body = {**ROUTES["/v1/responses"], "stream": True, "background": True}
    with raw.stream("POST", "/v1/responses", json=body) as answer:
        events = data(answer.iter_lines())
        job, turn = next(events)["response"]["id"], worker.take()
        worker.say(turn, "some")
        if end == "failed":
            worker.fail(turn, "poison")
        elif end == "cancelled":
            raw.post(f"/v1/responses/{job}/cancel")
        else:
            worker.finish(turn, "length")
        *_, last = events
    last["response"] = own_error_code(last["response"])
    assert EVENT.validate_python(last).response.status == end


@pytest.mark.parametrize("route", CHUNKED)
def test_a_cancelled_stream_of_chunks_says_so(
    raw: httpx.Client, worker: PlayingWorker, other_node: ApiProcess, route: str
) -> None:
    """An error in band, then `[DONE]`; the client raises it."""
    with raw.stream("POST", route, json={**ROUTES[route], "stream": True}) as answer, other_node.openai() as elsewhere:
        job = worker.take().handout.task_id
        elsewhere.responses.cancel(job)
        *_, error, done = data(answer.iter_lines())
    assert (error["error"]["code"], done) == ("cancelled", "[DONE]")


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_opens_at_once(start_node: Callable[..., ApiProcess], worker: PlayingWorker, route: str) -> None:
    """Headers and a first line come before anything happens to the job, however far the next comment line is."""
    node = start_node(SERVER__KEEPALIVE_SECONDS="60")
    with (
        httpx.Client(base_url=node.base_url, timeout=10) as client,
        client.stream("POST", route, json={**ROUTES[route], "stream": True}) as answer,
    ):
        assert answer.headers["x-accel-buffering"] == "no"
        assert next(answer.iter_lines())
        assert worker.held == 1


def test_a_replay_with_nothing_new_opens_at_once(start_node: Callable[..., ApiProcess], worker: PlayingWorker) -> None:
    """As a client does that comes back after a cut."""
    node = start_node(SERVER__KEEPALIVE_SECONDS="60")
    with httpx.Client(base_url=node.base_url, timeout=10) as client:
        job = client.post("/v1/responses", json={**ROUTES["/v1/responses"], "background": True}).json()["id"]
        query = {"stream": "true", "starting_after": "1"}
        with client.stream("GET", f"/v1/responses/{job}", params=query) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": keep-alive"
            turn = worker.take()
            worker.say(turn, "x")
            worker.finish(turn)
            events = list(data(lines))
    assert [event["sequence_number"] for event in events] == list(range(2, len(events) + 2))
    assert events[-1]["type"] == "response.completed"


def test_the_stream_helper_goes_on_after_a_number(openai: OpenAI, worker: PlayingWorker) -> None:
    """It asks for all events, shows those after the number, and ends with the whole."""
    with worker.answering("Hel", "lo"):
        job = openai.responses.create(model=MODEL, input="Say", background=True).id
        with openai.responses.stream(response_id=job, starting_after=5) as stream:
            numbers = [event.sequence_number for event in stream]
            final = stream.get_final_response()
    assert numbers[0] == 6
    assert final.output_text == "Hello"


# --- refused by name, and resent or not


@pytest.mark.parametrize("route", ROUTES)
def test_odd_lanes_and_fairness_keys_are_refused_by_name(raw: httpx.Client, worker: PlayingWorker, route: str) -> None:
    """Null asks for nothing."""
    for field in ("lane", "fairness_key"):
        for value in ("", 0, False, [], {}, "a\nb", "\0"):
            refused = raw.post(route, json={**ROUTES[route], field: value})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, field, "invalid_value"), value
    assert worker.held == 0
    with worker.answering("x"):
        assert raw.post(route, json={**ROUTES[route], "lane": None, "fairness_key": None}).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_what_must_not_be_sent_again_says_so(openai: OpenAI, worker: PlayingWorker, route: str) -> None:
    """A client that resends sends a failed generation once; one that timed out in the queue is its to send again."""
    patient = openai.with_options(max_retries=2)
    for code, status, again in (("engine_error", 500, "false"), ("deadline_exceeded", 504, "false")):
        with ThreadPoolExecutor() as pool:
            pending = pool.submit(patient.post, route.removeprefix("/v1"), body=ROUTES[route], cast_to=object)
            worker.fail(worker.take(), code)
            with pytest.raises(sdk.APIStatusError) as failure:
                pending.result()
        answer = failure.value.response
        assert (answer.status_code, answer.headers["x-should-retry"]) == (status, again)
        assert worker.held == 0
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(openai.post, route.removeprefix("/v1"), body=ROUTES[route], cast_to=object)
        worker.fail(worker.take(), "queue_timeout")
        with pytest.raises(sdk.RateLimitError) as late:
            pending.result()
    assert late.value.response.headers["x-should-retry"] == "true"
    assert 1 <= int(late.value.response.headers["retry-after"]) <= 120

"""The official Python client: every OpenAI route, its stream helpers, resuming after a cut, its exception classes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

MODEL, SCRIPTED = os.environ["CLIENT_MODEL"], os.environ["CLIENT_SCRIPTED"]
HELLO = [{"role": "user", "content": "say hello world"}]
KEY = os.environ["CLIENT_KEY"]


def client_of(variable: str, **options: object) -> OpenAI:
    """A client that resends nothing, so that every error is seen."""
    return OpenAI(base_url=os.environ[variable], api_key=KEY, timeout=30, **{"max_retries": 0, **options})


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    """Of the first node."""
    with client_of("CLIENT_URL") as made:
        yield made


@pytest.fixture(scope="module")
def other() -> Iterator[OpenAI]:
    """Of the second node."""
    with client_of("CLIENT_OTHER_URL") as made:
        yield made


# --- models


def test_models(client: OpenAI) -> None:
    """Listed, and found by name."""
    names = {model.id for model in client.models.list()}
    assert {MODEL, SCRIPTED} <= names
    assert client.models.retrieve(MODEL).id == MODEL


# --- responses


def test_a_response(client: OpenAI) -> None:
    """Text, usage, and what was asked for."""
    response = client.responses.create(model=SCRIPTED, input="say hello", metadata={"run": "1"}, max_output_tokens=50)
    assert (response.status, response.output_text, response.metadata) == ("completed", "hello", {"run": "1"})
    usage = response.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens >= 0
    assert usage.output_tokens >= 5


def test_a_list_of_messages_with_instructions(client: OpenAI) -> None:
    """The last message is what the scripted model does."""
    items = [
        {"role": "user", "content": "say first"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": [{"type": "input_text", "text": "say second"}]},
    ]
    response = client.responses.create(model=SCRIPTED, instructions="Do as you are told.", input=items)
    assert response.output_text == "second"


def test_a_stream_of_events(client: OpenAI) -> None:
    """In order, numbered from 0, one terminal event, and deltas that make up the text."""
    with client.responses.create(model=SCRIPTED, input="say streamed text", stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "streamed text"
    assert events[-1].response.usage.output_tokens > 0


def test_the_stream_helper(client: OpenAI) -> None:
    """The client's own accumulation ends with the same response."""
    with client.responses.stream(model=SCRIPTED, input="say accumulated") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "accumulated"


def test_a_background_response_is_polled(client: OpenAI, other: OpenAI) -> None:
    """It answers at once; the other node tells how it goes."""
    response = client.responses.create(model=SCRIPTED, input="repeat 10 later ", background=True)
    assert response.status in ("queued", "in_progress")
    found = other.responses.retrieve(response.id)
    while found.status in ("queued", "in_progress"):
        found = other.responses.retrieve(response.id)
    assert (found.status, found.output_text) == ("completed", "later " * 10)


def test_a_cut_stream_is_resumed_at_the_other_node(client: OpenAI, other: OpenAI) -> None:
    """Numbers go on where they stopped; nothing is missing, nothing twice."""
    stream = client.responses.create(model=SCRIPTED, input="repeat 20 on and on ", background=True, stream=True)
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 30:
            break
    stream.close()
    job = events[0].response.id
    with other.responses.retrieve(job, stream=True, starting_after=events[-1].sequence_number) as rest:
        events += list(rest)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "on and on " * 20
    with other.responses.retrieve(job, stream=True) as again:
        replayed = list(again)
    texts = [event.delta for event in replayed if event.type == "response.output_text.delta"]
    assert "".join(texts) == "on and on " * 20
    assert replayed[-1].type == "response.completed"


def test_the_stream_helper_resumes(client: OpenAI, other: OpenAI) -> None:
    """`responses.stream(response_id=..., starting_after=...)` goes on with a running response."""
    job = client.responses.create(model=SCRIPTED, input="repeat 20 helped ", background=True).id
    with other.responses.stream(response_id=job) as stream:
        final = stream.get_final_response()
    assert final.output_text == "helped " * 20


def test_cancel(client: OpenAI, other: OpenAI) -> None:
    """Idempotent while cancelled; a completed one is refused."""
    job = client.responses.create(model=SCRIPTED, input="repeat 500 x", background=True).id
    assert other.responses.cancel(job).status == "cancelled"
    assert client.responses.cancel(job).status == "cancelled"
    done = client.responses.create(model=SCRIPTED, input="say done").id
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(done)


def test_delete(client: OpenAI, other: OpenAI) -> None:
    """A deleted response is unknown everywhere."""
    job = client.responses.create(model=SCRIPTED, input="say gone").id
    client.responses.delete(job)
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(job)


def test_input_items(client: OpenAI) -> None:
    """What a response was made from, page by page."""
    items = [{"role": "user", "content": "say one"}, {"role": "assistant", "content": "one"}]
    items.append({"role": "user", "content": "say two"})
    job = client.responses.create(model=SCRIPTED, input=items).id
    listed = list(client.responses.input_items.list(job, limit=2, order="asc"))
    assert [item.content[0].text for item in listed] == ["say one", "one", "say two"]
    assert len({item.id for item in listed}) == 3


def test_a_conversation_goes_on_from_its_last_response(client: OpenAI, other: OpenAI) -> None:
    """`previous_response_id` puts the whole conversation before the new input."""
    first = client.responses.create(model=SCRIPTED, input="say one")
    second = other.responses.create(model=SCRIPTED, input="say two", previous_response_id=first.id)
    third = client.responses.create(model=SCRIPTED, input="say three", previous_response_id=second.id)
    assert (second.output_text, third.output_text) == ("two", "three")
    assert third.previous_response_id == second.id
    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.APIStatusError) as unknown:
        client.responses.create(model=SCRIPTED, input="say x", previous_response_id=f"resp_{SCRIPTED}.0_{'0' * 32}")
    assert unknown.value.param == "previous_response_id"


# --- chat completions


def test_a_chat_completion(client: OpenAI) -> None:
    """Text, reason, usage."""
    answer = client.chat.completions.create(model=SCRIPTED, messages=HELLO)
    assert answer.object == "chat.completion"
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hello world", "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_choices_seed_and_limit(client: OpenAI) -> None:
    """A seed gives the same choices again, and another gives others."""

    def texts(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, n=3, seed=seed, temperature=1.0, max_completion_tokens=12
        )
        return [choice.message.content for choice in answer.choices]

    first = texts(7)
    assert len(set(first)) == 3
    assert texts(7) == first
    assert texts(8) != first


def test_a_chat_stream_with_usage(client: OpenAI) -> None:
    """Usage is in the last chunk, when it was asked for."""
    chunks = list(
        client.chat.completions.create(
            model=SCRIPTED, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello world"
    assert chunks[-1].usage.completion_tokens > 0
    plain = list(client.chat.completions.create(model=SCRIPTED, messages=HELLO, stream=True))
    assert all(chunk.usage is None for chunk in plain)


def test_the_chat_stream_helper(client: OpenAI) -> None:
    """The client's own accumulation ends with the same answer."""
    with client.chat.completions.stream(model=SCRIPTED, messages=HELLO) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == "hello world"


def test_stop_strings(client: OpenAI) -> None:
    """The text ends before the first of them, in a stream too."""
    options = {"model": SCRIPTED, "messages": HELLO, "stop": ["o w", "zzz"]}
    assert client.chat.completions.create(**options).choices[0].message.content == "hell"
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hell"


# --- completions


def test_a_completion(client: OpenAI) -> None:
    """A raw prompt is continued as it stands."""
    answer = client.completions.create(model=SCRIPTED, prompt="say raw\n", max_tokens=20)
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        "raw",
        "stop",
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_completion_of_token_ids(client: OpenAI) -> None:
    """Numbers instead of text, limited."""
    answer = client.completions.create(model=MODEL, prompt=[10, 20, 30], max_tokens=4, extra_body={"ignore_eos": True})
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    assert answer.choices[0].finish_reason == "length"


def test_a_completion_stream(client: OpenAI) -> None:
    """Pieces, then usage."""
    chunks = list(
        client.completions.create(
            model=SCRIPTED, prompt="say raw\n", max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "raw"
    assert chunks[-1].usage.completion_tokens > 0


# --- asynchronous


def test_many_at_once() -> None:
    """The asynchronous client, twenty requests and streams together."""

    async def go() -> list[str]:
        async with AsyncOpenAI(base_url=os.environ["CLIENT_URL"], api_key=KEY, max_retries=0, timeout=60) as client:

            async def streamed(number: int) -> str:
                events = await client.responses.create(model=SCRIPTED, input=f"say text {number}", stream=True)
                return "".join([event.delta async for event in events if event.type == "response.output_text.delta"])

            async def whole(number: int) -> str:
                return (await client.responses.create(model=SCRIPTED, input=f"say text {number}")).output_text

            return await asyncio.gather(*(streamed(i) if i % 2 else whole(i) for i in range(20)))

    assert asyncio.run(go()) == [f"text {number}" for number in range(20)]


# --- errors


def test_400(client: OpenAI) -> None:
    """Each names what is wrong."""
    for options, param in (
        ({"input": "x", "temperature": 9}, "temperature"),
        ({"input": ""}, "input"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "extra_body": {"lane": "first"}}, "lane"),
        ({"input": "x", "extra_body": {"no_such_option": 1}}, "no_such_option"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(model=MODEL, **options)
        assert error.value.param == param


def test_401() -> None:
    """A key that nobody was given."""
    with client_of("CLIENT_URL") as made, pytest.raises(openai.AuthenticationError) as error:
        made.with_options(api_key="gp-nobodys").responses.create(model=MODEL, input="x")
    assert error.value.code == "invalid_api_key"


def test_404(client: OpenAI) -> None:
    """Unknown models and ids."""
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(model="no-such-model", input="x")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(f"resp_{MODEL}.0_{'f' * 32}")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_409(client: OpenAI) -> None:
    """One Idempotency-Key, two requests."""
    headers = {"Idempotency-Key": "key-of-the-conflict"}
    first = client.responses.create(model=SCRIPTED, input="say a", extra_headers=headers)
    again = client.responses.create(model=SCRIPTED, input="say a", extra_headers=headers)
    assert again.id == first.id
    with pytest.raises(openai.ConflictError):
        client.responses.create(model=SCRIPTED, input="say b", extra_headers=headers)


def test_429_and_the_clients_own_resend(client: OpenAI) -> None:
    """A full queue is refused with the time to come again, which the client keeps."""
    jobs = []
    with pytest.raises(openai.RateLimitError) as full:
        for _ in range(int(os.environ["CLIENT_PENDING"]) + 1):
            jobs.append(client.responses.create(model=SCRIPTED, input="repeat 400 busy ", background=True).id)
    assert 1 <= int(full.value.response.headers["retry-after"]) <= 120
    for job in jobs:
        client.responses.cancel(job)
    with client_of("CLIENT_URL", max_retries=2) as patient:
        assert patient.responses.create(model=SCRIPTED, input="say room").output_text == "room"


def test_429_of_a_queue_timeout(client: OpenAI) -> None:
    """A request that no worker began in its time."""
    jobs = [
        client.responses.create(model=SCRIPTED, input="repeat 400 busy ", background=True).id
        for _ in range(int(os.environ["CLIENT_PENDING"]) - 2)
    ]
    with pytest.raises(openai.RateLimitError) as late:
        client.responses.create(model=SCRIPTED, input="say late", extra_body={"queue_timeout_seconds": 0.5})
    assert late.value.code == "queue_timeout"
    for job in jobs:
        client.responses.cancel(job)


def test_503() -> None:
    """A node without its state server."""
    with client_of("CLIENT_STRANDED_URL") as stranded, pytest.raises(openai.InternalServerError) as error:
        stranded.responses.create(model=MODEL, input="x")
    assert error.value.status_code == 503
    assert int(error.value.response.headers["retry-after"]) >= 1


def test_every_answer_names_its_request(client: OpenAI) -> None:
    """Also errors; the client shows it."""
    assert client.responses.create(model=SCRIPTED, input="say x")._request_id
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.retrieve(f"resp_{MODEL}.0_{'f' * 32}")
    assert error.value.request_id

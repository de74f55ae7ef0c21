"""/v1/chat/completions over a live server, through the official client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai as sdk
import pytest
from openai import OpenAI

from tests.waiting import wait_until
from tests.webapp.api_process import ApiProcess
from tests.webapp.playing_worker import MODEL, PlayingWorker

pytestmark = pytest.mark.usefixtures("worker")

HELLO = [{"role": "user", "content": "Say hello"}]


def test_sync_answer_has_choices_and_usage(openai: OpenAI, worker: PlayingWorker) -> None:
    """n choices come back in order; usage sums over them."""
    with worker.answering("Hel", "lo"):
        answer = openai.chat.completions.create(
            model=MODEL, messages=HELLO, n=3, max_completion_tokens=8, stop=["!"], seed=1
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"Hello"}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_length_limit_is_a_finish_reason(openai: OpenAI, worker: PlayingWorker) -> None:
    """The older max_tokens works too, and its limit shows as `length`."""
    with worker.answering("a", reason="length"):
        answer = openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert answer.choices[0].finish_reason == "length"


def test_stream_gives_roles_pieces_finishes_and_usage(openai: OpenAI, worker: PlayingWorker) -> None:
    """Every choice opens with its role and closes with its reason; usage comes last, when asked for."""
    with worker.answering("Hel", "", "lo"):
        chunks = list(
            openai.chat.completions.create(
                model=MODEL, messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
            )
        )
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert choices[0].delta.role == "assistant"
        assert [choice.delta.content for choice in choices[1:-1]] == ["Hel", "lo"]
        assert [choice.finish_reason for choice in choices] == [None, None, None, "stop"]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6


def test_each_chunk_carries_usage_when_asked(openai: OpenAI, worker: PlayingWorker) -> None:
    """`continuous_usage_stats`, which load generators send: the count so far with each chunk, the total in the last."""
    with worker.answering("Hel", "", "lo"):
        chunks = list(
            openai.chat.completions.create(
                model=MODEL, messages=HELLO, stream=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            )
        )  # fmt: skip
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == [0, 1, 3, 3, 3]
    prompts = {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage is not None}
    assert len(prompts) == 1 and prompts != {0}


def test_stream_ends_with_done_and_without_usage_unless_asked(raw: httpx.Client, worker: PlayingWorker) -> None:
    """The last line is `data: [DONE]`."""
    with worker.answering("x"):
        answer = raw.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "stream": True})
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert all("usage" not in json.loads(item) for item in data[:-1])


def test_stream_helper_of_the_client_accumulates(openai: OpenAI, worker: PlayingWorker) -> None:
    """The client's own accumulation gives the same answer."""
    with worker.answering("Hel", "lo"), openai.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == "Hello"


def test_failure_in_a_stream_is_said_in_band(raw: httpx.Client, worker: PlayingWorker) -> None:
    """A job that fails after its stream began: an error object, then `[DONE]`."""
    with raw.stream("POST", "/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "stream": True}) as answer:
        turn = worker.take()
        worker.say(turn, "shown")
        worker.fail(turn, "engine_error")
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert json.loads(data[-2])["error"]["code"] == "engine_error"
    assert data[-1] == "[DONE]"


def test_failure_and_cancel_are_errors_to_a_sync_caller(
    openai: OpenAI, worker: PlayingWorker, other_node: ApiProcess
) -> None:
    """A failed job maps to its status. A job cancelled by somebody else is a 409. Neither may be sent again."""
    with ThreadPoolExecutor() as pool, other_node.openai() as elsewhere:
        failing = pool.submit(openai.chat.completions.create, model=MODEL, messages=HELLO)
        worker.fail(worker.take(), "deadline_exceeded")
        with pytest.raises(sdk.InternalServerError) as failure:
            failing.result()
        assert failure.value.response.status_code == 504
        pending = pool.submit(openai.chat.completions.create, model=MODEL, messages=HELLO)
        turn = worker.take()
        elsewhere.responses.cancel(f"chatcmpl_{MODEL}.0_{turn.handout.lease.token}")
        with pytest.raises(sdk.ConflictError) as cancelled:
            pending.result()
    assert cancelled.value.code == "cancelled"
    assert cancelled.value.response.headers["x-should-retry"] == "false"


def test_leaving_a_stream_cancels_its_job(raw: httpx.Client, worker: PlayingWorker) -> None:
    """A chat client that goes away ends its job."""
    with raw.stream("POST", "/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "stream": True}) as answer:
        next(answer.iter_lines())
    wait_until(lambda: worker.held == 0, description="the job to be cancelled")


def test_chat_jobs_can_be_read_as_responses(openai: OpenAI, worker: PlayingWorker) -> None:
    """Any job is found under its id, each choice an output item."""
    with worker.answering("x"):
        answer = openai.chat.completions.create(model=MODEL, messages=HELLO, n=2)
    response = openai.responses.retrieve(answer.id)
    assert [item.type for item in response.output] == ["message", "message"]
    assert response.output_text == "xx"
    events = list(openai.responses.retrieve(answer.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"

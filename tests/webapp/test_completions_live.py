"""/v1/completions over a live server, through the official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import openai as sdk
import pytest
from openai import OpenAI

from tests.waiting import wait_until
from tests.webapp.api_process import ApiProcess
from tests.webapp.playing_worker import MODEL, PlayingWorker

pytestmark = pytest.mark.usefixtures("worker")


def test_sync_answer_has_choices_and_usage(openai: OpenAI, worker: PlayingWorker) -> None:
    """n choices come back in order; usage sums over them; the id is one of a completion."""
    with worker.answering("Hel", "lo"):
        answer = openai.completions.create(model=MODEL, prompt="Say", n=2, max_tokens=8, stop="!", seed=1)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl_")
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "Hello", "stop"),
        (1, "Hello", "stop"),
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4


@pytest.mark.parametrize(("prompt", "ids"), [([5, 6, 7], [5, 6, 7]), ([[5, 6]], [5, 6])])
def test_token_ids_go_to_the_worker_as_they_are(
    openai: OpenAI, worker: PlayingWorker, prompt: Any, ids: list[int]
) -> None:
    """As a list, or a list of one such list; counted in usage."""
    with openai.completions.create(
        model=MODEL, prompt=prompt, stream=True, extra_body={"stream_options": {"include_usage": True}}
    ) as stream:
        turn = worker.take()
        assert np.frombuffer(turn.handout.prompt, dtype="<i4").tolist() == ids
        worker.finish(turn)
        chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == len(ids)


def test_text_is_taken_as_it_stands(openai: OpenAI, worker: PlayingWorker) -> None:
    """No chat template is put around it: each character of this vocabulary is a token."""
    with worker.answering("x"):
        alone = openai.completions.create(model=MODEL, prompt="abc")
        listed = openai.completions.create(model=MODEL, prompt=["abc"])
        chat = openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "abc"}])
    assert alone.usage is not None and listed.usage is not None and chat.usage is not None
    assert alone.usage.prompt_tokens == listed.usage.prompt_tokens < chat.usage.prompt_tokens


def test_sixteen_tokens_unless_asked_otherwise(openai: OpenAI, worker: PlayingWorker) -> None:
    """The default of the public API."""
    with openai.completions.create(model=MODEL, prompt="abc", stream=True) as stream:
        turn = worker.take()
        assert json.loads(turn.handout.options)["max_tokens"] == 16
        worker.finish(turn)
        list(stream)


def test_stream_gives_pieces_and_finishes(openai: OpenAI, worker: PlayingWorker) -> None:
    """Each choice's pieces, then its reason; usage comes last, when asked for."""
    with worker.answering("Hel", "", "lo", reason="length"):
        chunks = list(
            openai.completions.create(
                model=MODEL, prompt="Say", n=2, stream=True, stream_options={"include_usage": True}
            )
        )
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [choice.text for choice in choices] == ["Hel", "lo", ""]
        assert [choice.finish_reason for choice in choices] == [None, None, "length"]
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6


def test_stream_ends_with_done(raw: httpx.Client, worker: PlayingWorker) -> None:
    """The last line is `data: [DONE]`, also after a failure, which is said in band."""
    body = {"model": MODEL, "prompt": "Say", "stream": True}
    with worker.answering("x"):
        answer = raw.post("/v1/completions", json=body)
    assert answer.text.rstrip().endswith("data: [DONE]")
    with raw.stream("POST", "/v1/completions", json=body) as failing:
        worker.fail(worker.take(), "engine_error")
        data = [line.removeprefix("data: ") for line in failing.iter_lines() if line.startswith("data: ")]
    assert json.loads(data[-2])["error"]["code"] == "engine_error"
    assert data[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_input_is_refused_by_name(
    openai: OpenAI, worker: PlayingWorker, fields: dict[str, Any], param: str
) -> None:
    """400 naming the field; nothing is queued."""
    with pytest.raises(sdk.BadRequestError) as refused:
        openai.post("/completions", body={"model": MODEL, "prompt": "x", **fields}, cast_to=object)
    assert refused.value.param == param
    assert worker.held == 0


def test_neutral_values_are_accepted(openai: OpenAI, worker: PlayingWorker) -> None:
    """What asks for nothing is no reason to refuse."""
    neutral = {"echo": False, "logprobs": None, "best_of": 1, "suffix": None, "logit_bias": {}, "presence_penalty": 0}
    with worker.answering("x"):
        answer = openai.completions.create(model=MODEL, prompt="x", extra_body=neutral)
    assert answer.choices[0].text == "x"


def test_a_resend_finds_the_same_completion(raw: httpx.Client, worker: PlayingWorker) -> None:
    """With its Idempotency-Key."""
    body = {"model": MODEL, "prompt": "Say"}
    with worker.answering("once"):
        first, second = (
            raw.post("/v1/completions", json=body, headers={"Idempotency-Key": "a-key"}).json() for _ in range(2)
        )
    assert first == second
    assert first["choices"][0]["text"] == "once"


def test_leaving_ends_the_job(node: ApiProcess, raw: httpx.Client, worker: PlayingWorker) -> None:
    """A client that goes away, from a stream or while it waits for the whole."""
    body = {"model": MODEL, "prompt": "Say"}
    with raw.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
        assert worker.held == 1
    wait_until(lambda: worker.held == 0, description="the streamed job to be cancelled")
    with httpx.Client(base_url=node.base_url, timeout=0.5) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post("/v1/completions", json=body)
    wait_until(lambda: worker.held == 0, description="the other job to be cancelled")


def test_a_full_node_refuses_one_more(start_node: Callable[..., ApiProcess], worker: PlayingWorker) -> None:
    """It waits in one of the node's places, like any other, and gives it back."""
    node = start_node(SERVER__THREADS="2")
    with node.openai() as client:
        with client.completions.create(model=MODEL, prompt="Wait", stream=True) as stream:
            with pytest.raises(sdk.InternalServerError) as busy:
                client.completions.create(model=MODEL, prompt="One more")
            assert busy.value.code == "too_many_waiting"
            assert worker.held == 1
            worker.finish(worker.take())
            list(stream)
        with worker.answering("x"):
            assert client.completions.create(model=MODEL, prompt="Now").choices[0].text == "x"

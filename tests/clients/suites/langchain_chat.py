"""LangChain's ChatOpenAI over chat completions and over responses: whole, streamed, in batches, asynchronous."""

from __future__ import annotations

import asyncio
import os

import pytest
from langchain_openai import ChatOpenAI, OpenAI


def model(*, responses: bool) -> ChatOpenAI:
    """A model of LangChain over one of the two routes."""
    return ChatOpenAI(
        model=os.environ["CLIENT_SCRIPTED"],
        base_url=os.environ["CLIENT_URL"],
        api_key=os.environ["CLIENT_KEY"],
        use_responses_api=responses,
        max_retries=0,
        stream_usage=True,
    )


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(request: pytest.FixtureRequest) -> ChatOpenAI:
    """Over each route."""
    return model(responses=request.param)


def test_invoke(chat: ChatOpenAI) -> None:
    """Text and usage."""
    answer = chat.invoke([("system", "Do as you are told."), ("human", "say hello")])
    assert answer.text == "hello"
    assert answer.usage_metadata["output_tokens"] > 0


def test_stream(chat: ChatOpenAI) -> None:
    """Pieces that make up the text, and usage."""
    pieces = list(chat.stream("say hello in pieces"))
    assert "".join(piece.text for piece in pieces) == "hello in pieces"
    assert len(pieces) > 3
    assert any(piece.usage_metadata for piece in pieces)


def test_batch(chat: ChatOpenAI) -> None:
    """Many at once, in order."""
    answers = chat.batch([f"say {number}" for number in range(8)])
    assert [answer.text for answer in answers] == [str(number) for number in range(8)]


def test_asynchronous() -> None:
    """The same without threads; in one loop, because LangChain's models share their connections."""

    async def go() -> list[str]:
        answers = await asyncio.gather(*(model(responses=each).ainvoke("say later") for each in (False, True)))
        return [answer.text for answer in answers]

    assert asyncio.run(go()) == ["later", "later"]


def test_completions() -> None:
    """The older completions route."""
    completions = OpenAI(
        model=os.environ["CLIENT_SCRIPTED"],
        base_url=os.environ["CLIENT_URL"],
        api_key=os.environ["CLIENT_KEY"],
        max_retries=0,
        max_tokens=20,
    )
    assert completions.invoke("say raw\n") == "raw"
    assert "".join(completions.stream("say raw\n")) == "raw"

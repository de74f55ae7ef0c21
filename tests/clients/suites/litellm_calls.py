"""LiteLLM: chat completions and responses, whole and streamed, and its exception classes."""

from __future__ import annotations

import os

import litellm
import pytest

TO = {"api_base": os.environ["CLIENT_URL"], "api_key": os.environ["CLIENT_KEY"], "num_retries": 0}
MODEL = f"openai/{os.environ['CLIENT_SCRIPTED']}"


def messages(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def test_completion() -> None:
    """Text and usage."""
    answer = litellm.completion(model=MODEL, messages=messages("say hello"), **TO)
    assert answer.choices[0].message.content == "hello"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completion_stream() -> None:
    """Pieces, and usage when asked for."""
    chunks = list(
        litellm.completion(
            model=MODEL, messages=messages("say hello"), stream=True, stream_options={"include_usage": True}, **TO
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert any(getattr(chunk, "usage", None) for chunk in chunks)


def test_responses() -> None:
    """The responses route."""
    response = litellm.responses(model=MODEL, input="say hello", **TO)
    assert response.output[0].content[0].text == "hello"


def test_responses_stream() -> None:
    """Its events."""
    events = list(litellm.responses(model=MODEL, input="say hello", stream=True, **TO))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "hello"
    assert events[-1].type == "response.completed"


def test_errors() -> None:
    """Mapped to its own classes."""
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model=MODEL, messages=messages("x"), temperature=9, **TO)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/no-such-model", messages=messages("x"), **TO)

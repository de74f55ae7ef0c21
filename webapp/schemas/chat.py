"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from pool.errors import InvalidRequest
from tasks.payloads import MAX_TOP_LOGPROBS, ChatPrompt, GenerationRequest, Message
from webapp.schemas.chunked import Chunked, with_stream_options
from webapp.schemas.dialect import (
    UNSUPPORTED,
    Neutral,
    Schema,
    Text,
    Tokens,
    empty,
    never,
    only,
    validated,
    without_unsupported,
)


class TextPart(Schema):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


def _kind(value: Any) -> str:
    return "(parts)" if isinstance(value, list) else "(text)"


Content = Annotated[
    Annotated[Text, Tag("(text)")] | Annotated[list[TextPart], Field(min_length=1), Tag("(parts)")],
    Discriminator(_kind),
]


class ChatMessage(Schema):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def message(self) -> Message:
        """The turn with its parts joined."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message(role=self.role, content=text)


class ChatRequest(Chunked):
    """The validated body."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def output_limit(self) -> int | None:
        """The newer name wins; they may not differ."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """As both fields say."""
        return self.top_logprobs if self.logprobs else None

    def generation(self) -> GenerationRequest:
        """The request as workers know it. Raises InvalidRequest for fields that contradict each other."""
        limit = self.output_limit
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
        if self.max_tokens is not None and limit != self.max_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; send one of them.", param="max_tokens")
        self.check_stream_options()
        self.check_min_tokens(limit)
        messages = tuple(message.message() for message in self.messages)
        if not any(message.content for message in messages):
            raise InvalidRequest("The messages hold no text.", param="messages")
        return GenerationRequest(
            model=self.model,
            prompt=ChatPrompt(messages=messages),
            sampling=self.sampling(),
            **self.turn(),
            max_tokens=limit,
            n=self.n,
        )


#: Options of this route that genpool lacks.
UNSUPPORTED_HERE: Mapping[str, Neutral] = {
    **UNSUPPORTED,
    "response_format": only({"type": "text"}),
    "functions": empty,
    "function_call": only("auto", "none"),
    "modalities": only(["text"]),
    "audio": never,
    "prediction": never,
    "reasoning_effort": never,
    "verbosity": only("medium"),
    "web_search_options": never,
    "background": only(False),
    "echo": only(False),
    "best_of": only(1),
}
_UNSUPPORTED_IN_MESSAGES: Mapping[str, Neutral] = {
    "name": never,
    "refusal": never,
    "audio": never,
    "annotations": empty,
    "tool_calls": empty,
    "function_call": never,
    "tool_call_id": never,
}
_KNOWN = frozenset(ChatRequest.model_fields)
_KNOWN_IN_MESSAGES = frozenset(ChatMessage.model_fields)


def chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """The body as a ChatRequest. Raises InvalidRequest."""
    kept = without_unsupported(body, _KNOWN, UNSUPPORTED_HERE)
    if isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [
            without_unsupported(message, _KNOWN_IN_MESSAGES, _UNSUPPORTED_IN_MESSAGES, f"messages[{index}].")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages)
        ]
    return validated(ChatRequest, with_stream_options(kept))

"""POST /v1/responses and the query of GET /v1/responses/{id}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from werkzeug.datastructures import MultiDict

from pool.errors import InvalidRequest
from tasks.payloads import MAX_TOP_LOGPROBS, ChatPrompt, GenerationRequest, Message
from webapp.bodies import shown
from webapp.schemas.dialect import (
    UNSUPPORTED,
    Generation,
    Identifier,
    Neutral,
    Schema,
    Text,
    Tokens,
    blank,
    empty,
    never,
    only,
    validated,
    without_unsupported,
)

#: What `include` may ask for.
LOGPROBS = "message.output_text.logprobs"


class InputPart(Schema):
    """A piece of a message; `output_text` is one of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: Text


def _kind(value: Any) -> str:
    return "(list)" if isinstance(value, list) else "(text)"


Content = Annotated[
    Annotated[Text, Tag("(text)")] | Annotated[list[InputPart], Field(min_length=1), Tag("(list)")],
    Discriminator(_kind),
]


class InputItem(Schema):
    """One turn. An output message of an earlier answer may be sent back as it is."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def message(self) -> Message:
        """The turn with its parts joined."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message(role=self.role, content=text)


Input = Annotated[
    Annotated[Text, Field(min_length=1), Tag("(text)")]
    | Annotated[list[InputItem], Field(min_length=1), Tag("(list)")],
    Discriminator(_kind),
]


class ResponsesRequest(Generation):
    """The validated body."""

    input: Input
    instructions: Text | None = None
    max_output_tokens: Tokens | None = None
    background: bool = False
    previous_response_id: Identifier | None = None
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list, max_length=1)
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def alternatives(self) -> int | None:
        """`include` asks for them, `top_logprobs` for more of them."""
        return self.top_logprobs if self.include else None

    def generation(self, earlier: Sequence[Message] = ()) -> GenerationRequest:
        """The request as workers know it; `earlier`: the conversation before its input.

        Raises InvalidRequest for fields that contradict each other.
        """
        self.check_min_tokens(self.max_output_tokens)
        if self.top_logprobs and not self.include:
            raise InvalidRequest(f"top_logprobs is only allowed when include holds {LOGPROBS}.", param="top_logprobs")
        turns = [Message(role="system", content=self.instructions)] if self.instructions else []
        turns.extend(earlier)
        if isinstance(self.input, str):
            turns.append(Message(role="user", content=self.input))
        else:
            turns.extend(item.message() for item in self.input)
        if not any(turn.content for turn in turns):
            raise InvalidRequest("The input holds no text.", param="input")
        return GenerationRequest(
            model=self.model,
            prompt=ChatPrompt(messages=tuple(turns)),
            sampling=self.sampling(),
            **self.turn(),
            max_tokens=self.max_output_tokens,
        )

    def params(self) -> dict[str, Any]:
        """What the job's record keeps for answers."""
        return {
            "instructions": self.instructions,
            "metadata": self.metadata,
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_output_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "top_logprobs": self.top_logprobs,
            "previous_response_id": self.previous_response_id,
        }


def _plain_text(value: Any) -> bool:
    """`text` at its default: plain text of medium length."""
    if not isinstance(value, dict) or set(value) - {"format", "verbosity"}:
        return False
    return value.get("format") in (None, {"type": "text"}) and value.get("verbosity") in (None, "medium")


#: Options of this route that genpool lacks.
UNSUPPORTED_HERE: Mapping[str, Neutral] = {
    **UNSUPPORTED,
    "text": _plain_text,
    "conversation": never,
    "reasoning": empty,
    "prompt": never,
    "truncation": only("disabled"),
    "max_tool_calls": never,
    "stream_options": only({}, {"include_obfuscation": False}),
    "background_options": empty,
    "context_management": empty,
    "access_programs": empty,
    "image": empty,
}
_KNOWN = frozenset(ResponsesRequest.model_fields)


def _anything(value: Any) -> bool:  # noqa: ARG001 - one signature for all
    """A field of an answer that carries nothing for the next prompt."""
    return True


_IGNORED_IN_ITEMS: Mapping[str, Neutral] = {"id": _anything, "status": _anything, "phase": _anything}
_IGNORED_IN_PARTS: Mapping[str, Neutral] = {"annotations": empty, "logprobs": _anything}
_KNOWN_IN_ITEMS = frozenset(InputItem.model_fields)
_KNOWN_IN_PARTS = frozenset(InputPart.model_fields)


def responses_request(body: Mapping[str, Any]) -> ResponsesRequest:
    """The body as a ResponsesRequest. Raises InvalidRequest."""
    kept = without_unsupported(body, _KNOWN, UNSUPPORTED_HERE)
    for item in included if isinstance(included := kept.get("include"), list) else ():
        if isinstance(item, str) and item != LOGPROBS:
            message = f"include: {shown(item)} is not supported; {LOGPROBS} is."
            raise InvalidRequest(message, param="include", code="unsupported_parameter")
    if isinstance(items := kept.get("input"), list):
        kept["input"] = [_item(item, f"input[{index}].") for index, item in enumerate(items)]
    return validated(ResponsesRequest, kept)


def _item(item: Any, where: str) -> Any:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        return _typed_only(item)
    kept = without_unsupported(item, _KNOWN_IN_ITEMS, _IGNORED_IN_ITEMS, where)
    if isinstance(parts := kept.get("content"), list):
        kept["content"] = [_part(part, f"{where}content[{index}].") for index, part in enumerate(parts)]
    return kept


def _part(part: Any, where: str) -> Any:
    if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text"):
        return _typed_only(part)
    return without_unsupported(part, _KNOWN_IN_PARTS, _IGNORED_IN_PARTS, where)


def _typed_only(value: Any) -> Any:
    """Of a thing whose type is not supported only the type is kept: that is what the refusal should name."""
    return {"type": value["type"]} if isinstance(value, dict) and "type" in value else value


MAX_SEQUENCE_NUMBER = 2**31 - 1


class ReplayQuery(Schema):
    """The query of GET /v1/responses/{id}."""

    stream: bool = False
    starting_after: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SEQUENCE_NUMBER,
        description="The last number seen. Of a response that has ended: at most its last event's, else 400.",
    )
    include_obfuscation: Literal[False] = False


#: Options of queries that genpool lacks: there is nothing to include, and a page goes on from its last item.
_UNSUPPORTED_IN_QUERIES: Mapping[str, Neutral] = {"include": blank, "include[]": blank, "before": blank}
_UNSUPPORTED_IN_REPLAYS: Mapping[str, Neutral] = {
    **{name: _UNSUPPORTED_IN_QUERIES[name] for name in ("include", "include[]")},
    "include_obfuscation": only("false"),
}
_KNOWN_IN_REPLAYS = frozenset({"stream", "starting_after"})


def once(query: MultiDict[str, str]) -> Mapping[str, str]:
    """The query's parameters. Raises InvalidRequest for one that is given twice: readers of it may take either."""
    for name, values in query.lists():
        if len(values) > 1:
            raise InvalidRequest(f"{shown(name)} is given more than once.", param=shown(name))
    return query.to_dict()


def replay_query(args: MultiDict[str, str]) -> int | None:
    """The query of GET /v1/responses/{id}: None for a poll, else the sequence number after which to replay (-1: all).

    Raises InvalidRequest.
    """
    query = without_unsupported(once(args), _KNOWN_IN_REPLAYS, _UNSUPPORTED_IN_REPLAYS)
    stream = query.get("stream", "false")
    if stream not in ("true", "false"):
        raise InvalidRequest("stream must be true or false.", param="stream")
    after = query.get("starting_after")
    if after is None:
        return -1 if stream == "true" else None
    if stream == "false":
        raise InvalidRequest("starting_after is only allowed when stream is true.", param="starting_after")
    if not (after.isascii() and after.isdigit() and len(after) <= 10 and int(after) <= MAX_SEQUENCE_NUMBER):
        raise InvalidRequest(
            f"starting_after must be a whole number from 0 to {MAX_SEQUENCE_NUMBER}.", param="starting_after"
        )
    return int(after)


MAX_ITEMS = 100


class ItemsQuery(Schema):
    """The query of GET /v1/responses/{id}/input_items."""

    limit: int = Field(default=20, ge=1, le=MAX_ITEMS)
    order: Literal["asc", "desc"] = "desc"
    after: Identifier | None = None


_KNOWN_IN_ITEMS_QUERY = frozenset(ItemsQuery.model_fields)


def items_query(args: MultiDict[str, str]) -> ItemsQuery:
    """The query as an ItemsQuery. Raises InvalidRequest."""
    given: dict[str, Any] = without_unsupported(once(args), _KNOWN_IN_ITEMS_QUERY, _UNSUPPORTED_IN_QUERIES)
    if (limit := given.get("limit", "")).isascii() and limit.isdigit() and len(limit) <= len(str(MAX_ITEMS)):
        given["limit"] = int(limit)
    return validated(ItemsQuery, given)

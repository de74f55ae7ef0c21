"""The versioned request that travels from any door (HTTP, Celery, command line) to a worker.

Each door translates its own dialect into `GenerationRequest`; the worker knows only this. Validation is strict: wrong
types are refused, never coerced, and every error names the field and its limit. JSON only.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from pool.errors import InvalidRequest

MAX_MODEL_CHARS = 64
MAX_TOKENS_LIMIT = 2**20
MAX_CHOICES = 16
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 256
MAX_SEED = 2**63 - 1


def encodable(text: str) -> str:
    """Refuse lone surrogates: they are no text and cannot be written as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("contains a lone surrogate, which is not valid Unicode text") from None
    return text


class Strict(BaseModel):
    """Frozen, no coercion, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Sampling(Strict):
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 is off; `seed` is fixed at submit when absent."""

    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=2**31 - 1)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...] = Field(
        default=(), max_length=MAX_STOP_STRINGS
    )
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS_LIMIT)

    @field_validator("stop")
    @classmethod
    def _stop_is_text(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(encodable(item) for item in value) if value else value


class Message(Strict):
    """One turn of a conversation, text only."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str

    @field_validator("content")
    @classmethod
    def _content_is_text(cls, value: str) -> str:
        return encodable(value)


class ChatPrompt(Strict):
    """A conversation, rendered by the model's own chat template with the assistant's turn opened."""

    type: Literal["chat"] = "chat"
    messages: tuple[Message, ...] = Field(min_length=1)


class TextPrompt(Strict):
    """Plain text, tokenized as it stands."""

    type: Literal["text"] = "text"
    text: str = Field(min_length=1)

    @field_validator("text")
    @classmethod
    def _text_is_text(cls, value: str) -> str:
        return encodable(value)


class TokenPrompt(Strict):
    """Token ids, taken as they are once checked against the vocabulary."""

    type: Literal["tokens"] = "tokens"
    token_ids: tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...] = Field(min_length=1)


Prompt = Annotated[ChatPrompt | TextPrompt | TokenPrompt, Field(discriminator="type")]


#: Reads a prompt that was stored as JSON.
PROMPT: TypeAdapter[ChatPrompt | TextPrompt | TokenPrompt] = TypeAdapter(Prompt)


class GenerationOptions(Strict):
    """How to generate, without the prompt: what a worker reads of a job whose prompt is tokenized already.
    `max_tokens` None: as many as the context leaves."""

    version: Literal[1] = 1
    sampling: Sampling = Sampling()
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)


class GenerationRequest(GenerationOptions):
    """What is to be generated."""

    model: str = Field(min_length=1, max_length=MAX_MODEL_CHARS)
    prompt: Prompt
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)

    def options(self) -> GenerationOptions:
        """The part without the prompt."""
        return GenerationOptions(sampling=self.sampling, max_tokens=self.max_tokens)


def invalid_request(error: ValidationError) -> InvalidRequest:
    """The first validation error as one sentence naming the field and its limit; input values are never repeated."""
    detail = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ""
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return InvalidRequest(f"{path}: {detail['msg']}.", param=path or None)

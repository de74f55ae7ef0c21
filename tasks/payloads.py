"""The versioned request that travels from any door (HTTP, Celery, command line) to a worker.

Each door translates its own dialect into `GenerationRequest`; the worker knows only this. Validation is strict: wrong
types are refused, never coerced, and every error names the field and its limit. JSON only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from pool.errors import InvalidRequest
from pool.rules.fairness import NORMAL, Lane

MAX_MODEL_CHARS = 64
MAX_TOKENS_LIMIT = 2**20
MAX_CHOICES = 16
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 256
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_STOP_TOKEN_IDS = 64
MAX_BIASED_TOKENS = 1024
MAX_TOP_LOGPROBS = 20
#: Bounds of the OpenAI reference.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_FAIRNESS_KEY_CHARS = 256
#: 1 is neutral. Outside these a division takes real logits out of float32's range.
REPETITION_PENALTIES = (0.01, 100.0)


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


def _by_id(value: Any) -> Any:
    """JSON objects have text for keys: whole numbers as JSON writes them are token ids, whatever else stays wrong."""
    if not isinstance(value, dict):
        return value
    return {int(key) if _is_id(key) else key: item for key, item in value.items()}


def _is_id(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key


TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
#: What is added to the logits of single tokens.
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    Field(max_length=MAX_BIASED_TOKENS, json_schema_extra={"propertyNames": {"pattern": r"^(0|[1-9]\d{0,9})$"}}),
    BeforeValidator(_by_id),
]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
RepetitionPenalty = Annotated[float, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])]


class Sampling(Strict):
    """How tokens are drawn, in the order of `workers.sampling`, and what is told of it.

    `temperature` 0 is greedy; `top_k` and `min_p` 0 are off; `seed` is fixed at submit when absent. `stop_token_ids`
    end a choice like its end-of-sequence tokens. `logprobs`: keep each output token's log-probability, and those of the
    `top_logprobs` likeliest in its place.
    """

    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...] = Field(
        default=(), max_length=MAX_STOP_STRINGS
    )
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS_LIMIT)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)

    @field_validator("stop")
    @classmethod
    def _stop_is_text(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(encodable(item) for item in value) if value else value

    @field_validator("top_logprobs")
    @classmethod
    def _top_of_logprobs(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("logprobs") is False:
            raise ValueError("only allowed when logprobs is true")
        return value


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
    token_ids: tuple[TokenId, ...] = Field(min_length=1)


Prompt = Annotated[ChatPrompt | TextPrompt | TokenPrompt, Field(discriminator="type")]


#: Reads a prompt that was stored as JSON.
PROMPT: TypeAdapter[ChatPrompt | TextPrompt | TokenPrompt] = TypeAdapter(Prompt)


class GenerationOptions(Strict):
    """How to generate, without the prompt: what a worker reads of a job whose prompt is tokenized already.
    `max_tokens` None: as many as the context leaves."""

    version: Literal[1] = 1
    sampling: Sampling = Sampling()
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)

    def stored(self) -> str:
        """As JSON for a record, without what is at its default: workers that do not know an option yet can run every
        job that does not use it."""
        fields = self.model_dump_json(exclude_defaults=True).removeprefix("{")
        return f'{{"version":{self.version}{"" if fields == "}" else ","}{fields}'


class GenerationRequest(GenerationOptions):
    """What is to be generated, and how it waits for its turn: in which lane, and charged to whom (`fairness_key`, ""
    for its tenant)."""

    model: str = Field(min_length=1, max_length=MAX_MODEL_CHARS)
    prompt: Prompt
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    lane: Lane = NORMAL
    fairness_key: str = Field(default="", max_length=MAX_FAIRNESS_KEY_CHARS)

    @field_validator("fairness_key")
    @classmethod
    def _key_is_text(cls, value: str) -> str:
        return encodable(value)

    def options(self) -> GenerationOptions:
        """The part without the prompt."""
        return GenerationOptions(sampling=self.sampling, max_tokens=self.max_tokens)


def invalid_request(error: ValidationError) -> InvalidRequest:
    """The first validation error as one sentence naming the field and its limit; input values are never repeated."""
    detail = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ""
    for part in detail["loc"]:
        if part == "[key]":
            break
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return InvalidRequest(f"{path}: {detail['msg'].removeprefix('Value error, ')}.", param=path or None)

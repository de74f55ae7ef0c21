"""What both dialects share: strict field types, the sampling fields, options that are only accepted when they ask for
nothing, and one way to say what is wrong.

A body goes through three steps: names that are no option at all are refused, options that genpool lacks are refused
unless at a neutral value, and the rest is validated by a pydantic model. `null` always means "as if absent".
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from pool.errors import InvalidRequest
from pool.rules.fairness import NORMAL, TIERS, Lane
from tasks.payloads import (
    MAX_MODEL_CHARS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS_LIMIT,
    LogitBias,
    Penalty,
    RepetitionPenalty,
    Sampling,
    TokenId,
    encodable,
)
from webapp.bodies import shown

#: An option genpool lacks: whether a value (never None) asks for nothing.
Neutral = Callable[[Any], bool]

ModelT = TypeVar("ModelT", bound=BaseModel)


class Schema(BaseModel):
    """No coercion, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


def _without_controls(text: str) -> str:
    """Letters of any script may need what is not printable by itself: a no-break space, a zero-width joiner."""
    if any(unicodedata.category(letter) == "Cc" for letter in text):
        raise ValueError("must not contain control characters")
    return text


def _listed(value: Any) -> Any:
    """One stop string is a list of one."""
    return [value] if isinstance(value, str) else value


LANE_OF_TIER = {tier: lane for lane, tier in TIERS.items()}

_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}

Text = Annotated[str, AfterValidator(encodable)]
#: A caller's own word, kept and shown as it came; "" is one, as in the public API: it says nothing, and breaks nothing.
Label = Annotated[str, Field(max_length=256), AfterValidator(encodable), AfterValidator(_without_controls)]
#: A word that stands for something here.
Identifier = Annotated[Label, Field(min_length=1)]
ModelName = Annotated[
    str, Field(min_length=1, max_length=MAX_MODEL_CHARS), AfterValidator(encodable), AfterValidator(_without_controls)
]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)]
Seconds = Annotated[float, Field(gt=0, le=604_800)]
Stop = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), AfterValidator(encodable)]],
    Field(max_length=MAX_STOP_STRINGS),
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS}]}),
]
Metadata = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=64), AfterValidator(encodable)],
        Annotated[str, Field(max_length=512), AfterValidator(encodable)],
    ],
    Field(max_length=16),
]


class Generation(Schema):
    """Fields of both dialects."""

    model: ModelName
    stream: bool = False
    store: bool = True
    metadata: Metadata = Field(default_factory=dict)
    user: Label | None = None
    safety_identifier: Label | None = None
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: Stop = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS_LIMIT)
    parallel_tool_calls: bool = True
    queue_timeout_seconds: Seconds | None = None
    run_timeout_seconds: Seconds | None = None
    deadline_seconds: Seconds | None = None
    lane: Lane | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    fairness_key: Identifier | None = None

    def turn(self) -> dict[str, Any]:
        """How it waits for its turn, by the names of GenerationRequest. Public clients name a lane by `service_tier`.

        Raises InvalidRequest where both are given and differ.
        """
        asked = None if self.service_tier in (None, "auto") else LANE_OF_TIER[self.service_tier]
        if self.lane is not None and asked is not None and asked != self.lane:
            raise InvalidRequest(
                f"service_tier {self.service_tier} is lane {asked}, but lane is {self.lane}.", param="service_tier"
            )
        return {"lane": self.lane or asked or NORMAL, "fairness_key": self.fairness_key or ""}

    def timeouts(self) -> dict[str, int]:
        """The job's time limits that the request names, in ms, by the record's field names."""
        named = {
            "queue_timeout_ms": self.queue_timeout_seconds,
            "run_timeout_ms": self.run_timeout_seconds,
            "deadline_ms": self.deadline_seconds,
        }
        return {name: max(1, round(seconds * 1000)) for name, seconds in named.items() if seconds is not None}

    @property
    def alternatives(self) -> int | None:
        """Of how many of the likeliest tokens the log-probabilities are told with each drawn one's; None: of none, nor
        its own. A route says which of its fields ask for that."""
        return None

    def sampling(self) -> Sampling:
        """The sampling part of the request."""
        alternatives = self.alternatives
        return Sampling(
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            top_k=self.top_k,
            min_p=float(self.min_p),
            repetition_penalty=float(self.repetition_penalty),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            logit_bias=self.logit_bias,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            logprobs=alternatives is not None,
            top_logprobs=alternatives or 0,
        )

    def check_min_tokens(self, max_tokens: int | None) -> None:
        """Raises InvalidRequest when more tokens are demanded than allowed."""
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, but at most {max_tokens} tokens may be generated.",
                param="min_tokens",
            )


# --- options that genpool lacks


def only(*values: Any) -> Neutral:
    """Neutral at exactly these values; `false` is not 0."""
    return lambda value: any(type(value) is type(neutral) and value == neutral for neutral in values)


def empty(value: Any) -> bool:
    """Neutral when empty, or an object of nothing but nulls."""
    return value == [] or (isinstance(value, dict) and all(item is None for item in value.values()))


def blank(value: Any) -> bool:
    """Neutral when it is no word at all, as in a query."""
    return bool(value == "")


def zero(value: Any) -> bool:
    """Neutral at the number 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def never(value: Any) -> bool:  # noqa: ARG001 - one signature for all
    """Only null asks for nothing."""
    return False


#: Unsupported in both dialects.
UNSUPPORTED: Mapping[str, Neutral] = {
    "tools": empty,
    "tool_choice": only("auto", "none"),
    "moderation": never,
    "prompt_cache_key": never,
    "prompt_cache_options": empty,
    "prompt_cache_retention": never,
    "program_id": never,
}


def without_unsupported(
    body: Mapping[str, Any], known: frozenset[str], unsupported: Mapping[str, Neutral], where: str = ""
) -> dict[str, Any]:
    """`body` without nulls and without options at their neutral value.

    Raises InvalidRequest naming the first unknown (`unknown_parameter`) or unsupported (`unsupported_parameter`) field;
    `where` is the path in front of its name.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        param = f"{where}{shown(name)}"
        if name in unsupported:
            if value is not None and not unsupported[name](value):
                raise InvalidRequest(f"{param} is not supported.", param=param, code="unsupported_parameter")
        elif name not in known:
            raise InvalidRequest(f"Unknown parameter: {param}.", param=param, code="unknown_parameter")
        elif value is not None:
            kept[name] = value
    return kept


# --- validation


def validated(model: type[ModelT], body: Mapping[str, Any]) -> ModelT:
    """`body` as `model`. Raises InvalidRequest naming the first field at fault and its limit."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _refusal(detail["type"], detail["loc"], detail["msg"]) from None


_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


def _refusal(kind: str, location: tuple[int | str, ...], message: str) -> InvalidRequest:
    param = path_of(location)
    if kind == "missing":
        text = f"Missing required parameter: {param}."
    elif kind == "extra_forbidden":
        text = f"Unknown parameter: {param}."
    else:
        text = f"Invalid value for {param}: {_lower(message.removeprefix('Value error, '))}."
    if kind == "literal_error" and location[-1] == "type":
        return InvalidRequest(text, param=param, code="unsupported_parameter")
    return InvalidRequest(text, param=param, code=_CODES.get(kind, "invalid_value"))


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:].removesuffix(".")


def path_of(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "(parts)", 1, "type") -> messages[0][1].type; marks in parentheses only steer unions."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (part.startswith("(") and part.endswith(")")) and part != "[key]":
            path += f".{shown(part)}" if path else shown(part)
    return path

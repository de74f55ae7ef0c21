"""What answers look like, for `/openapi.json`. They are rendered elsewhere, for speed; tests hold both together."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.model_rows import ModelRow


class Answer(BaseModel):
    """Fields are complete: an answer has no others."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Any answer that is not 2xx. `id`, `status` and `queue_position`, where given, are those of a generation that was
    accepted."""

    error: ErrorDetail
    id: str | None = None
    status: str | None = None
    queue_position: int | None = Field(default=None, ge=0)


class LikelyToken(Answer):
    """One of the likeliest in its place. `bytes`: the token's own, also where they are no whole character."""

    token: str
    logprob: float = Field(ge=-9999, le=0)
    bytes: list[int]


class TokenLogprob(LikelyToken):
    """One that was drawn and shown."""

    top_logprobs: list[LikelyToken]


class OutputText(Answer):
    """Text of an answer. `logprobs`: empty unless asked for."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class InputText(Answer):
    """Text of an input."""

    type: Literal["input_text"]
    text: str


class OutputMessage(Answer):
    """One choice."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokens(Answer):
    """Of the prompt: those whose work was reused."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokens(Answer):
    """Of the output: none are hidden."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens, as the engine counted them."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseError(Answer):
    """Why it failed."""

    code: str
    message: str


class Reason(Answer):
    """Why it ended early."""

    reason: Literal["max_output_tokens"]


class Response(Answer):
    """A generation. `queue_position`: how many wait before a queued one."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: Reason | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default", "flex", "priority"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["auto"]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    queue_position: int = Field(default=0, ge=0)


class ModelStanding(Answer):
    """A model's state; with status 202 it is not yet what is wanted. `changed`: whether this request changed what is
    wanted; `change` rises with each such."""

    id: str
    object: Literal["model"]
    state: Literal["loading", "loaded", "unloading", "unloaded", "failed"]
    wanted: Literal["loaded", "unloaded"]
    change: int
    changed: bool
    accepting_new_requests: bool
    loaded_replicas: int
    last_error: str | None


class Reloaded(Answer):
    """What reading the models again has changed. `changed_fields`: of those that were updated; `needs_restart`: other
    settings of the file, which count from the next start."""

    object: Literal["settings.reload"]
    version: int
    added: list[str]
    removed: list[str]
    updated: list[str]
    unchanged: list[str]
    changed_fields: dict[str, list[str]]
    needs_restart: list[str]


class Deleted(Answer):
    """The response is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputMessage(Answer):
    """One turn of a stored input."""

    id: str
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    status: Literal["completed"]
    content: list[InputText | OutputText]


class InputItems(Answer):
    """A page of a stored input."""

    object: Literal["list"]
    data: list[InputMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class PromptDetails(Answer):
    """Of the prompt."""

    cached_tokens: int
    audio_tokens: int


class CompletionDetails(Answer):
    """Of the output."""

    reasoning_tokens: int
    audio_tokens: int


class Usage(Answer):
    """Tokens, as the engine counted them; completion tokens are summed over the choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChatAnswer(Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None
    annotations: list[Any]


class ContentLogprobs(Answer):
    """Of the tokens whose text is shown."""

    content: list[TokenLogprob]
    refusal: None


class ChatChoice(Answer):
    """One of `n`. `logprobs`: null unless asked for."""

    index: int
    message: ChatAnswer
    logprobs: ContentLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(Answer):
    """An answer of `n` choices."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Literal["default", "flex", "priority"]
    system_fingerprint: None


class TextLogprobs(Answer):
    """Of the tokens whose text is shown, one entry each in every list. `text_offset`: characters before it."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One of `n`. `logprobs`: null unless asked for."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Answer):
    """A prompt continued in `n` ways."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: None


class Model(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(Answer):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class ProgramOfModel(Answer):
    """A Program of one model. `generation`: how often one of this id has begun before; `ending`: it ends with the
    requests that run."""

    model: str
    generation: int
    state: Literal["active", "paused"]
    status: Literal["reasoning", "acting"]
    ending: bool
    step: int
    context_tokens: int
    completed_requests: int


class Program(Answer):
    """The caller's Programs of one id, by model."""

    id: str
    object: Literal["program"]
    models: list[ProgramOfModel]


class ProgramEnd(Answer):
    """`ending`: requests of it still run; it is finished with the last of them."""

    model: str
    status: Literal["finished", "ending"]


class FinishedProgram(Answer):
    """What became of the caller's Programs of one id, by model."""

    id: str
    object: Literal["program"]
    models: list[ProgramEnd]


class ModelDiagnostics(Answer):
    """A model. `programs_total`: all there are; `programs`: those that are shown."""

    model: str
    settings: dict[str, Any]
    programs_total: int
    retained_requests: int
    ranks: list[dict[str, Any]]
    programs: list[dict[str, Any]]


class Diagnostics(Answer):
    """Programs of all models; none where they are off."""

    enabled: bool
    models: list[ModelDiagnostics]


class CatalogueStanding(Answer):
    """The version of the models that this process goes by, and why it has not taken over a later one."""

    version: int
    error: Literal["catalogue_invalid", "catalogue_differs"] | None


class ModelRows(Answer):
    """All models of the catalogue, disabled ones included."""

    object: Literal["list"]
    data: list[ModelRow]


class Health(Answer):
    """Alive, or ready; then with each model's state."""

    status: Literal["ok", "ready"]
    models: dict[str, str] | None = None
    catalogue: CatalogueStanding | None = None


class WaitingKey(Answer):
    """One fairness key in one lane. `key`: its hash; `in_flight`: choices of it, in all lanes; `weight`: of its next
    generation; `virtual_seconds`: slot time it was given, for weight 1, less is served first; `expected_seconds`: what
    a choice of it is taken to need."""

    key: str
    waiting: int
    oldest_wait_seconds: float
    in_flight: int
    weight: int | None
    virtual_seconds: float
    expected_seconds: float


class WaitingLane(Answer):
    """`owed_seconds`: slot time it is owed by higher lanes."""

    lane: Literal["interactive", "normal", "batch"]
    waiting: int
    oldest_wait_seconds: float
    owed_seconds: float
    keys: list[WaitingKey]


class ModelQueue(Answer):
    """`hidden_keys`: those beyond a thousand."""

    model: str
    lanes: list[WaitingLane]
    hidden_keys: int


class ModelQueues(Answer):
    """What waits, by model, lane and key."""

    object: Literal["list"]
    data: list[ModelQueue]


class Job(Answer):
    """How a generation stands."""

    id: str
    object: Literal["job"]
    model: str
    status: str
    lane: Literal["interactive", "normal", "batch"]
    key: str
    n: int
    background: bool
    attempt: int
    rank: str | None
    created_ms: int
    started_ms: int | None
    finished_ms: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    error_code: str | None
    queue_position: int | None

"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from pool.errors import InvalidRequest
from tasks.payloads import GenerationRequest, TextPrompt, TokenId, TokenPrompt
from webapp.schemas.chunked import Chunked, with_stream_options
from webapp.schemas.dialect import (
    UNSUPPORTED,
    Neutral,
    Text,
    Tokens,
    empty,
    only,
    validated,
    without_unsupported,
    zero,
)

#: The public API's own default.
DEFAULT_MAX_TOKENS = 16

#: The public API's own bound here.
MAX_LOGPROBS = 5


def _kind(value: Any) -> str:
    return "(tokens)" if isinstance(value, list) else "(text)"


Prompt = Annotated[
    Annotated[Text, Field(min_length=1), Tag("(text)")]
    | Annotated[list[TokenId], Field(min_length=1), Tag("(tokens)")],
    Discriminator(_kind),
]


class CompletionRequest(Chunked):
    """The validated body. A prompt is text or token ids, and one of them: each request is one job."""

    prompt: Prompt
    max_tokens: Tokens = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def output_limit(self) -> int | None:
        """Its own name for it."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """One number says both."""
        return self.logprobs

    def generation(self) -> GenerationRequest:
        """The request as workers know it. Raises InvalidRequest for fields that contradict each other."""
        self.check_stream_options()
        self.check_min_tokens(self.max_tokens)
        prompt = self.prompt
        return GenerationRequest(
            model=self.model,
            prompt=TextPrompt(text=prompt) if isinstance(prompt, str) else TokenPrompt(token_ids=tuple(prompt)),
            sampling=self.sampling(),
            **self.turn(),
            max_tokens=self.max_tokens,
            n=self.n,
        )


#: Options of this route that genpool lacks.
UNSUPPORTED_HERE: Mapping[str, Neutral] = {
    **UNSUPPORTED,
    "top_logprobs": zero,
    "echo": only(False),
    "best_of": only(1),
    "suffix": only(""),
    "background": only(False),
    "response_format": only({"type": "text"}),
    "prompt_embeds": empty,
}
_KNOWN = frozenset(CompletionRequest.model_fields)


def completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """The body as a CompletionRequest. Raises InvalidRequest."""
    kept = with_stream_options(without_unsupported(body, _KNOWN, UNSUPPORTED_HERE))
    prompt = kept.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt):
        if len(prompt) > 1:
            raise InvalidRequest(
                f"prompt holds {len(prompt)} prompts; the limit is one a request.",
                param="prompt",
                code="unsupported_parameter",
            )
        kept["prompt"] = prompt[0]
    return validated(CompletionRequest, kept)

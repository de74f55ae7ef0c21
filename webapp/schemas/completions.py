"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from pool.errors import InvalidRequest
from tasks.payloads import GenerationRequest, TextPrompt, TokenPrompt
from webapp.schemas.chunked import Chunked, with_stream_options
from webapp.schemas.dialect import (
    UNSUPPORTED,
    Neutral,
    Text,
    Tokens,
    empty,
    never,
    only,
    validated,
    without_unsupported,
)

#: The public API's own default.
DEFAULT_MAX_TOKENS = 16

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


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

    def generation(self) -> GenerationRequest:
        """The request as workers know it. Raises InvalidRequest for fields that contradict each other."""
        self.check_stream_options()
        self.check_min_tokens(self.max_tokens)
        prompt = self.prompt
        return GenerationRequest(
            model=self.model,
            prompt=TextPrompt(text=prompt) if isinstance(prompt, str) else TokenPrompt(token_ids=tuple(prompt)),
            sampling=self.sampling(),
            max_tokens=self.max_tokens,
            n=self.n,
        )

    def params(self) -> dict[str, Any]:
        """What the job's record keeps for answers."""
        return {
            "metadata": self.metadata,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_output_tokens": self.max_tokens,
        }


#: Options of this route that genpool lacks.
UNSUPPORTED_HERE: Mapping[str, Neutral] = {
    **UNSUPPORTED,
    "logprobs": never,
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

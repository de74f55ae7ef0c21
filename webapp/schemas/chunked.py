"""What the two routes share whose answers are choices, and whose streams are chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from pool.errors import InvalidRequest
from tasks.payloads import MAX_CHOICES
from webapp.rendering.chunks import Usage
from webapp.schemas.dialect import Generation, Neutral, Schema, only, without_unsupported


class StreamOptions(Schema):
    """How to stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Chunked(Generation):
    """Fields of both."""

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None

    @property
    def usage(self) -> Usage:
        """Which chunks of a stream carry usage."""
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats:
            return Usage.EACH
        return Usage.LAST if options.include_usage else Usage.NONE

    @property
    @abstractmethod
    def output_limit(self) -> int | None:
        """Output tokens a choice may have; None: as many as the context leaves."""

    def params(self) -> dict[str, Any]:
        """What the job's record keeps for answers."""
        return {
            "metadata": self.metadata,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_output_tokens": self.output_limit,
            "top_logprobs": self.alternatives or 0,
        }

    def check_stream_options(self) -> None:
        """Raises InvalidRequest when there is no stream that they could be for."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true.", param="stream_options")


_UNSUPPORTED: Mapping[str, Neutral] = {"include_obfuscation": only(False)}
_KNOWN = frozenset(StreamOptions.model_fields)


def with_stream_options(body: dict[str, Any]) -> dict[str, Any]:
    """`body` with the neutral values of its `stream_options` left out. Raises InvalidRequest."""
    options = body.get("stream_options")
    if not isinstance(options, dict):
        return body
    return body | {"stream_options": without_unsupported(options, _KNOWN, _UNSUPPORTED, "stream_options.")}

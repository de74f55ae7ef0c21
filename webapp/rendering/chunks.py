"""What answers made of choices share: usage, failure, and the stream of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

from pool.errors import GenerationFailed, GenpoolError
from pool.store.jobs import View
from pool.store.records import JobRecord
from webapp.errors import error_body, status_of
from webapp.rendering import sse
from webapp.rendering.logprobs import LogprobReader, Shown


class Usage(Enum):
    """Which chunks of a stream carry usage: none, one more at the end, or each its count so far (and one more)."""

    NONE = auto()
    LAST = auto()
    EACH = auto()


def usage_of(record: JobRecord, shown_tokens: int = 0) -> dict[str, Any]:
    """Whole-job totals: completion tokens are summed over the choices. `shown_tokens`: those of a job that has not
    ended."""
    prompt_tokens = record.prompt_tokens or 0
    output_tokens = shown_tokens if record.output_tokens is None else record.output_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_tokens or 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def failure_of(record: JobRecord) -> GenerationFailed | None:
    """Why an ended job has no outputs, None when it has."""
    if record.outputs:
        return None
    if record.error_code is not None:
        return GenerationFailed(record.error_message or "The generation failed.", code=record.error_code)
    return GenerationFailed("The generation was cancelled.", code="cancelled")


class ChunkStream:
    """Turns views into chunks: what opens each choice, its pieces, its finish; then usage if asked; then `[DONE]`.
    A dialect says what the chunks are called and what their choices hold."""

    kind: str

    def __init__(self, record: JobRecord, *, usage: Usage, logprobs: LogprobReader) -> None:
        self.ended = False
        self._logprobs = logprobs
        self._record = record
        self._usage = usage
        self._opened = False
        self._tokens = 0
        self._forms = [self._form(index) for index in range(record.n)]

    def opening(self) -> dict[str, Any] | None:
        """What a choice holds before its first piece; None: it has no chunk for that."""
        return None

    def piece(self, text: str) -> dict[str, Any]:
        """What a choice holds for a piece of its text ("" at its finish)."""
        raise NotImplementedError

    def told(self, shown: Shown) -> dict[str, Any]:
        """What a choice holds of the log-probabilities of a piece."""
        raise NotImplementedError

    def extras(self) -> dict[str, Any]:
        """Further fields of each chunk."""
        return {}

    def feed(self, view: View) -> Iterator[str]:
        """The chunks that follow from a view."""
        opening = self.opening()
        if not self._opened and opening is not None:
            for index in range(self._record.n):
                yield self._chunk(index, opening)
        self._opened = True
        for entry in view.entries:
            self._tokens += len(entry.token_ids)
            shown = self._logprobs.take(entry)
            if entry.text and shown is None and self._usage is not Usage.EACH:
                yield self._forms[entry.choice].filled(entry.text)
            elif entry.text:
                told = None if shown is None else self.told(shown)
                yield self._chunk(entry.choice, self.piece(entry.text), logprobs=told)
        if view.record.terminal:
            yield from self._ending(view.record)

    def failure(self, error: GenpoolError) -> Iterator[str]:
        """In band: the stream cannot go on."""
        self.ended = True
        yield sse.message({"error": error_body(error, status_of(error))})
        yield sse.DONE

    def cut(self) -> Iterator[str]:
        """The node stops. Such a stream cannot be continued, but its job goes on and can be polled."""
        message = f"This node is shutting down; the answer can be read at /v1/responses/{self._record.id}."
        return self.failure(GenpoolError(message, code="node_stopping"))

    def _form(self, index: int) -> sse.Form:
        """Of the chunks of most streams: a piece of text and nothing else."""
        return sse.Form(self._chunk(index, self.piece(sse.HOLE)))

    def _chunk(
        self,
        index: int,
        held: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, **held, "logprobs": logprobs, "finish_reason": finish_reason}
        each = self._usage is Usage.EACH
        return self._message([choice], usage_of(self._record, self._tokens) if each else None)

    def _message(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> str:
        chunk: dict[str, Any] = {
            "id": self._record.id,
            "object": self.kind,
            "created": self._record.created_ms // 1000,
            "model": self._record.model,
            **self.extras(),
            "system_fingerprint": None,
            "choices": choices,
        }
        if self._usage is not Usage.NONE:
            chunk["usage"] = usage
        return sse.message(chunk)

    def _ending(self, record: JobRecord) -> Iterator[str]:
        failure = failure_of(record)
        if failure is not None:
            yield from self.failure(failure)
            return
        self.ended = True
        for index, output in enumerate(record.outputs):
            yield self._chunk(index, self.piece(""), output.finish_reason)
        if self._usage is not Usage.NONE:
            yield self._message([], usage_of(record))
        yield sse.DONE

"""Jobs as Response objects, and a job's log as the Responses event stream.

`sequence_number` is a pure function of the record's fixed fields and the log, so any node continues any stream:

    0                      response.created
    1                      response.queued            (background only)
    then                   response.in_progress
    for each choice        response.output_item.added, response.content_part.added
    for each log entry     response.output_text.delta (entries without text have none)
    for each choice        response.output_text.done, response.content_part.done, response.output_item.done
    last                   response.completed | response.incomplete | response.failed

Jobs of other doors are shown the same way; each choice is one output item.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from pool.errors import GenpoolError
from pool.rules import jobs
from pool.rules.fairness import TIERS
from pool.store.jobs import View
from pool.store.log import LogEntry
from pool.store.records import JobRecord, Output
from webapp.rendering import sse
from webapp.rendering.logprobs import LogprobReader

#: A choice's log-probabilities, one object a token.
Listed = list[dict[str, Any]]

_STATUS = {jobs.RUNNING: "in_progress"}
_TERMINAL_EVENT = {
    jobs.COMPLETED: "response.completed",
    jobs.INCOMPLETE: "response.incomplete",
    jobs.CANCELLED: "response.incomplete",
    jobs.FAILED: "response.failed",
}


def response_object(record: JobRecord, texts: Sequence[str], logprobs: Sequence[Listed]) -> dict[str, Any]:
    """The Response a poll answers. `texts`: what each choice has shown so far; a finished record knows better.
    `logprobs`: of the tokens that were shown, by choice."""
    if record.outputs:
        items = [
            _item(record, choice, output.text, _status_of(output), logprobs[choice])
            for choice, output in enumerate(record.outputs)
        ]
    else:
        status = "incomplete" if record.terminal else "in_progress"
        items = [_item(record, choice, text, status, logprobs[choice]) for choice, text in enumerate(texts) if text]
    return _response(record, _STATUS.get(record.state, record.state)) | {
        "completed_at": (record.finished_ms or 0) // 1000 if record.state == jobs.COMPLETED else None,
        "error": _error(record),
        "incomplete_details": {"reason": "max_output_tokens"} if record.state == jobs.INCOMPLETE else None,
        "output": items,
        "usage": _usage(record),
    }


def _response(record: JobRecord, status: str) -> dict[str, Any]:
    """A Response as far as it is fixed at submit; no output yet."""
    params = record.params
    return {
        "id": record.id,
        "object": "response",
        "created_at": record.created_ms // 1000,
        "status": status,
        "completed_at": None,
        "background": record.background,
        "error": None,
        "incomplete_details": None,
        "instructions": params.get("instructions"),
        "max_output_tokens": params.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": params.get("metadata", {}),
        "model": record.model,
        "output": [],
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "previous_response_id": params.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": params.get("safety_identifier"),
        "service_tier": TIERS[record.lane],
        "store": record.store,
        "temperature": params.get("temperature", 1.0),
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": params.get("top_logprobs", 0),
        "top_p": params.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
        "user": params.get("user"),
    }


def _error(record: JobRecord) -> dict[str, str] | None:
    if record.error_code is None:
        return None
    return {"code": record.error_code, "message": record.error_message or "The generation failed."}


def _usage(record: JobRecord) -> dict[str, Any] | None:
    """Of an ended job; one that was cancelled, or failed, has used what it was given and what its log holds, if it was
    ever begun."""
    output_tokens = record.output_tokens
    if output_tokens is None and record.terminal and record.started_ms is not None:
        output_tokens = record.logged_tokens
    if output_tokens is None:
        return None
    prompt_tokens = record.prompt_tokens or 0
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": record.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + output_tokens,
    }


def _status_of(output: Output) -> str:
    return "completed" if output.finish_reason == "stop" else "incomplete"


def _part(text: str, logprobs: Listed) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _item_id(record: JobRecord, choice: int) -> str:
    return f"msg_{record.ref.token}" + (f"_{choice}" if choice else "")


def _item(record: JobRecord, choice: int, text: str | None, status: str, logprobs: Listed) -> dict[str, Any]:
    return {
        "id": _item_id(record, choice),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if text is None else [_part(text, logprobs)],
    }


class ResponsesStream:
    """Turns views into events, from after sequence number `after` on (-1: all). Views must be fed without gaps."""

    def __init__(self, record: JobRecord, after: int = -1, *, logprobs: LogprobReader) -> None:
        self.ended = False
        self._reader = logprobs
        self._record = record
        self._after = after
        self._next = 0
        self._stage = 0
        self._texts: list[list[str]] = [[] for _ in range(record.n)]
        self._logprobs: list[Listed] = [[] for _ in range(record.n)]
        self._forms = [self._form(choice) for choice in range(record.n)]

    def last_number(self, view: View) -> int:
        """Read all of a job that has ended, `view`, and return the sequence number of its last event."""
        deque(self.feed(view), maxlen=0)
        return self._next - 1

    def feed(self, view: View) -> Iterator[str]:
        """The events that follow from a view. Preamble events come when they are true: created at once, in_progress
        with the first attempt, the items with the first text."""
        record = view.record
        if self._stage == 0:
            self._stage = 1
            yield from self._opening()
        # All entries are read, those without text too: their tokens come with later ones' text.
        told = [(entry, self._reader.take(entry)) for entry in view.entries]
        texts = [(entry, shown.listed() if shown else []) for entry, shown in told if entry.text]
        if self._stage == 1 and (texts or record.terminal or record.started_ms is not None):
            self._stage = 2
            yield from self._emit("response.in_progress", response=_response(self._record, "in_progress"))
        if self._stage == 2 and (texts or record.terminal):
            self._stage = 3
            yield from self._items()
        for entry, logprobs in texts:
            yield from self._delta(entry, logprobs)
        if record.terminal:
            self.ended = True
            yield from self._ending(record)

    def failure(self, error: GenpoolError) -> Iterator[str]:
        """In band: the stream cannot go on. It is no event of the job's: it repeats the number of the last one, after
        which a client may continue."""
        self.ended = True
        number = max(self._next - 1, self._after)
        data = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        yield sse.event("error", data | {"sequence_number": number})

    def cut(self) -> Iterator[str]:
        """The node stops: nothing is said; the client sees a broken connection and continues on another node."""
        return iter(())

    def _emit(self, kind: str, **fields: Any) -> Iterator[str]:
        number = self._next
        self._next += 1
        if number > self._after:
            yield sse.event(kind, {"type": kind, "sequence_number": number, **fields})

    def _opening(self) -> Iterator[str]:
        first = "queued" if self._record.background else "in_progress"
        yield from self._emit("response.created", response=_response(self._record, first))
        if self._record.background:
            yield from self._emit("response.queued", response=_response(self._record, "queued"))

    def _items(self) -> Iterator[str]:
        for choice in range(self._record.n):
            item = _item(self._record, choice, None, "in_progress", [])
            yield from self._emit("response.output_item.added", output_index=choice, item=item)
            yield from self._emit("response.content_part.added", **self._place(choice), part=_part("", []))

    def _place(self, choice: int) -> dict[str, Any]:
        return {"item_id": _item_id(self._record, choice), "output_index": choice, "content_index": 0}

    def _delta(self, entry: LogEntry, logprobs: Listed) -> Iterator[str]:
        self._texts[entry.choice].append(entry.text)
        self._logprobs[entry.choice] += logprobs
        if logprobs:
            place = self._place(entry.choice)
            yield from self._emit("response.output_text.delta", **place, delta=entry.text, logprobs=logprobs)
            return
        number = self._next
        self._next += 1
        if number > self._after:
            yield self._forms[entry.choice].filled(number, entry.text)

    def _form(self, choice: int) -> sse.Form:
        """Of the deltas of most streams: without log-probabilities."""
        kind = "response.output_text.delta"
        fields = {**self._place(choice), "delta": sse.HOLE, "logprobs": []}
        return sse.Form(sse.event(kind, {"type": kind, "sequence_number": sse.HOLE, **fields}))

    def _ending(self, record: JobRecord) -> Iterator[str]:
        texts = ["".join(pieces) for pieces in self._texts]
        final = response_object(record, texts, self._logprobs)
        for choice, (shown, logprobs) in enumerate(zip(texts, self._logprobs, strict=True)):
            output = record.outputs[choice] if record.outputs else None
            text = output.text if output else shown
            status = _status_of(output) if output else "incomplete"
            yield from self._emit("response.output_text.done", **self._place(choice), text=text, logprobs=logprobs)
            yield from self._emit("response.content_part.done", **self._place(choice), part=_part(text, logprobs))
            item = _item(record, choice, text, status, logprobs)
            yield from self._emit("response.output_item.done", output_index=choice, item=item)
        yield from self._emit(_TERMINAL_EVENT[record.state], response=final)

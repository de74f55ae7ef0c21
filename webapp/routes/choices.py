"""How the two routes whose answers are choices answer: whole, or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flask import Response, jsonify, request

from pool.store.records import JobRecord
from webapp.errors import answer_for
from webapp.node import Node
from webapp.rendering.chunks import ChunkStream, failure_of
from webapp.rendering.logprobs import LogprobReader, Shown, shown_of
from webapp.streams import stream_of
from webapp.submitting import Order, submit_and_wait
from webapp.sync import generate


class StreamOf(Protocol):
    """Makes the stream of a job."""

    def __call__(self, record: JobRecord, *, logprobs: LogprobReader) -> ChunkStream: ...


def whole(node: Node, order: Order, render: Callable[[JobRecord, Sequence[Shown | None]], dict[str, Any]]) -> Response:
    """Wait for the end; a failed job is an error."""
    record, entries = generate(node, order, request.environ.get("gunicorn.socket"))
    failure = failure_of(record)
    if failure is not None:
        return answer_for(failure, job=record.id, keyed=order.key is not None).response()
    return jsonify(render(record, shown_of(entries, record.n, node.vocabulary_of(record.model))))


def streamed(node: Node, order: Order, renderer: StreamOf) -> Response:
    """Answer at once, chunk by chunk."""
    with node.places.handed_on():
        waiter, view = submit_and_wait(node, order, follows=True)
        record = view.record
        stream = renderer(record, logprobs=LogprobReader(record.n, node.vocabulary_of(record.model)))
        return stream_of(node, waiter, view, stream, cancels=order.cancels)

"""/v1/responses: create, read, replay, cancel, delete, and what a response was made from."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify, request

from pool.errors import InvalidRequest
from pool.rules import jobs
from pool.store.jobs import View
from pool.store.lane_positions import ahead
from pool.store.log import texts_of
from pool.store.stored_jobs import erase
from webapp.auth import own_view
from webapp.bodies import json_object
from webapp.conversations import conversation, input_items
from webapp.errors import answer_for
from webapp.node import Node, current_node
from webapp.rendering.chunks import failure_of
from webapp.rendering.logprobs import LogprobReader, listed, shown_of
from webapp.rendering.responses import ResponsesStream, response_object
from webapp.schemas.programs import program_claim
from webapp.schemas.responses import items_query, replay_query, responses_request
from webapp.streams import stream_of
from webapp.submitting import Order, idempotency_key, submit_and_wait, submit_unwatched
from webapp.sync import generate

blueprint = Blueprint("responses", __name__)


@blueprint.post("/v1/responses")
def create() -> Response:
    """Generate: wait for the end, stream, or answer at once (`background`)."""
    node = current_node()
    body = json_object(request, node.settings.limits.body_bytes)
    claim, fields = program_claim(request, body, node.settings.programs)
    asked = responses_request(fields)
    earlier = conversation(node, asked.previous_response_id) if asked.previous_response_id else []
    order = Order(
        door="responses",
        request=asked.generation(earlier),
        params=asked.params(),
        background=asked.background,
        store=asked.store,
        timeouts=asked.timeouts(),
        key=idempotency_key(request, body),
        claim=claim,
        names={"max_tokens": "max_output_tokens", "prompt": "input", "messages": "input", "logprobs": "include"},
    )
    if asked.stream:
        return _stream(node, order)
    if asked.background:
        return _shown(submit_unwatched(node, order))
    return _sync(node, order)


@blueprint.get("/v1/responses/<job>")
def read(job: str) -> Response:
    """The response as it is now, or its events from the beginning (or after `starting_after`), live to the end. Of a
    response that has ended, `starting_after` is at most the number of its last event; at that nothing follows."""
    node = current_node()
    after = replay_query(request.args)
    view = own_view(node, job)
    if after is not None and view.record.terminal and after > (last := _events(node, view).last_number(view)):
        raise InvalidRequest(
            f"starting_after is {after}, but this response has ended: its last event has the number {last}.",
            param="starting_after",
        )
    if after is None or request.method == "HEAD":
        return _shown(view)
    with node.places.handed_on():
        ref = view.record.ref
        waiter = node.waits.open(ref, view.cursor) if view.record.terminal else node.waits.follow(ref, view.cursor)
        return stream_of(node, waiter, view, _events(node, view, after), cancels=False)


@blueprint.post("/v1/responses/<job>/cancel")
def cancel(job: str) -> Response:
    """End the job. Repeating it changes nothing; a job that ended in another way is refused."""
    node = current_node()
    ref = own_view(node, job).record.ref
    node.store.cancel(ref)
    return _shown(node.store.view(ref))


@blueprint.delete("/v1/responses/<job>")
def delete(job: str) -> Response:
    """Forget the response, its events and its input; one that has not ended is cancelled first."""
    node = current_node()
    erase(node.services.client, node.store, own_view(node, job).record.ref)
    return jsonify({"id": job, "object": "response", "deleted": True})


@blueprint.get("/v1/responses/<job>/input_items")
def items(job: str) -> Response:
    """What the response was made from, page by page."""
    query, node = items_query(request.args), current_node()
    return jsonify(input_items(node, own_view(node, job).record, query))


def _shown(view: View) -> Response:
    record, node = view.record, current_node()
    shown = shown_of(view.entries, record.n, node.vocabulary_of(record.model))
    answer = response_object(record, texts_of(view.entries, record.n), listed(shown))
    if record.state == jobs.QUEUED:
        answer["queue_position"] = ahead(node.services.client, record.ref)
    return jsonify(answer)


def _sync(node: Node, order: Order) -> Response:
    record, entries = generate(node, order, request.environ.get("gunicorn.socket"))
    failure = failure_of(record)
    if failure is not None and failure.code != "cancelled":
        return answer_for(failure, job=record.id, keyed=order.key is not None).response()
    return _shown(View(record, entries, len(entries)))


def _stream(node: Node, order: Order) -> Response:
    with node.places.handed_on():
        waiter, view = submit_and_wait(node, order, follows=True)
        return stream_of(node, waiter, view, _events(node, view), cancels=order.cancels)


def _events(node: Node, view: View, after: int = -1) -> ResponsesStream:
    record = view.record
    return ResponsesStream(record, after, logprobs=LogprobReader(record.n, node.vocabulary_of(record.model)))

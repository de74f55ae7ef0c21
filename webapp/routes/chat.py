"""/v1/chat/completions."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify, request

from webapp.bodies import json_object
from webapp.errors import answer_for
from webapp.node import Node, current_node
from webapp.rendering.chat import ChatStream, chat_completion, failure_of
from webapp.schemas.chat import chat_request
from webapp.streams import stream_of
from webapp.submitting import Order, idempotency_key, submit_and_wait
from webapp.sync import wait_for_end

blueprint = Blueprint("chat", __name__)


@blueprint.post("/v1/chat/completions")
def create() -> Response:
    """Generate: wait for the end, or stream."""
    node = current_node()
    body = json_object(request, node.settings.limits.body_bytes)
    asked = chat_request(body)
    order = Order(
        door="chat",
        request=asked.generation(),
        params=asked.params(),
        store=asked.store,
        timeouts=asked.timeouts(),
        key=idempotency_key(request, body),
        names={"prompt": "messages"},
    )
    if not asked.stream:
        return _sync(node, order)
    with node.places.handed_on():
        waiter, view = submit_and_wait(node, order, follows=True)
        renderer = ChatStream(view.record, include_usage=asked.include_usage)
        return stream_of(node, waiter, view, renderer, cancels=order.cancels)


def _sync(node: Node, order: Order) -> Response:
    with node.places.held():
        waiter, view = submit_and_wait(node, order, follows=False)
        try:
            record, _ = wait_for_end(node, waiter, view, request.environ.get("gunicorn.socket"), cancels=order.cancels)
        finally:
            waiter.close()
    failure = failure_of(record)
    if failure is not None:
        return answer_for(failure, job=record.id, keyed=order.key is not None).response()
    return jsonify(chat_completion(record))

"""/v1/chat/completions."""

from __future__ import annotations

from functools import partial

from flask import Blueprint, Response, request

from webapp.bodies import json_object
from webapp.node import current_node
from webapp.rendering.chat import ChatStream, chat_completion
from webapp.routes.choices import streamed, whole
from webapp.schemas.chat import chat_request
from webapp.schemas.programs import program_claim
from webapp.submitting import Order, idempotency_key

blueprint = Blueprint("chat", __name__)


@blueprint.post("/v1/chat/completions")
def create() -> Response:
    """Generate: wait for the end, or stream."""
    node = current_node()
    body = json_object(request, node.settings.limits.body_bytes)
    claim, fields = program_claim(request, body, node.settings.programs)
    asked = chat_request(fields)
    order = Order(
        door="chat",
        request=asked.generation(),
        params=asked.params(),
        store=asked.store,
        timeouts=asked.timeouts(),
        key=idempotency_key(request, body),
        claim=claim,
        names={"prompt": "messages"},
    )
    if asked.stream:
        return streamed(node, order, partial(ChatStream, usage=asked.usage))
    return whole(node, order, chat_completion)

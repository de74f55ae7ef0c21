"""/v1/completions."""

from __future__ import annotations

from functools import partial

from flask import Blueprint, Response, request

from webapp.bodies import json_object
from webapp.node import current_node
from webapp.rendering.completions import CompletionStream, completion
from webapp.routes.choices import streamed, whole
from webapp.schemas.completions import completion_request
from webapp.schemas.programs import program_claim
from webapp.submitting import Order, idempotency_key

blueprint = Blueprint("completions", __name__)


@blueprint.post("/v1/completions")
def create() -> Response:
    """Continue a prompt as it stands, without a chat template: wait for the end, or stream."""
    node = current_node()
    body = json_object(request, node.settings.limits.body_bytes)
    claim, fields = program_claim(request, body, node.settings.programs)
    asked = completion_request(fields)
    order = Order(
        door="completion",
        request=asked.generation(),
        params=asked.params(),
        store=asked.store,
        timeouts=asked.timeouts(),
        key=idempotency_key(request, body),
        claim=claim,
    )
    if asked.stream:
        return streamed(node, order, partial(CompletionStream, usage=asked.usage))
    return whole(node, order, completion)

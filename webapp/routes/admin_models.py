"""Loading and unloading models, for admins."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus

from flask import Blueprint, Response, jsonify, request

from tasks.lifecycle import ModelAdmin, Standing
from webapp.bodies import json_object
from webapp.node import current_node
from webapp.schemas.admin import load_request, unload_request

blueprint = Blueprint("admin_models", __name__)


@blueprint.post("/v1/admin/models/<name>/load")
def load(name: str) -> Response:
    """Load a model: each worker of it does; while it is being unloaded, as soon as that is over. Of a loaded one
    nothing changes."""
    asked = load_request(_body())
    admin = ModelAdmin(current_node().services)
    return _answer(admin, admin.load(name), wait=asked.wait)


@blueprint.post("/v1/admin/models/<name>/unload")
def unload(name: str) -> Response:
    """Unload a model: from now on requests are refused, those that wait fail as `model_unloading`, those that run may
    end, then its workers free it. Repeated, the earlier end of the drain counts."""
    asked = unload_request(_body())
    admin = ModelAdmin(current_node().services)
    return _answer(admin, admin.unload(name, asked.drain_timeout_s), wait=asked.wait)


@blueprint.post("/v1/admin/settings/reload")
def reload() -> Response:
    """Read the models of the configuration file again, here and in every API and worker process. The answer names what
    has changed; a model that is loaded keeps what it was loaded with until it is loaded again."""
    load_request(_body())
    return jsonify({"object": "settings.reload", **asdict(current_node().services.catalogue.reload())})


def _body() -> dict[str, object]:
    has_body = bool(request.content_length) or "Transfer-Encoding" in request.headers
    return json_object(request, current_node().settings.limits.body_bytes) if has_body else {}


def _answer(admin: ModelAdmin, standing: Standing, *, wait: bool) -> Response:
    """200 when it is done, 202 while it goes on."""
    node, shown = current_node(), standing.shown()
    if wait:
        with node.places.held():
            after = admin.settle(standing, node.settings.server.sync_wait_seconds, node.stopping)
        shown = after.shown() | {"changed": standing.is_changed}
    answer = jsonify(shown)
    is_done = shown["state"] == shown["wanted"]
    answer.status_code = HTTPStatus.OK if is_done else HTTPStatus.ACCEPTED
    return answer

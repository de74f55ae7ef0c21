"""/v1/models."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify

from pool.errors import UnknownModel
from webapp.node import current_node

blueprint = Blueprint("models", __name__)


@blueprint.get("/v1/models")
def catalogue() -> Response:
    """The enabled models."""
    models = current_node().services.submitter.models()
    return jsonify({"object": "list", "data": [_model(name) for name in models]})


@blueprint.get("/v1/models/<name>")
def one(name: str) -> Response:
    """One model."""
    if name not in current_node().services.submitter.models():
        raise UnknownModel("No model of this name is served here.", param="model")
    return jsonify(_model(name))


def _model(name: str) -> dict[str, Any]:
    """`created` is 0: weights carry no date."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "genpool"}

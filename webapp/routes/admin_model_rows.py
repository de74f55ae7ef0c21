"""GET /v1/admin/models: how models and their replicas stand. For admin keys (webapp/auth.py)."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify, request

from tasks.model_rows import model_rows
from webapp.node import current_node
from webapp.schemas.admin import model_rows_query

blueprint = Blueprint("admin_model_rows", __name__)


@blueprint.get("/v1/admin/models")
def rows() -> Response:
    """How each model of the catalogue stands. The counts of its replicas are added up; `ranks=1` lists those, too."""
    node, query = current_node(), model_rows_query(request.args)
    found = model_rows(node.services.client, node.services.catalogue.models)
    return jsonify({"object": "list", "data": [row.data(ranks=query.ranks) for row in found]})

"""Probes: is this process alive, and can it serve?"""

from __future__ import annotations

from flask import Blueprint, Response, jsonify

from pool.errors import StateUnavailable
from pool.store.ranks import RankRegistry
from webapp.errors import NotReady
from webapp.node import Node, current_node

blueprint = Blueprint("health", __name__)


@blueprint.get("/healthz")
@blueprint.get("/health")
def healthz() -> Response:
    """Alive; looks at nothing else."""
    return jsonify({"status": "ok"})


@blueprint.get("/readyz")
def readyz() -> Response:
    """Ready when the state server takes writes and loses none, and every enabled model has a worker. The answer names
    what is missing."""
    missing = _missing(current_node())
    if missing:
        raise NotReady(missing)
    return jsonify({"status": "ready"})


def _missing(node: Node) -> list[str]:
    if node.stopping():
        return ["this process is shutting down"]
    try:
        node.store.ping(list(node.services.submitter.models()))
        policy = node.store.memory_policy()
        live = {
            name: bool(RankRegistry(node.services.client, name).live()) for name in node.services.submitter.models()
        }
    except StateUnavailable as error:
        return [f"state server ({error.message.rstrip('.')})"]
    missing = [f"a worker for model {name}" for name, served in live.items() if not served]
    if policy != "noeviction":
        missing.append(f"maxmemory-policy noeviction (the state server has {policy}, which can lose jobs)")
    return missing

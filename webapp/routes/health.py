"""Probes: is this process alive, and can it serve?"""

from __future__ import annotations

from flask import Blueprint, Response, jsonify

from pool.errors import StateUnavailable
from pool.rules.model_states import LOADED
from pool.store.lifecycle import Lifecycle
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
    """Ready when the state server takes writes and loses none, and every enabled model that is wanted is loaded by a
    worker. The answer names each model's state, and what is missing."""
    node = current_node()
    models: dict[str, str] = {}
    missing = _missing(node, models)
    catalogue = node.services.catalogue
    standing = {"models": models, "catalogue": {"version": catalogue.version, "error": catalogue.error or None}}
    if missing:
        raise NotReady(missing, standing)
    return jsonify({"status": "ready", **standing})


def _missing(node: Node, models: dict[str, str]) -> list[str]:
    """What is missing; fills in the models' states."""
    if node.stopping():
        return ["this process is shutting down"]
    try:
        node.store.ping(list(node.services.submitter.models()))
        policy = node.store.memory_policy()
        looks = {name: Lifecycle(node.services.client, name).look() for name in node.services.submitter.models()}
    except StateUnavailable as error:
        return [f"state server ({error.message.rstrip('.')})"]
    models |= {name: wanted.state(ranks) for name, (wanted, ranks) in looks.items()}
    missing = [
        f"a worker for model {name}" + (f" ({models[name]})" if ranks else "")
        for name, (wanted, ranks) in looks.items()
        if not wanted.unloads and models[name] != LOADED
    ]
    if policy != "noeviction":
        missing.append(f"maxmemory-policy noeviction (the state server has {policy}, which can lose jobs)")
    return missing

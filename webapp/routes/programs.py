"""Programs: one of the caller's and its end; and, for the operator, what is decided about all of them.

A Program is named by its owner's id for it; the same id may stand for one of each model. Whose it is, the key says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flask import Blueprint, Response, jsonify, request

from pool.errors import ProgramUnknown, UnknownModel
from pool.rules.programs.metadata import checked_text
from pool.store.program_keys import program_id_of
from tasks.program_diagnostics import diagnose
from webapp.auth import current_caller
from webapp.bodies import json_object
from webapp.node import Node, current_node
from webapp.schemas.programs import diagnostics_query, finish_request

blueprint = Blueprint("programs", __name__)

UNKNOWN = "No Program has this id."


@blueprint.get("/v1/programs/<path:program>")
def one(program: str) -> Response:
    """A Program as it is now, in each model that has one of this id."""
    node, name = current_node(), checked_text(program, "program")
    found = list(_states(node, name))
    if not found:
        raise ProgramUnknown(UNKNOWN)
    return jsonify({"id": name, "object": "program", "models": found})


@blueprint.post("/v1/programs/<path:program>/finish")
def finish(program: str) -> Response:
    """End a Program, in each model that has one of this id or in the named one: its requests that wait are cancelled,
    those that run may end, then nothing is kept of it. Repeating it changes nothing."""
    node, name = current_node(), checked_text(program, "program")
    has_body = bool(request.content_length) or "Transfer-Encoding" in request.headers
    asked = finish_request(json_object(request, node.settings.limits.body_bytes) if has_body else {})
    models = _models(node, asked.model)
    ended = {model: _finished(node, model, name) for model in models}
    if not any(ended.values()):
        raise ProgramUnknown(UNKNOWN)
    shown = [{"model": model, "status": status} for model, status in ended.items() if status]
    return jsonify({"id": name, "object": "program", "models": shown})


@blueprint.get("/scheduling/diagnostics")
def diagnostics() -> Response:
    """How each rank stands, and what is decided about each Program and why. Programs have their stored ids, which are
    hashes, unless `ids=names` asks how their owners call them."""
    node, query = current_node(), diagnostics_query(request.args)
    names = query.ids == "names"
    found = [
        diagnose(node.programs().store(model), model, limit=query.limit, names=names)
        for model in (_models(node, query.model) if node.services.programs is not None else ())
    ]
    return jsonify({"enabled": node.services.programs is not None, "models": found})


def _models(node: Node, named: str | None) -> list[str]:
    """The models to look at. Raises UnknownModel, and ProgramUnknown where Programs are off."""
    node.programs()
    if named is None:
        return list(node.services.catalogue.known)
    if named not in node.services.catalogue.known:
        raise UnknownModel("No model of this name is served here.", param="model")
    return [named]


def _finished(node: Node, model: str, name: str) -> str | None:
    """What became of the Program of this model; None where there was none, nor lately."""
    programs, tenant = node.programs(), current_caller().tenant
    code = programs.upkeep(model).finish(tenant, name)
    if code == "gone":
        return "finished" if programs.store(model).was_released(program_id_of(tenant, name)) else None
    programs.wake(model)
    return "finished" if code == "released" else "ending"


def _states(node: Node, name: str) -> Iterator[dict[str, Any]]:
    tenant = current_caller().tenant
    for model in _models(node, None):
        stored = node.programs().store(model).read(program_id_of(tenant, name))
        if stored is None:
            continue
        program = stored.program()
        yield {
            "model": model,
            "generation": stored.number("gen"),
            "state": program.state.value,
            "status": program.status.value,
            "ending": bool(stored.number("ending")),
            "step": stored.number("step"),
            "context_tokens": program.context_tokens,
            "completed_requests": stored.number("completed"),
        }

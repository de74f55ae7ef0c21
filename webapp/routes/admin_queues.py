"""What waits, in which lane and for whom; and single generations, whoever they belong to. For admins."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify, request

from pool.rules import jobs
from pool.rules.fairness import LANES
from pool.store.flows import key_of
from pool.store.ids import JobRef, parse_ref
from pool.store.lane_positions import ahead
from pool.store.lane_views import Backlog, Flow, backlog, change_lane
from webapp.bodies import json_object
from webapp.node import Node, current_node
from webapp.schemas.admin import job_change

blueprint = Blueprint("admin_queues", __name__)


@blueprint.get("/v1/admin/queues")
def queues() -> Response:
    """What waits and runs of each model, by lane and fairness key, in the order in which they are served. Keys are
    shown as they are stored, as hashes."""
    node = current_node()
    models = [_queue(name, backlog(node.services.client, name)) for name in node.services.catalogue.known]
    return jsonify({"object": "list", "data": models})


@blueprint.get("/v1/admin/jobs/<job>")
def read(job: str) -> Response:
    """How a generation stands: never what it was asked, or what it says."""
    return _shown(current_node(), parse_ref(job))


@blueprint.patch("/v1/admin/jobs/<job>")
def change(job: str) -> Response:
    """Have a generation that waits wait in another lane."""
    node, ref = current_node(), parse_ref(job)
    asked = job_change(json_object(request, node.settings.limits.body_bytes))
    change_lane(node.services.client, node.store, ref, asked.lane)
    return _shown(node, ref)


@blueprint.delete("/v1/admin/jobs/<job>")
def end(job: str) -> Response:
    """Cancel a generation that has not ended; one that was cancelled stays so, one that ended otherwise is refused."""
    node, ref = current_node(), parse_ref(job)
    node.store.cancel(ref)
    return _shown(node, ref)


def _queue(model: str, found: Backlog) -> dict[str, Any]:
    lanes = []
    for lane in LANES:
        flows = [flow for flow in found.flows if flow.lane == lane]
        lanes.append(
            {
                "lane": lane,
                "waiting": sum(flow.waiting for flow in flows),
                "oldest_wait_seconds": max((flow.oldest_ms for flow in flows), default=0) / 1000,
                "owed_seconds": found.owed_ms[lane] / 1000,
                "keys": [_key(flow) for flow in flows],
            }
        )
    return {"model": model, "lanes": lanes, "hidden_keys": found.hidden}


def _key(flow: Flow) -> dict[str, Any]:
    return {
        "key": flow.key,
        "waiting": flow.waiting,
        "oldest_wait_seconds": flow.oldest_ms / 1000,
        "in_flight": flow.in_flight,
        "weight": flow.weight,
        "virtual_seconds": flow.virtual_ms / 1000,
        "expected_seconds": flow.guess_ms / 1000,
    }


def _shown(node: Node, ref: JobRef) -> Response:
    record = node.store.read(ref)
    waits = record.state == jobs.QUEUED
    return jsonify(
        {
            "id": record.id,
            "object": "job",
            "model": record.model,
            "status": record.state,
            "lane": record.lane,
            "key": key_of(record.tenant, record.fairness),
            "n": record.n,
            "background": record.background,
            "attempt": record.attempt,
            "rank": record.rank or None,
            "created_ms": record.created_ms,
            "started_ms": record.started_ms,
            "finished_ms": record.finished_ms,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "error_code": record.error_code,
            "queue_position": ahead(node.services.client, ref) if waits else None,
        }
    )

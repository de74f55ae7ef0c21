"""What a request says of its Program: the fields of all three routes that are there where Programs are on, and the
bodies and queries of Programs' own routes.

Where they are off, both fields are unknown ones, and headers of sessions mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flask import Request
from pydantic import Field
from werkzeug.datastructures import MultiDict

from pool.errors import InvalidRequest
from pool.program_settings import ProgramSettings
from pool.rules.programs.claims import Claim
from pool.rules.programs.identity import MAX_OUTPUT_TOKENS, MAX_PRIORITY, claim_of
from pool.rules.programs.metadata import MAX_JSON_BYTES, MAX_STRING_BYTES, MAX_WHOLE
from webapp.bodies import shown
from webapp.schemas.dialect import ModelName, Schema, validated, without_unsupported
from webapp.schemas.responses import once

XARGS = "vllm_xargs"
CONTEXT = "agentic_context"
HINT = "agent_hint"


def program_claim(
    request: Request, body: Mapping[str, Any], settings: ProgramSettings
) -> tuple[Claim | None, Mapping[str, Any]]:
    """The Program that a request belongs to, None for none, and the rest of its body. Raises InvalidRequest."""
    if not settings.enabled:
        return None, body
    claim = claim_of(body, request.headers, settings.program_scheduling_enable_key)
    for name, value in (body.get(XARGS) or {}).items():
        if name != CONTEXT and value is not None:
            param = f"{XARGS}.{shown(name)}"
            raise InvalidRequest(f"Unknown parameter: {param}.", param=param, code="unknown_parameter")
    return claim, {name: value for name, value in body.items() if name not in (XARGS, HINT)}


# --- as described in openapi.json

_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STRING_BYTES}
_FLAG = {"type": "boolean"}
_SECONDS = {"type": "number", "minimum": 0}
_NAMES = (
    "program_id", "task_id", "session_id", "agent_id", "parent_program_id", "root_program_id", "agent_role",
    "spawn_reason", "request_id",
)  # fmt: skip
_CONTEXT_FIELDS: Mapping[str, Any] = {
    **dict.fromkeys(_NAMES, _TEXT),
    "blocks_parent": _FLAG,
    "expected_resume": _FLAG,
    "step_id": {"type": "integer", "minimum": 0, "maximum": MAX_WHOLE},
    "priority": {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    "deadline_seconds": _SECONDS,
    "expected_output_length": {"type": "integer", "minimum": 0, "maximum": MAX_OUTPUT_TOKENS},
    "kv_retention_ttl_seconds": _SECONDS,
}
_HINT_FIELDS: Mapping[str, Any] = {
    "session_id": _TEXT,
    "parent_session_id": _TEXT,
    "blocks_parent": _FLAG,
    "expected_resume": _FLAG,
}


def described(settings: ProgramSettings) -> dict[str, Any]:
    """The schemas of the two fields, none where Programs are off."""
    if not settings.enabled:
        return {}
    context = {
        "anyOf": [
            _object(_CONTEXT_FIELDS, "The Program that this request belongs to, and what it asks of the scheduler."),
            {"type": "string", "maxLength": MAX_JSON_BYTES, "description": "The same as JSON."},
            {"type": "null"},
        ]
    }
    xargs = {"type": "object", "properties": {CONTEXT: context}, "additionalProperties": {"type": "null"}}
    hint: dict[str, Any] = {"description": "Not looked at here: see program_scheduling_enable_key."}
    if settings.program_scheduling_enable_key == "auto":
        hint = _nullable(_object(_HINT_FIELDS, "The Program by its session.") | {"required": ["session_id"]})
    return {XARGS: _nullable(xargs), HINT: hint}


def _object(fields: Mapping[str, Any], text: str) -> dict[str, Any]:
    properties = {name: _nullable(schema) for name, schema in fields.items()}
    return {"type": "object", "description": text, "properties": properties}


def _nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


# --- Programs' own routes


class FinishRequest(Schema):
    """The body of POST /v1/programs/{id}/finish."""

    model: ModelName | None = None


_KNOWN_IN_FINISH = frozenset(FinishRequest.model_fields)


def finish_request(body: Mapping[str, Any]) -> FinishRequest:
    """The body as a FinishRequest. Raises InvalidRequest."""
    return validated(FinishRequest, without_unsupported(body, _KNOWN_IN_FINISH, {}))


MAX_SHOWN = 1000


class DiagnosticsQuery(Schema):
    """The query of GET /scheduling/diagnostics."""

    model: ModelName | None = Field(default=None, description="Of this model only.")
    limit: int = Field(default=100, ge=0, le=MAX_SHOWN, description="Programs of each model that are shown.")
    ids: str = Field(
        default="hashed", pattern="^(hashed|names)$", description="`names`: also how their owners call them."
    )


_KNOWN_IN_DIAGNOSTICS = frozenset(DiagnosticsQuery.model_fields)


def diagnostics_query(args: MultiDict[str, str]) -> DiagnosticsQuery:
    """The query as a DiagnosticsQuery. Raises InvalidRequest."""
    given: dict[str, Any] = without_unsupported(once(args), _KNOWN_IN_DIAGNOSTICS, {})
    if (limit := given.get("limit", "")).isascii() and limit.isdigit() and len(limit) <= len(str(MAX_SHOWN)):
        given["limit"] = int(limit)
    return validated(DiagnosticsQuery, given)

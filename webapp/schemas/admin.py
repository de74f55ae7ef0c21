"""Queries and bodies of admin requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import Field
from werkzeug.datastructures import MultiDict

from pool.errors import InvalidRequest
from pool.rules.fairness import Lane
from webapp.schemas.dialect import Schema, validated, without_unsupported
from webapp.schemas.responses import once

T = TypeVar("T", bound=Schema)

#: Of a body that a model is not loaded or unloaded by.
INVALID_LOAD = "invalid_load_request"
MAX_DRAIN_S = 86_400


class LoadRequest(Schema):
    """The body of POST /v1/admin/models/{id}/load."""

    wait: bool = Field(
        default=False, description="Answer when it is done, or after `server.sync_wait_seconds`, not at once."
    )


class UnloadRequest(LoadRequest):
    """The body of POST /v1/admin/models/{id}/unload."""

    drain_timeout_s: float | None = Field(
        default=None,
        ge=0,
        le=MAX_DRAIN_S,
        allow_inf_nan=False,
        description="How long running generations may take. Default: the model's `drain_timeout_seconds`.",
    )


def load_request(body: Mapping[str, Any]) -> LoadRequest:
    """The body as a LoadRequest. Raises InvalidRequest."""
    return _validated(LoadRequest, body)


def unload_request(body: Mapping[str, Any]) -> UnloadRequest:
    """The body as an UnloadRequest. Raises InvalidRequest."""
    return _validated(UnloadRequest, body)


def _validated(kind: type[T], body: Mapping[str, Any]) -> T:
    try:
        return validated(kind, without_unsupported(body, frozenset(kind.model_fields), {}))
    except InvalidRequest as error:
        error.code = INVALID_LOAD
        raise


class JobChange(Schema):
    """The body of PATCH /v1/admin/jobs/{id}."""

    lane: Lane


def job_change(body: Mapping[str, Any]) -> JobChange:
    """The body as a JobChange. Raises InvalidRequest."""
    return validated(JobChange, without_unsupported(body, frozenset(JobChange.model_fields), {}))


_FLAGS: Mapping[str, bool] = {"1": True, "true": True, "0": False, "false": False}


class ModelRowsQuery(Schema):
    """The query of GET /v1/admin/models."""

    ranks: bool = Field(default=False, description="1: also list each model's replicas.")


_KNOWN_IN_MODEL_ROWS = frozenset(ModelRowsQuery.model_fields)


def model_rows_query(args: MultiDict[str, str]) -> ModelRowsQuery:
    """The query as a ModelRowsQuery. Raises InvalidRequest."""
    given: dict[str, Any] = without_unsupported(once(args), _KNOWN_IN_MODEL_ROWS, {})
    if "ranks" in given:
        given["ranks"] = _FLAGS.get(given["ranks"], given["ranks"])
    return validated(ModelRowsQuery, given)

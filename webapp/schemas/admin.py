"""Queries of the admin routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field
from werkzeug.datastructures import MultiDict

from webapp.schemas.dialect import Schema, validated, without_unsupported
from webapp.schemas.responses import once

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

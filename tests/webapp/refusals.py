"""What a refusal looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from werkzeug.test import TestResponse


def error_of(answer: TestResponse, status: int = 400) -> dict[str, Any]:
    """The error of an answer in the one shape."""
    assert answer.status_code == status, answer.text
    body = json.loads(answer.data.decode("utf-8"), parse_constant=pytest.fail)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error

"""`x-request-id`: the caller's, if it is safe to repeat, else one of ours; on every answer."""

from __future__ import annotations

import re
import secrets

from flask import Flask, Response, g, request

HEADER = "x-request-id"
_SAFE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def register_request_ids(app: Flask) -> None:
    """Name every request."""
    app.before_request(_begin)
    app.after_request(_sign)


def new_request_id() -> str:
    """One of ours."""
    return f"req_{secrets.token_hex(16)}"


def request_id_for(given: str) -> str:
    """The caller's own, if it is safe to repeat, else one of ours."""
    return given if _SAFE.fullmatch(given) else new_request_id()


def _begin() -> None:
    g.request_id = request_id_for(request.headers.get(HEADER, ""))


def _sign(response: Response) -> Response:
    response.headers[HEADER] = g.request_id
    return response

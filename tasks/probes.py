"""Asking an API process of this host whether it is well."""

from __future__ import annotations

import http.client


def answers_ok(host: str, port: int, path: str, *, timeout_s: float) -> bool:
    """Whether a GET is answered 200 in time."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()

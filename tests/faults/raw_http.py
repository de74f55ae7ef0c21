"""Requests as bytes: what well-behaved clients would not send, or would tidy up before they send it."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.system import System

SHAPE = {"message", "type", "param", "code"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; `headers` by their lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body, which must be UTF-8 and JSON without NaN."""
        found: dict[str, Any] = json.loads(self.body.decode("utf-8"), parse_constant=pytest.fail)
        return found

    def error(self, *statuses: int) -> dict[str, Any]:
        """The error in the one shape, of one of these statuses, with an id of the request."""
        assert self.status in statuses, (self.status, self.body[:500])
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-request-id"]
        error: dict[str, Any] = self.json()["error"]
        assert set(error) == SHAPE
        return error


def port_of(system: System) -> int:
    """Where the system's first node listens."""
    return int(system.api_url(system.apis[0]).rpartition(":")[2])


def head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """A request's head."""
    fields = {"Host": "x", "Connection": "close", **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def exchange(port: int, *parts: bytes, method: str = "POST") -> Answer:
    """Send these bytes over a connection of their own and read the answer to its end."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        for part in parts:
            sock.sendall(part)
        response = http.client.HTTPResponse(sock, method=method)
        response.begin()
        body = response.read()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


def send(port: int, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Answer:
    """A request, with its length if it has a body."""
    fields = {**({"Content-Length": str(len(body))} if body else {}), **(headers or {})}
    return exchange(port, head(method, path, fields) + body, method=method)


def post(port: int, path: str, body: bytes, **headers: str) -> Answer:
    """A JSON body; further headers with `_` for `-`."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return send(port, "POST", path, {"Content-Type": "application/json", **fields}, body)


def chunks(body: bytes, size: int) -> Iterable[bytes]:
    """A body as chunks of this size."""
    for start in range(0, len(body), size):
        piece = body[start : start + size]
        yield f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    yield b"0\r\n\r\n"

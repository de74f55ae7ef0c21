"""Answers given without the application, by the server, to what never became a request.

Their shape is that of all errors, with an `x-request-id`: the caller's, where its head was whole. Their words are fixed
by the kind of error: gunicorn's repeat what the client sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from gunicorn.http import errors

from webapp.errors import error_type
from webapp.request_ids import HEADER


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """A whole HTTP/1.1 answer, after which the connection ends."""

    status: int
    code: str
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def sent(self, request_id: str) -> bytes:
        """As it is sent to the request of this id."""
        error = {"message": self.message, "type": error_type(self.status), "param": None, "code": self.code}
        body = json.dumps({"error": error}, separators=(",", ":")).encode()
        fields = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            HEADER: request_id,
            **self.headers,
        }
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def too_slow() -> RawAnswer:
    """A request that did not arrive in time. Sent again it would be as slow."""
    message = "The request did not arrive in time."
    return RawAnswer(408, "request_timeout", message, {"x-should-retry": "false"})


def too_busy() -> RawAnswer:
    """There is no memory for this request's body at the moment; nothing of it was looked at."""
    headers = {"Retry-After": "1", "x-should-retry": "true"}
    return RawAnswer(503, "too_many_bodies", "Too many large requests are arriving at this node.", headers)


def stopping() -> RawAnswer:
    """The process ends before the request has arrived; sent again, it reaches another or the next."""
    headers = {"Retry-After": "1", "x-should-retry": "true"}
    return RawAnswer(503, "node_stopping", "This node is shutting down; nothing of this request was read.", headers)


def line_too_long() -> RawAnswer:
    """The request line is over the limit."""
    return RawAnswer(414, "uri_too_long", "The request line is too long.")


def head_too_large() -> RawAnswer:
    """The head is over one of its limits."""
    return RawAnswer(431, "headers_too_large", "The request's headers are too many or too large.")


def expectation_failed() -> RawAnswer:
    """The client waits for something that nobody will do."""
    return RawAnswer(417, "expectation_failed", "Nothing but 100-continue may be expected.")


def unsupported_transfer_coding() -> RawAnswer:
    """The body's end could be found, its content not."""
    return RawAnswer(501, "unsupported_transfer_coding", "No Transfer-Encoding but chunked is supported.")


def not_valid() -> RawAnswer:
    """What came is no request."""
    return RawAnswer(400, "bad_request", "This is not a valid HTTP/1.1 request.")


def answer_to(error: Exception) -> RawAnswer:
    """For what gunicorn's parser raised, or for an error of the server's own."""
    match error:
        case errors.LimitRequestLine():
            return line_too_long()
        case errors.LimitRequestHeaders():
            return head_too_large()
        case errors.ExpectationFailed():
            return expectation_failed()
        case errors.UnsupportedTransferCoding():
            return unsupported_transfer_coding()
        case errors.InvalidResponseHeader() | errors.InvalidResponseHeaderName() | errors.ConfigurationProblem():
            pass
        case errors.ParseException():
            return not_valid()
    return RawAnswer(500, "internal_error", "The server made an error.", {"x-should-retry": "false"})

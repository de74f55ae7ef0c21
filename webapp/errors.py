"""The one place where errors become HTTP answers: status, OpenAI's error shape, and whether a client may resend.

Official clients resend POSTs on 408, 409, 429 and 5xx by themselves. So whatever must not be sent again says
`x-should-retry: false`, and 429 and 503 with `Retry-After` are only given when nothing stays enqueued.

    every non-2xx body: {"error": {"message", "type", "param", "code"}}, plus "id", "status" and, while it is queued,
    "queue_position" of a job that goes on
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass, field
from typing import Any

from flask import Flask, Response, jsonify
from werkzeug.exceptions import HTTPException

from pool.errors import (
    ConfigurationError,
    GenerationFailed,
    GenpoolError,
    InvalidRequest,
    JobExpired,
    JobNotCancellable,
    JobUnknown,
    KeyConflict,
    ModelClosed,
    ProgramUnknown,
    QueueFull,
    Refused,
    StateUnavailable,
    UnknownModel,
)
from pool.rules import jobs
from tasks.lifecycle import ModelLoadFailed, Superseded

log = logging.getLogger("genpool.webapp")


class BodyTooLarge(Refused):
    """The request body is over the limit."""

    code = "request_too_large"


class UnsupportedMediaType(Refused):
    """The body is not plain JSON."""

    code = "unsupported_media_type"


class InvalidApiKey(Refused):
    """The request carries no API key, or one that is not in force; `sent` says which."""

    code = "invalid_api_key"

    def __init__(self, *, sent: bool) -> None:
        wrong = "The API key is not valid."
        super().__init__(wrong if sent else "No API key was sent. Send it as `Authorization: Bearer KEY`.")
        self.sent = sent


class KeyNotAllowed(Refused):
    """The API key is in force, but not for this."""

    code = "key_not_allowed"


class TooManyWaiting(Refused):
    """All places for waiting requests of this process are taken."""

    code = "too_many_waiting"


class NoWorker(Refused):
    """The model has no worker, and requests are not to wait for one."""

    code = "no_worker"


class NotReady(GenpoolError):
    """This node cannot serve everything it should; `missing` names what is not there, `standing` how the models are."""

    code = "not_ready"

    def __init__(self, missing: list[str], standing: dict[str, Any]) -> None:
        super().__init__(f"Not ready: {'; '.join(missing)}.")
        self.missing = missing
        self.standing = standing


class ClientGone(GenpoolError):
    """The client closed its connection; nobody reads this answer."""

    code = "client_closed_request"


class StillRunning(GenpoolError):
    """The wait ended before the job did: the job goes on and can be polled. `state` is the last one seen; `ahead`: how
    many wait before a queued one, None where that is not known."""

    def __init__(self, message: str, *, job: str, state: str, code: str, ahead: int | None) -> None:
        super().__init__(message, code=code)
        self.job = job
        self.state = state
        self.ahead = ahead


#: HTTP status by class; the first match counts.
_STATUS: tuple[tuple[type[GenpoolError], int], ...] = (
    (InvalidApiKey, 401),
    (KeyNotAllowed, 403),
    (BodyTooLarge, 413),
    (UnsupportedMediaType, 415),
    (InvalidRequest, 400),
    (UnknownModel, 404),
    (ConfigurationError, 400),
    (ModelClosed, 409),
    (Superseded, 409),
    (ModelLoadFailed, 500),
    (QueueFull, 429),
    (StateUnavailable, 503),
    (TooManyWaiting, 503),
    (NoWorker, 503),
    (NotReady, 503),
    (KeyConflict, 409),
    (JobExpired, 410),
    (JobUnknown, 404),
    (ProgramUnknown, 404),
    (JobNotCancellable, 400),
    (StillRunning, 504),
    (ClientGone, 499),
)

#: HTTP status of a generation that was accepted and did not complete, by the code in its record; else 500.
_FAILURE_STATUS = {
    "cancelled": 409,
    "content_filter": 400,
    "context_length_exceeded": 400,
    "deadline_exceeded": 504,
    "invalid_request": 400,
    "kv_budget_exceeded": 400,
    "logprobs_unavailable": 400,
    "model_unloading": 409,
    "queue_timeout": 429,
    "run_timeout": 504,
    "unsupported_parameter": 400,
    "upstream_error": 502,
    "upstream_invalid_answer": 502,
    "upstream_lost": 502,
    "upstream_rejected": 400,
    "upstream_stalled": 504,
}

#: After how many seconds what was missing may be there: a worker that starts, a place in the queue.
LATER_S = "5"

_HTTP_CODES = {
    400: "bad_request",
    404: "unknown_url",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """An error answer before it is a Flask response."""

    status: int
    error: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def response(self) -> Response:
        """The answer for Flask."""
        response = jsonify({"error": self.error, **self.extra})
        response.status_code = self.status
        response.headers.update(self.headers)
        return response


def error_type(status: int) -> str:
    """OpenAI's `error.type` for a status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_body(error: GenpoolError, status: int) -> dict[str, Any]:
    """The `error` object, also used in band by streams."""
    return {"message": error.message, "type": error_type(status), "param": error.param, "code": error.code}


def status_of(error: GenpoolError) -> int:
    """The HTTP status of an error of ours."""
    if isinstance(error, GenerationFailed):
        return _FAILURE_STATUS.get(error.code, 500)
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def answer_for(error: GenpoolError, *, job: str | None = None, keyed: bool = False) -> Answer:
    """Status, body and headers for an error of ours; `job` is the id it is about, if there is one to look up. `keyed`:
    a resend would find the same job again."""
    status = status_of(error)
    headers: dict[str, str] = {}
    extra: dict[str, Any] = {}
    if isinstance(error, QueueFull):
        headers |= {"Retry-After": str(min(error.retry_after_s, 120)), "x-should-retry": "true"}
    elif isinstance(error, ModelClosed) and error.retry_after_s is not None:
        headers |= {"Retry-After": str(error.retry_after_s), "x-should-retry": "true"}
    elif isinstance(error, StateUnavailable | TooManyWaiting):
        headers |= {"Retry-After": "1", "x-should-retry": "true"}
    elif isinstance(error, NoWorker):
        headers |= {"Retry-After": LATER_S, "x-should-retry": "true"}
    elif isinstance(error, InvalidApiKey):
        headers["WWW-Authenticate"] = 'Bearer realm="genpool"' + (', error="invalid_token"' if error.sent else "")
    elif isinstance(error, NotReady):
        headers["Retry-After"] = LATER_S
        extra |= {"missing": error.missing, **error.standing}
    elif isinstance(error, GenerationFailed) and error.code == "queue_timeout":
        # Nothing stays enqueued, so coming back later is right; but not as a resend with the same Idempotency-Key,
        # which finds this very job, ended, for as long as it is kept: a new attempt needs a new key.
        headers |= {"Retry-After": LATER_S, "x-should-retry": "false" if keyed else "true"}
    elif status >= 500 or status in (408, 409, 429):
        headers["x-should-retry"] = "false"
    if isinstance(error, StillRunning):
        job = error.job
        extra["status"] = "in_progress" if error.state == jobs.RUNNING else error.state
        if error.ahead is not None:
            extra["queue_position"] = error.ahead
    if job is not None:
        headers["Location"] = f"/v1/responses/{job}"
        extra["id"] = job
    return Answer(status, error_body(error, status), headers, extra)


def register_errors(app: Flask) -> None:
    """Give every error the one shape."""
    app.register_error_handler(GenpoolError, lambda error: answer_for(error).response())
    app.register_error_handler(HTTPException, _http_answer)
    app.register_error_handler(Exception, _unexpected)


def _http_answer(error: HTTPException) -> Response:
    """Flask's own errors. Their texts are fixed by status: werkzeug's may repeat what the client sent."""
    status = error.code or 500
    answer = Answer(
        status,
        {
            "message": f"{error.name}.",
            "type": error_type(status),
            "param": None,
            "code": _HTTP_CODES.get(status, "http_error"),
        },
        {"x-should-retry": "false"} if status >= 500 else {},
    )
    response = answer.response()
    if status == 405 and (allowed := getattr(error, "valid_methods", None)):
        response.headers["Allow"] = ", ".join(sorted(allowed))
    return response


def _unexpected(error: Exception) -> Response:
    """A bug. The log gets the place, never the values: messages of libraries may quote their input."""
    place = "".join(traceback.format_tb(error.__traceback__))
    log.error("unexpected %s\n%s", type(error).__name__, place)
    body = {"message": "The server made an error.", "type": "server_error", "param": None, "code": "internal_error"}
    return Answer(500, body, {"x-should-retry": "false"}).response()

"""How a server over HTTP can fail a request, and what follows from each.

    UpstreamFailure
    ├── Away          it cannot be reached, or says that it is not serving: wait until it does
    ├── Busy          it takes nothing more now: wait as long as it says
    ├── Rejected      the request is wrong for it: fail by name
    └── Broken        it broke the request: send it again, a few times without a new token

No message holds what a server wrote: that may repeat a prompt.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from pool.errors import GenpoolError

#: The longest a server may have us wait before it is asked again.
MAX_RETRY_AFTER_S = 60.0
#: What servers call a prompt that is too long, in code or type.
_TOO_LONG = ("context_length_exceeded", "exceed_context_size_error")
_TOO_LONG_WORDS = ("maximum context length", "max_model_len", "context size")
_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NOT_SERVING = (401, 403, 404, 502, 503, 504)
_BUSY = 429


class UpstreamFailure(GenpoolError):
    """A request to a server failed; `code` is what a generation's record gets if it ends by it."""

    code = "upstream_error"


class Away(UpstreamFailure):
    """The server is not there, or does not serve."""

    code = "upstream_away"


class Busy(UpstreamFailure):
    """The server takes nothing more now. `retry_after_s`: as it says, None where it says nothing."""

    code = "upstream_busy"

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Rejected(UpstreamFailure):
    """The server does not take this request, and never will."""

    code = "upstream_rejected"


class Broken(UpstreamFailure):
    """The server began, or should have, and did not end the request."""


def invalid_answer(what: str) -> Broken:
    """The server said what nobody can understand."""
    return Broken(f"The upstream server's answer cannot be read: {what}.", code="upstream_invalid_answer")


def failure_of_status(status: int, body: bytes, retry_after: str | None, *, now_s: float) -> UpstreamFailure:
    """What an answer without success means. `now_s`: by the wall clock, for a Retry-After that is a date."""
    detail = _error_of(body)
    wait_s = _seconds(retry_after, now_s)
    if status == _BUSY or (status == 503 and wait_s is not None):
        return Busy(f"The upstream server is busy (status {status}).", wait_s)
    if status in _NOT_SERVING:
        return Away(f"The upstream server does not serve (status {status}).")
    if 400 <= status < 500 and status != 408:
        return _rejection(status, detail)
    return Broken(f"The upstream server failed (status {status}).")


def failure_in_stream(error: Any) -> UpstreamFailure:
    """What an error means that a stream brings in place of output."""
    detail = error if isinstance(error, Mapping) else {}
    status = detail.get("code")
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, _BUSY):
        return _rejection(status, detail)
    if _is_too_long(detail):
        return _rejection(400, detail)
    return Broken("The upstream server failed in the middle of its answer.")


def _rejection(status: int, detail: Mapping[str, Any]) -> Rejected:
    if _is_too_long(detail):
        return Rejected(
            "The prompt and the output asked for do not fit the context of the upstream server.",
            code="context_length_exceeded",
        )
    said = [f"{name} {detail[name]}" for name in ("code", "type", "param") if _is_safe(detail.get(name))]
    return Rejected(
        f"The upstream server refused the request (status {status}{''.join(f', {part}' for part in said)}).",
        param=detail["param"] if _is_safe(detail.get("param")) else None,
    )


def _is_too_long(detail: Mapping[str, Any]) -> bool:
    if any(detail.get(name) in _TOO_LONG for name in ("code", "type")):
        return True
    message = detail.get("message")
    return isinstance(message, str) and any(words in message for words in _TOO_LONG_WORDS)


def _is_safe(value: Any) -> bool:
    """Whether it is a word of the API, and no text of anybody's."""
    return isinstance(value, str) and bool(_SAFE.fullmatch(value))


def _error_of(body: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    error = document.get("error", document) if isinstance(document, dict) else {}
    return error if isinstance(error, dict) else {}


def _seconds(retry_after: str | None, now_s: float) -> float | None:
    """A Retry-After in seconds or as a date, bounded; None where there is none that can be read."""
    if not retry_after:
        return None
    try:
        wait_s = float(retry_after)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(retry_after).timestamp() - now_s
        except ValueError:
            return None
    return None if math.isnan(wait_s) else min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)

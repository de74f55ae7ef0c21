"""Request bodies: bounded, plain, strictly parsed JSON objects.

Duplicate keys are refused: two readers of such a body may disagree about it. NaN, Infinity and numbers like 1e999 parse
to values that no schema accepts, so that their refusal can name the field.
"""

from __future__ import annotations

import json
from typing import Any

from flask import Request

from pool.errors import InvalidRequest
from webapp.errors import BodyTooLarge, UnsupportedMediaType
from webapp.sockets import deadlines

#: How long a body may take to arrive.
BODY_LIMIT_S = 60.0


def json_object(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The request's body as a JSON object.

    Raises BodyTooLarge, UnsupportedMediaType or InvalidRequest.
    """
    _check_media_type(request)
    value = parse(_read(request, limit_bytes))
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return value


def parse(raw: bytes) -> Any:
    """Strict JSON. Raises InvalidRequest; its message never quotes the body."""
    if not raw.strip():
        raise InvalidRequest("The request body is empty; a JSON object is required.", code="invalid_json")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"The request body is not valid JSON (line {error.lineno}, column {error.colno}).", code="invalid_json"
        ) from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.", code="invalid_json") from None
    except ValueError:  # an integer of more digits than Python converts
        raise InvalidRequest("The request body holds a number that is too large.", code="invalid_json") from None


def shown(name: str) -> str:
    """A caller's own word, cut and made printable, for use in an error message."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in name[:64])
    return printable.encode("ascii", "replace").decode("ascii")


def _check_media_type(request: Request) -> None:
    if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("Compressed request bodies are not supported.")
    if request.mimetype != "application/json":
        raise UnsupportedMediaType("The request's Content-Type must be application/json.")
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaType("The request's charset must be UTF-8.")


def _read(request: Request, limit_bytes: int) -> bytes:
    """The body, however it is framed. One byte more than the limit is asked for, since werkzeug cuts a chunked body at
    its limit without a word."""
    too_large = BodyTooLarge(f"The request body is larger than {limit_bytes} bytes, the limit.")
    if (request.content_length or 0) > limit_bytes:
        raise too_large
    request.max_content_length = limit_bytes + 1
    with deadlines.reading(request.environ.get("gunicorn.socket"), BODY_LIMIT_S):
        try:
            raw: bytes = request.stream.read()
        except OSError as error:
            # A broken chunk, or a connection that ended: gunicorn's errors for both are of this kind.
            raise InvalidRequest("The request body cannot be read.", code="invalid_json") from error
    if len(raw) > limit_bytes:
        raise too_large
    if request.content_length is not None and len(raw) < request.content_length:
        raise InvalidRequest("The request body ended early.", code="invalid_json")
    return raw


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"The field {shown(twice)} appears more than once.", param=shown(twice))
    return found

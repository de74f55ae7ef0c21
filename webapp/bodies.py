"""Request bodies: bounded, strictly parsed JSON objects, plain or compressed.

The limit holds for the bytes sent and for what they expand to, so a small body cannot become a large one. Duplicate
keys are refused: two readers of such a body may disagree about it. NaN, Infinity and numbers like 1e999 parse to values
that no schema accepts, so that their refusal can name the field.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from flask import Request
from gunicorn.http.errors import ParseException

from pool.errors import InvalidRequest
from webapp.errors import BodyTooLarge, UnsupportedMediaType

#: Deepest nesting of arrays and objects. No schema needs a tenth of it, those of tools may one day.
MAX_DEPTH = 64
#: zlib's window bits by container: gzip's, zlib's own (what HTTP calls deflate), none (what some send as deflate).
_GZIP, _ZLIB, _RAW = 31, 15, -15
#: What is expanded at a time.
_STEP_BYTES = 65536
_MISSING = object()


def json_object(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The request's body as a JSON object.

    Raises BodyTooLarge, UnsupportedMediaType or InvalidRequest.
    """
    coding = _check_media_type(request)
    raw = _read(request, limit_bytes)
    value = parse(raw if coding == "identity" else _expanded(raw, coding, limit_bytes))
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return value


def parse(raw: bytes) -> Any:
    """Strict JSON. Raises InvalidRequest; its message never quotes the body."""
    if not raw.strip():
        raise InvalidRequest("The request body is empty; a JSON object is required.", code="invalid_json")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"The request body is not valid JSON (line {error.lineno}, column {error.colno}).", code="invalid_json"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # an integer of more digits than Python converts
        raise InvalidRequest("The request body holds a number that is too large.", code="invalid_json") from None
    if _is_deeper_than(value, MAX_DEPTH):
        raise _too_deep()
    return value


def shown(name: str) -> str:
    """A caller's own word, cut and made printable, for use in an error message."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in name[:64])
    return printable.encode("ascii", "replace").decode("ascii")


def _check_media_type(request: Request) -> str:
    """The body's content coding: identity, gzip or deflate."""
    coding = request.headers.get("Content-Encoding", "identity").strip().lower().removeprefix("x-")
    if coding not in ("identity", "gzip", "deflate"):
        raise UnsupportedMediaType("The request's Content-Encoding must be gzip or deflate, if there is one.")
    if request.mimetype != "application/json":
        raise UnsupportedMediaType("The request's Content-Type must be application/json.")
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaType("The request's charset must be UTF-8.")
    return coding


def _read(request: Request, limit_bytes: int) -> bytes:
    """The body, however it is framed. One byte more than the limit is asked for, since werkzeug cuts a chunked body at
    its limit without a word. `oversize`: our server knows already and has not let the rest in."""
    if (request.content_length or 0) > limit_bytes or getattr(request.environ["wsgi.input"], "oversize", False):
        raise _too_large(limit_bytes)
    request.max_content_length = limit_bytes + 1
    try:
        raw: bytes = request.stream.read()
    except (OSError, ParseException) as error:
        # A connection that ended, or a broken chunk.
        raise InvalidRequest("The request body cannot be read.", code="invalid_json") from error
    if len(raw) > limit_bytes:
        raise _too_large(limit_bytes)
    if request.content_length is not None and len(raw) < request.content_length:
        raise InvalidRequest("The request body ended early.", code="invalid_json")
    return raw


def _expanded(packed: bytes, coding: str, limit_bytes: int) -> bytes:
    """A compressed body's content. It is measured first and kept only when it fits, so a bomb takes no room at all."""
    expanded_bytes = 0
    for piece in _pieces(packed, coding):
        expanded_bytes += len(piece)
        if expanded_bytes > limit_bytes:
            raise _too_large(limit_bytes)
    return b"".join(_pieces(packed, coding))


def _pieces(packed: bytes, coding: str) -> Iterator[bytes]:
    """The content, a little at a time. Raises InvalidRequest."""
    inflater = zlib.decompressobj(_GZIP if coding == "gzip" else _ZLIB if _is_zlib(packed) else _RAW)
    try:
        for start in range(0, len(packed), _STEP_BYTES):
            left = packed[start : start + _STEP_BYTES]
            while left:
                yield inflater.decompress(left, _STEP_BYTES)
                left = inflater.unconsumed_tail
    except zlib.error:
        raise InvalidRequest(f"The request body is not valid {coding}.", code="invalid_encoding") from None
    if not inflater.eof or inflater.unused_data:
        raise InvalidRequest(f"The request body is not exactly one {coding} stream.", code="invalid_encoding")


def _is_zlib(packed: bytes) -> bool:
    """Whether a deflate body begins with zlib's header, as the standard has it."""
    return len(packed) > 1 and packed[0] & 15 == zlib.DEFLATED and (packed[0] * 256 + packed[1]) % 31 == 0


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit_bytes} bytes, the limit, as sent or expanded.")


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The request body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")


def _is_deeper_than(value: Any, depth: int) -> bool:
    """Whether there are more levels of arrays and objects."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        if not level:
            return False
        level = [item for container in level for item in _items(container) if isinstance(item, dict | list)]
    return bool(level)


def _items(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        # Each takes its own name out once: the first name that is not there any more comes twice.
        once = dict(pairs)
        twice = next(name for name, _ in pairs if once.pop(name, _MISSING) is _MISSING)
        raise InvalidRequest(f"The field {shown(twice)} appears more than once.", param=shown(twice))
    return found

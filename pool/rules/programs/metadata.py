"""Typed reading of what a request says of its Program: text, yes or no, whole numbers, durations, each with its bound.

Types are exact: no number passes for text, no boolean for a number. What is absent or null is None. Errors name the
field and the limit, and never show the value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pool.errors import InvalidRequest

#: Longest string that is stored with a Program, in bytes of UTF-8.
MAX_STRING_BYTES = 256
#: Longest JSON string in an object's place, in bytes of UTF-8.
MAX_JSON_BYTES = 16 * 1024
#: Longer durations count as this: a year is as good as for ever, and still a whole number of ms everywhere.
MAX_DURATION_SECONDS = 31_536_000.0
#: Largest whole number that every store keeps exactly (Lua knows doubles only).
MAX_WHOLE = 2**53 - 1

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Metadata:
    """An object of the request. `path`: where it stands in the body, for errors; a field may go by several names, of
    which the first that is given counts."""

    path: str
    fields: Mapping[str, Any]

    def text(self, *names: str) -> str | None:
        """A string of 1 to 256 bytes, without the blanks around it."""
        name, value = self._first(names)
        return None if value is None else checked_text(value, f"{self.path}.{name}")

    def yes_or_no(self, *names: str) -> bool | None:
        """A boolean."""
        name, value = self._first(names)
        if value is None or isinstance(value, bool):
            return value
        raise InvalidRequest(f"{self.path}.{name} must be true or false.", param=f"{self.path}.{name}")

    def whole(self, *names: str, least: int, most: int) -> int | None:
        """A whole number within these bounds."""
        name, value = self._first(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidRequest(
                f"{self.path}.{name} must be a whole number from {least} to {most}.", param=f"{self.path}.{name}"
            )
        return value

    def seconds(self, *names: str) -> float | None:
        """A finite number of seconds >= 0; above a year it counts as a year."""
        name, value = self._first(names)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
            return float(min(value, MAX_DURATION_SECONDS))
        raise InvalidRequest(
            f"{self.path}.{name} must be a finite number of seconds >= 0.", param=f"{self.path}.{name}"
        )

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """The name and value of the first that is given; the first name and None where none is."""
        return next(
            ((name, self.fields[name]) for name in names if self.fields.get(name) is not None), (names[0], None)
        )


def read_object(value: Any, path: str) -> Metadata | None:
    """The object at `path`, None where it is absent or null."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{path} must be an object.", param=path)
    return Metadata(path, value)


def read_object_or_json(value: Any, path: str) -> Metadata | None:
    """The object at `path`, given as such or as a string of JSON."""
    return read_object(_decoded(value, path) if isinstance(value, str) else value, path)


def _decoded(text: str, path: str) -> Any:
    encoded = _utf8(text)
    if encoded is not None and len(encoded) <= MAX_JSON_BYTES:
        try:
            decoded = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            if isinstance(decoded, dict):
                return decoded
    raise InvalidRequest(
        f"{path} must be an object, or a JSON object in a string of at most {MAX_JSON_BYTES} bytes.", param=path
    )


def checked_text(value: Any, name: str) -> str:
    """`value` without the blanks around it. Raises InvalidRequest for what is no string, is blank, is too long, holds
    control characters (it will be shown in terminals) or half a surrogate pair (it could not be stored)."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string.", param=name)
    text = value.strip()
    encoded = _utf8(text)
    if not text or encoded is None or len(encoded) > MAX_STRING_BYTES:
        raise InvalidRequest(f"{name} must have 1 to {MAX_STRING_BYTES} bytes of UTF-8.", param=name)
    if _CONTROL_CHARACTERS.search(text):
        raise InvalidRequest(f"{name} must not hold control characters.", param=name)
    return text


def _utf8(text: str) -> bytes | None:
    """The text's bytes, None for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None

"""Server-sent events, as text. JSON is escaped to ASCII: some clients split lines at U+2028 and the like."""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii
from typing import Any

KEEP_ALIVE = ": keep-alive\n\n"
DONE = "data: [DONE]\n\n"


def event(kind: str, data: dict[str, Any]) -> str:
    """A named event."""
    return f"event: {kind}\n{message(data)}"


def message(data: dict[str, Any]) -> str:
    """An event without a name."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


#: Stands for what differs from event to event. No schema has this text, and nobody can type it into a name.
HOLE = "\uf8ff"
_HOLE = encode_basestring_ascii(HOLE)


class Form:
    """Messages that differ in a few values alone, which are HOLE in the example: what is the same is written once. An
    example in JSON with the values in its holes is just what `message` and `event` would make of them."""

    def __init__(self, example: str) -> None:
        self._parts = example.split(_HOLE)

    def filled(self, *values: str | int) -> str:
        """The message with these values, in the order of the holes."""
        first, *parts = self._parts
        written = [encode_basestring_ascii(value) if isinstance(value, str) else str(value) for value in values]
        return first + "".join([value + part for value, part in zip(written, parts, strict=True)])

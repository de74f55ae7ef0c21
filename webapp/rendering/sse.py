"""Server-sent events, as text. JSON is escaped to ASCII: some clients split lines at U+2028 and the like."""

from __future__ import annotations

import json
from typing import Any

KEEP_ALIVE = ": keep-alive\n\n"
DONE = "data: [DONE]\n\n"


def event(kind: str, data: dict[str, Any]) -> str:
    """A named event."""
    return f"event: {kind}\n{message(data)}"


def message(data: dict[str, Any]) -> str:
    """An event without a name."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"

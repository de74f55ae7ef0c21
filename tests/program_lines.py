"""Lines of the logger `genpool.programs`, taken apart."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest

_VALUE = r'(?:"(?:[^"\\]|\\.)*"|[\w.:,@/+-]+)'
_LINE = re.compile(rf"([a-z_]+)((?: [a-z_]+={_VALUE})+)")
_PAIR = re.compile(rf" ([a-z_]+)=({_VALUE})")


@dataclass(frozen=True)
class Told:
    """One line. `level`: its name, "" where only the text is known."""

    level: str
    event: str
    values: dict[str, str]


def line_of(text: str, level: str = "") -> Told:
    """The line; fails where it is anything but an event and `name=value`."""
    found = _LINE.fullmatch(text)
    assert found is not None, text
    pairs = {name: json.loads(value) if value[0] == '"' else value for name, value in _PAIR.findall(found[2])}
    return Told(level, found[1], pairs)


def told(caplog: pytest.LogCaptureFixture, *events: str) -> list[Told]:
    """What was told so far; of these events, if any are given."""
    lines = [
        line_of(record.getMessage(), record.levelname) for record in caplog.records if record.name == "genpool.programs"
    ]
    return [line for line in lines if not events or line.event in events]

"""Coefficients as TOML: the fragment of one model, and that fragment merged into a configuration file.

A merge changes the text of the two tables and nothing else: comments, order and spelling of the rest stay. Whatever the
file looked like, the result is read back and must say what the file said before, with these tables; else it is refused.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pool.errors import ConfigurationError
from pool.program_settings import DecodeThroughputModel, PrefillCostModel
from tasks.config import dotted, load_configuration

Tables = Mapping[str, Mapping[str, float]]

_HEADER = re.compile(r"\s*\[[^\[].*\]\s*(#.*)?")


def tables(prefill: PrefillCostModel, decode: DecodeThroughputModel, *, alpha_given: bool) -> Tables:
    """The values by table. Alpha is left out where nobody measured it, so that start-up goes on warning of it."""
    left_out = set() if alpha_given else {"decode_throughput_alpha"}
    return {
        "prefill_cost_model": prefill.model_dump(exclude=left_out),
        "decode_throughput_model": decode.model_dump(),
    }


def fragment(model: str, values: Tables) -> str:
    """`[programs.models.NAME.…]` with these values."""
    return "\n".join(_table(model, name, fields) for name, fields in values.items())


def _table(model: str, name: str, fields: Mapping[str, float]) -> str:
    lines = [
        f"[{dotted(('programs', 'models', model, name))}]",
        *(f"{key} = {value!r}" for key, value in fields.items()),
    ]
    return "\n".join(lines) + "\n"


def merged(text: str, model: str, values: Tables) -> str:
    """The file's text with these tables in place of its own, or behind it. Raises ConfigurationError where the file
    says them in another form, such as dotted keys or inline tables."""
    before = tomllib.loads(text)
    lines = text.splitlines(keepends=True)
    for name, fields in values.items():
        lines = _with_table(lines, ("programs", "models", model, name), _table(model, name, fields))
    after = "".join(lines)
    expected = _expected(before, model, values)
    try:
        sound = tomllib.loads(after) == expected
    except tomllib.TOMLDecodeError:
        sound = False
    if not sound:
        raise ConfigurationError(
            f"The file says {dotted(('programs', 'models', model))} in a form that cannot be merged with. Put there:\n"
            + fragment(model, values),
            param="write",
        )
    return after


def _with_table(lines: list[str], path: tuple[str, ...], table: str) -> list[str]:
    """The lines with this table's own replaced. What stands behind its last value, as comments on what follows,
    stays."""
    starts = [number for number, line in enumerate(lines) if _HEADER.fullmatch(line.rstrip("\r\n"))]
    for place, start in enumerate(starts):
        if _path_of(lines[start]) == path:
            end = starts[place + 1] if place + 1 < len(starts) else len(lines)
            while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
                end -= 1
            return [*lines[:start], table, *lines[end:]]
    return [*lines, *([] if not lines or lines[-1].endswith("\n") else ["\n"]), *(["\n"] if lines else []), table]


def _path_of(header: str) -> tuple[str, ...]:
    """The names in a table's header."""
    try:
        tree: Any = tomllib.loads(header)
    except tomllib.TOMLDecodeError:
        return ()
    names: list[str] = []
    while isinstance(tree, dict) and tree:
        ((name, tree),) = tree.items()
        names.append(name)
    return tuple(names)


def _expected(before: dict[str, Any], model: str, values: Tables) -> dict[str, Any]:
    """What the file must say afterwards."""
    programs = before.get("programs", {})
    models = programs.get("models", {})
    own = models.get(model, {})
    return before | {"programs": programs | {"models": models | {model: own | values}}}


def write(file: Path, model: str, values: Tables) -> None:
    """Merge into the file, at once or not at all; it is made if it is not there. Raises ConfigurationError, with the
    file as it was, where the result would be no valid configuration."""
    target = file.resolve()
    try:
        text = target.read_text(encoding="utf-8") if target.exists() else ""
        after = merged(text, model, values)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            draft.write_text(after, encoding="utf-8")
            _check(draft, file)
            if target.exists():
                draft.chmod(target.stat().st_mode & 0o777)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"The configuration file {file} cannot be changed: {error}", param="write") from None


def _check(draft: Path, file: Path) -> None:
    try:
        load_configuration(draft)
    except ConfigurationError as error:
        raise ConfigurationError(error.message.replace(str(draft), str(file)), param=error.param) from None

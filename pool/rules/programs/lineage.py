"""Who descends from whom, and which step of a Program a request is."""

from __future__ import annotations

from collections.abc import Callable

from pool.errors import InvalidRequest
from pool.rules.programs.metadata import MAX_WHOLE

#: Deepest tree of agents. It bounds the walk to the root, which costs a look-up a level.
MAX_DEPTH = 64


def ancestors(program_id: str, parent: str | None, parent_of: Callable[[str], str | None]) -> tuple[str, ...]:
    """The Program's ancestors, its parent first, its root last; () without a parent.

    `parent_of`: the known parent of a Program, None for a root and for one that nobody knows. What it says of the
    Program itself is not asked. Raises InvalidRequest where `parent` would make the Program its own ancestor, and for a
    tree deeper than MAX_DEPTH; the caller adds the field's name.
    """
    found: list[str] = []
    while parent is not None:
        if parent == program_id:
            raise InvalidRequest("A Program cannot be its own ancestor.", param="parent_program_id")
        if len(found) == MAX_DEPTH:
            raise InvalidRequest(f"A tree of Programs has at most {MAX_DEPTH} levels.", param="parent_program_id")
        found.append(parent)
        parent = parent_of(parent)
    return tuple(found)


def step_of(given: int | None, previous: int | None) -> int:
    """The request's step: what it says, else one after the Program's previous step, else 0."""
    if given is not None:
        return given
    return 0 if previous is None else min(previous + 1, MAX_WHOLE)

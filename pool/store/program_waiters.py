"""What is kept of each Program that waits for a rank in one hash of the rank, beside its record: what a decision needs
of it. Reading one costs the server a fifteenth of reading a record and the front of a pool.

    TOKEN:QUEUED_MS:PRIORITY:EXPECTED:FORCE_MS:CTX:SHARED:PROMPT:WAS:ROUNDS:FINISH_MS:ACTIVATED_MS:YIELDED:PARENT

The first four are the front ticket of its pool; PARENT is empty unless the Program blocks it. `lua/lib/waiting.lua`
writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pool.rules.programs.facts import Program, State, Status, Waiting


@dataclass(slots=True)
class Waiter:
    """A Program that waits. `front`: token of the request that it waits with; `parent`: the id of the one that cannot
    go on before it ends, "" for none."""

    program: Program
    front: str
    parent: str


def waiter_of(program: str, rank: str, packed: bytes, awaited_by: tuple[str, ...] = ()) -> Waiter:
    """What the hash of `rank` says of a Program. `awaited_by`: its ancestors, which are in no single place."""
    front, queued, priority, expected, force, *counts, parent = packed.decode().split(":")
    context, shared, prompt, was, rounds, finish, activated, yielded = map(int, counts)
    return Waiter(
        Program(
            id=program,
            state=State.PAUSED,
            status=Status.REASONING,
            rank=rank,
            context_tokens=context,
            shared_prefix_tokens=shared,
            prompt_tokens=prompt,
            was_active=bool(was),
            last_finish_ms=finish,
            rounds=rounds,
            activated_ms=activated,
            yielded=bool(yielded),
            waiting=Waiting(int(queued), int(force), int(priority), int(expected) if expected else None),
            awaited_by=awaited_by,
        ),
        front,
        parent,
    )


def parent_of(packed: bytes) -> str:
    """Its parent alone."""
    return packed.rpartition(b":")[2].decode()

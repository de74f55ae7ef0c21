"""Ends and returns of Programs' jobs by callers that know of a job alone: they learn from the replies what to declare.

A verb that ends a Program's job may send the next one to the rank. Which rank and which job that is, only the records
tell; a verb that was given other keys changes nothing, names them, and is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pool.errors import StateUnavailable
from pool.store.connection import Client
from pool.store.ids import JobRef
from pool.store.keys import ModelKeys
from pool.store.program_keys import ProgramKeys
from pool.store.running import run
from pool.store.scripts import Command, script

#: How often a verb is run again because what it must declare has changed meanwhile.
TRIES = 20


@dataclass(frozen=True, slots=True)
class Declared:
    """What a verb declares: `rank` of the Program, `front`: the job its pool begins with ("" while none is known),
    `blocks` of the input of the job that ends."""

    rank: str
    front: str = ""
    blocks: tuple[str, ...] = ()

    def corrected(self, reply: Sequence[Any]) -> Declared | None:
        """As the reply says, None when the reply is the result."""
        match reply[0]:
            case b"moved":
                return replace(self, rank=reply[1].decode())
            case b"front":
                return replace(self, front=reply[1].decode())
            case b"blocks":
                return replace(self, blocks=tuple(reply[1].decode().split()))
        return None


def run_declared(
    client: Client, keys: ProgramKeys, program: str, build: Callable[[Declared], Command], rank: str | None = None
) -> list[Any]:
    """Run a verb until it has been given what it needs; its reply. `rank`: where the Program probably is.

    Raises StateUnavailable when it changes all the time.
    """
    if rank is None:
        rank = (client.hget(keys.record(program), "rank") or b"").decode()
    declared: Declared | None = Declared(rank)
    for _ in range(TRIES):
        assert declared is not None
        reply: list[Any] = run(client, build(declared))
        declared = declared.corrected(reply)
        if declared is None:
            return reply
    raise StateUnavailable("A Program changes too often at the moment.")


def cancel(client: Client, ref: JobRef, program: str, result_ttl_ms: int) -> list[Any]:
    """The reply of program_cancel."""
    keys, token = ProgramKeys(ref.tag), ref.token

    def build(declared: Declared) -> Command:
        return script("program_cancel")(
            keys=keys.ended(token, declared.rank),
            lanes=keys.lanes,
            **keys.of(program),
            at=keys.place(declared.rank),
            front=keys.job(declared.front or token),
            blocks=[keys.input(block) for block in declared.blocks],
            token=token,
            ttl=result_ttl_ms,
            id=program,
            rank=declared.rank,
            front_token=declared.front,
        )

    return run_declared(client, keys, program, build)


def expire(
    client: Client, keys: ModelKeys, timer: Sequence[str], program: str, *, result_ttl_ms: int, lease_ms: int
) -> list[Any]:
    """The reply of program_expire; `timer`: kind and token."""
    names, (kind, token) = ProgramKeys(keys.tag), timer

    def build(declared: Declared) -> Command:
        return script("program_expire")(
            keys=names.ended(token, declared.rank),
            lanes=names.lanes,
            **names.of(program),
            at=names.place(declared.rank),
            front=names.job(declared.front or token),
            sweep=names.sweep,
            blocks=[names.input(block) for block in declared.blocks],
            kind=kind,
            token=token,
            ttl=result_ttl_ms,
            lease=lease_ms,
            id=program,
            rank=declared.rank,
            front_token=declared.front,
        )

    return run_declared(client, names, program, build)


@dataclass(frozen=True, slots=True)
class Terms:
    """How often an attempt may be lost, how long results stay, how many dead letters are kept, and how long a process
    is taken for living after it has shown so."""

    max_deliveries: int
    result_ttl_ms: int
    letters_kept: int
    lease_ms: int


def take_back(client: Client, keys: ModelKeys, token: str, program: str, terms: Terms) -> list[Any]:
    """The reply of program_take_back."""
    names = ProgramKeys(keys.tag)

    def build(declared: Declared) -> Command:
        return script("program_take_back")(
            keys=names.ended(token, declared.rank),
            lanes=names.lanes,
            **names.of(program),
            at=names.place(declared.rank),
            front=names.job(declared.front or token),
            sweep=names.sweep,
            dead=names.dead,
            blocks=[names.input(block) for block in declared.blocks],
            token=token,
            cap=terms.max_deliveries,
            ttl=terms.result_ttl_ms,
            keep=terms.letters_kept,
            id=program,
            rank=declared.rank,
            front_token=declared.front,
        )

    return run_declared(client, names, program, build)


def of_programs(replies: Iterable[Sequence[Any]], again: Callable[[int, str], list[Any]]) -> list[Sequence[Any]]:
    """The replies, with those replaced that say that the job is a Program's: `again(position, program)` gives the
    reply of the verb for these."""
    return [
        again(position, reply[1].decode()) if reply[0] == b"program" else reply
        for position, reply in enumerate(replies)
    ]

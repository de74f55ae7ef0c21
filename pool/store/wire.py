"""Commands to one server over one connection, packed by hand: redis-py's own way looks at each argument twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import hiredis
import redis

from pool.store.scripts import Command

#: Its type says that a command is a single word.
_pack: Any = hiredis.pack_command
#: Commands sent at once: enough to share a system call, few enough that the server starts early.
PART = 16
#: Error replies that say that nothing was done, and what to do for it: load the verb, or ask another node.
UNDONE = (redis.exceptions.NoScriptError, redis.exceptions.AskError)

#: Runs a command, on a connection with nothing outstanding, whose reply was one of UNDONE; the new reply.
Redo = Callable[[Any, Command, Exception], Any]


def stream(connection: Any, commands: Iterable[Command], redo: Redo) -> Iterator[Any]:
    """Run commands in order and yield their replies in order, a part at a time: while the server works on one part, the
    next is built (`commands` is read lazily) and the replies of the last are used by the caller.

    Raises the first error reply, at its place; then, or when the caller stops early, the connection is dropped, because
    later replies on it would answer the next caller.
    """
    done = False
    try:
        sent: list[Command] = []
        for part in _parts(commands):
            connection.send_packed_command(_packed(part))
            replies = [_reply(connection) for _ in sent]
            if any(isinstance(reply, UNDONE) for reply in replies):
                # Nothing may be outstanding while a command is run again, so this part's replies are read as well.
                replies += [_reply(connection) for _ in part]
                replies = _redone(connection, [*sent, *part], replies, redo)
                part = []  # noqa: PLW2901 - it has been answered
            yield from map(_checked, replies)
            sent = part
        yield from map(_checked, _redone(connection, sent, [_reply(connection) for _ in sent], redo))
        done = True
    finally:
        if not done:
            connection.disconnect()


def ask(connection: Any, *commands: Command) -> Any:
    """Send commands together; the last one's reply, which may be an error."""
    connection.send_packed_command(_packed(commands))
    return [_reply(connection) for _ in commands][-1]


def check_idle(connection: Any) -> None:
    """As a pool does it: a connection that was broken while nobody used it is made anew."""
    connection.connect()
    try:
        clean = not connection.can_read()
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError):
        clean = False
    if not clean:
        connection.disconnect()
        connection.connect()


def _packed(commands: Iterable[Command]) -> list[bytes]:
    """On the wire, all of them in one piece."""
    return [b"".join([_pack(tuple(command)) for command in commands])]


def _parts(commands: Iterable[Command]) -> Iterator[list[Command]]:
    part: list[Command] = []
    for command in commands:
        part.append(command)
        if len(part) == PART:
            yield part
            part = []
    if part:
        yield part


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.exceptions.ResponseError as error:
        return error


def _checked(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply


def _redone(connection: Any, commands: Sequence[Command], replies: list[Any], redo: Redo) -> list[Any]:
    """The replies, with those commands run again, in order, that were not done."""
    for position, reply in enumerate(replies):
        if isinstance(reply, UNDONE):
            replies[position] = redo(connection, commands[position], reply)
    return replies

"""What many planners at once ask of a state server, sent again byte by byte: recorded from single decisions, whose last
command was held back.

One planner leaves the server idle while it computes, so that each of its commands pays for waking up, and for a write
to the log of its own. A server that is busy does not: it answers many between two looks at its sockets.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hiredis

from pool.store.connection import Client
from pool.store.scripts import script

#: Connections of the replay, each with one command, or one pipeline, on its way.
PLANNERS = 50

#: One decision: what is sent in each of its round trips, and how many replies that has.
Trips = list[tuple[bytes, int]]


class _HeldError(Exception):
    """The last command was not sent."""


def recorded(client: Client, decide: Callable[[], None]) -> Trips:
    """What a decision sends. It is not carried out: its plan is held back. `client`: of a single connection."""
    trips: Trips = []
    verb = script("apply").sha.encode()
    with _watched(client) as (connection, send):

        def send_or_hold(packed: Any, check_health: bool = True) -> None:
            sent = b"".join([packed] if isinstance(packed, bytes) else packed)
            trips.append((sent, _commands(sent)))
            if verb in sent:
                raise _HeldError
            send(packed, check_health=check_health)

        connection.send_packed_command = send_or_hold
        try:
            decide()
        except _HeldError:
            return trips
    raise RuntimeError("a decision applied no plan")


@contextmanager
def _watched(client: Client) -> Iterator[tuple[Any, Callable[..., None]]]:
    connection = client.connection_pool.get_connection()
    client.connection_pool.release(connection)
    send = connection.send_packed_command
    try:
        yield connection, send
    finally:
        connection.send_packed_command = send


def _commands(packed: bytes) -> int:
    """How many commands these are."""
    reader = hiredis.Reader()
    reader.feed(packed)
    count = 0
    while reader.gets() is not False:
        count += 1
    return count


def replay(path: str, decisions: Sequence[Trips]) -> list[Any]:
    """Carry out recorded decisions, PLANNERS at once, over the unix socket at `path`. The replies to their plans."""
    planners = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(min(PLANNERS, len(decisions)))]
    try:
        for planner in planners:
            planner.connect(path)
        found: list[Any] = []
        for start in range(0, len(decisions), len(planners)):
            found += _together(planners, decisions[start : start + len(planners)])
        return found
    finally:
        for planner in planners:
            planner.close()


def _together(planners: Sequence[socket.socket], decisions: Sequence[Trips]) -> list[Any]:
    """One decision for each planner, all in step."""
    last: list[Any] = []
    for trip in range(max(len(trips) for trips in decisions)):
        going = [
            (planner, trips[trip]) for planner, trips in zip(planners, decisions, strict=False) if trip < len(trips)
        ]
        for planner, (packed, _) in going:
            planner.sendall(packed)
        last = [_replies(planner, count)[-1] for planner, (_, count) in going]
    return last


def _replies(planner: socket.socket, count: int) -> list[Any]:
    reader = hiredis.Reader()
    replies: list[Any] = []
    while len(replies) < count:
        reply = reader.gets()
        if reply is False:
            received = planner.recv(2**16)
            if not received:
                raise RuntimeError("the state server closed a connection")
            reader.feed(received)
        elif isinstance(reply, hiredis.HiredisError):
            raise RuntimeError(str(reply))
        else:
            replies.append(reply)
    return replies

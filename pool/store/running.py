"""Runs verbs, on a single server or on that node of a cluster which owns their keys.

A verb unknown to the server (first use, restart, SCRIPT FLUSH, failover) is loaded and sent again alone: NOSCRIPT means
that it did nothing. So does MOVED or ASK: the verb goes to the node that its keys have moved to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import redis

from pool.store import wire
from pool.store.cluster_client import REDIRECTS, ClusterClient, NodeClient, grouped
from pool.store.connection import Client
from pool.store.scripts import Command, all_scripts
from pool.store.slot_map import key_of


def run(client: Client, command: Command) -> Any:
    """Run one verb."""
    return run_many(client, [command])[0]


def run_many(client: Client, commands: Sequence[Command]) -> list[Any]:
    """Run commands in order, in about one round trip to each node they concern; the replies in order. Raises the first
    error reply."""
    if not isinstance(client, ClusterClient):
        return list(run_stream(client, commands))
    replies: dict[int, Any] = {}
    for node, positions in grouped(client, list(commands)).items():
        found = _run_at(client, node, [commands[at] for at in positions])
        replies |= zip(positions, found, strict=True)
    return [replies[at] for at in range(len(commands))]


def run_stream(client: Client, commands: Iterable[Command], *, key: str = "") -> Iterator[Any]:
    """Run commands whose keys share a slot, as `wire.stream` does: lazily. `key`: one of them; "": the first command's,
    which is then built before there is a connection."""
    if isinstance(client, ClusterClient) and not key:
        commands = iter(commands)
        first = next(commands, None)
        if first is None:
            return
        key = _key_of(first)
        commands = chain([first], commands)
    yield from _run_at(client, _node(client, key), commands)


class Line:
    """`run_stream` for one thread that runs a command at a time and often, over a connection of its own beside those of
    the client's pool: going through the pool takes as long as all else that such a command takes here. All its commands
    have keys in the slot of `key`."""

    def __init__(self, client: Client, key: str) -> None:
        self._client = client
        self._key = key
        self._node: Client = None
        self._connection: Any = None

    def run_stream(self, commands: Iterable[Command]) -> Iterator[Any]:
        """As `run_stream`."""
        node = _node(self._client, self._key)
        if node is not self._node:
            self.close()
            self._node, self._connection = node, node.connection_pool.make_connection()
        with _watched(node):
            wire.check_idle(self._connection)
        return self._watched_stream(node, commands)

    def _watched_stream(self, node: redis.Redis, commands: Iterable[Command]) -> Iterator[Any]:
        with _watched(node):
            yield from wire.stream(self._connection, commands, _Redo(self._client))

    def close(self) -> None:
        """Close the connection; the next command opens it again."""
        if self._connection is not None:
            self._connection.disconnect()


def _run_at(client: Client, node: Any, commands: Iterable[Command]) -> Iterator[Any]:
    with _watched(node):
        connection = node.connection_pool.get_connection()
        try:
            yield from wire.stream(connection, commands, _Redo(client))
        finally:
            node.connection_pool.release(connection)


def _node(client: Client, key: str) -> Any:
    return client.node_of(key) if isinstance(client, ClusterClient) else client


def _watched(node: Client) -> AbstractContextManager[None]:
    return node.watched() if isinstance(node, NodeClient) else nullcontext()


def _key_of(command: Command) -> str:
    key = key_of(command)
    assert key is not None, "verbs have keys"
    return key if isinstance(key, str) else key.decode()


class _Redo:
    """wire.Redo of a client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __call__(self, connection: Any, command: Command, reply: Any) -> Any:
        if isinstance(reply, redis.exceptions.NoScriptError):
            reply = wire.ask(connection, _load(command), command)
        if isinstance(reply, redis.exceptions.AskError) and isinstance(self._client, ClusterClient):
            reply = self._follow(self._client, command, reply)
        return reply

    def _follow(self, client: ClusterClient, command: Command, reply: Any) -> Any:
        for _ in range(REDIRECTS):
            node = client.redirected(reply)
            before: list[Command] = [] if isinstance(reply, redis.exceptions.MovedError) else [["ASKING"]]
            with node.watched():
                reply = self._ask(node.connection_pool, [*before, command])
            if not isinstance(reply, redis.exceptions.AskError):
                break
        return reply

    def _ask(self, pool: redis.ConnectionPool, commands: list[Command]) -> Any:
        # A connection of its own: it is rare, and whoever waits for a pool's while holding another's may wait for ever.
        connection = pool.connection_class(**pool.connection_kwargs)
        try:
            connection.connect()
            reply = wire.ask(connection, *commands)
            if isinstance(reply, redis.exceptions.NoScriptError):
                reply = wire.ask(connection, _load(commands[-1]), *commands)
            return reply
        finally:
            connection.disconnect()


def _load(command: Command) -> Command:
    return ["SCRIPT", "LOAD", next(known.source for known in all_scripts() if known.sha == command[1])]

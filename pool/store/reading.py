"""The connection that a rank reads its stream over: a read that blocks there is woken from another one, which must know
the server and the connection's id. In a cluster the stream may move, and the read with it."""

from __future__ import annotations

from pool.store.connection import Client
from pool.store.nodes import node_of, same_node


class Reading:
    """`reader`: a client of one connection to a node, for reads of `key`; `writer`: the client that wakes it. For the
    thread that reads, but for `unblock`."""

    def __init__(self, reader: Client, writer: Client, key: str) -> None:
        self._reader = reader
        self._writer = writer
        self._key = key
        self._server: Client = None
        self._id: int | None = None

    @property
    def server(self) -> Client:
        """What a read is sent to: one server, so that it waits nowhere else."""
        return self._server

    def is_new(self) -> bool:
        """Whether the next read is the first one over its connection: what was read over another may have got lost."""
        return self._id is None or node_of(self._reader, self._key) is not self._server

    def settle(self) -> None:
        """Remember the connection. Raises what the client library raises."""
        self._server = node_of(self._reader, self._key)
        self._id = int(self._server.client_id())

    def forget(self) -> None:
        """The connection broke."""
        self._id = None

    def unblock(self) -> None:
        """Wake a read that blocks. For any thread."""
        if self._id is not None:
            same_node(self._writer, self._server).execute_command("CLIENT", "UNBLOCK", self._id)

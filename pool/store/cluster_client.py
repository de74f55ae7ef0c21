"""A client of a Redis Cluster that looks like one of a single server: every command goes to the node that owns its key.

redis-py's own cluster client is no base for the store: its constructor needs the cluster to be there, its pipelines
send again what failed on a connection (a write may then run twice), and it asks the server which keys a command has.
Here a command fails as it does with a single server, and follows its key when the key has moved (MOVED, ASK), which the
node that no longer has it says without doing anything.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import redis

from pool.store.slot_map import EVERYWHERE, ClusterAddress, SlotMap, address_of, key_of

#: How often a command follows its key from node to node.
REDIRECTS = 5
#: redis-py types replies as the union of all protocols' shapes: see pool/store/connection.py.
Node: TypeAlias = Any
#: How long a node may take to tell who owns which slot, at most.
LOOK_S = 1.0
#: Makes the pool of the node at a URL.
MakePool = Callable[[str], redis.ConnectionPool]
#: What may mean that a node has lost its slots.
_FAILURES = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, redis.exceptions.ClusterDownError)


class NodeClient(redis.Redis):
    """A client of one node. When it fails, another may have its slots by now."""

    slots: SlotMap
    address: str

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Whatever else than single commands is sent to the node."""
        try:
            yield
        except _FAILURES:
            self.slots.doubt(self.address)
            raise

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """As Redis.execute_command."""
        with self.watched():
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


class ClusterPools(redis.ConnectionPool):
    """The pools of all nodes. As a pool it gives connections to any of them, which is all that publishing and
    subscribing need: the nodes pass every message on to each other."""

    def __init__(self, address: ClusterAddress, make_pool: MakePool) -> None:
        kwargs = make_pool(address.node_url(address.nodes[0])).connection_kwargs
        super().__init__(**{name: value for name, value in kwargs.items() if name not in ("host", "port")})
        self._address = address
        self._make_pool = make_pool
        self._nodes: dict[str, Node] = {}
        self._nodes_lock = threading.Lock()
        self._turn = 0
        #: Where connections to any node came from.
        self._origins: weakref.WeakKeyDictionary[Any, redis.ConnectionPool] = weakref.WeakKeyDictionary()
        self.slots = SlotMap(address.nodes, self._ask)

    def node(self, address: str) -> Node:
        """The client of the node at `host:port`."""
        node = self._nodes.get(address)
        if node is None:
            with self._nodes_lock:
                made = NodeClient(connection_pool=self._make_pool(self._address.node_url(address)))
                made.auto_close_connection_pool = True
                made.slots, made.address = self.slots, address
                node = self._nodes.setdefault(address, made)
        return node

    def any_node(self) -> Node:
        """A node that owns slots; another one after the last had failed."""
        primaries = self.slots.primaries()
        return self.node(primaries[self._turn % len(primaries)])

    def skip(self) -> None:
        """The node that serves for any failed."""
        self._turn += 1

    def _ask(self, address: str) -> list[Any]:
        node = self.node(address)
        kwargs = node.connection_pool.connection_kwargs
        patience_s = min(LOOK_S, kwargs["socket_timeout"])
        # A connection of its own: the pool's may all be busy, and with what hangs.
        connection = node.connection_pool.connection_class(
            **kwargs | {"socket_timeout": patience_s, "socket_connect_timeout": patience_s}
        )
        try:
            connection.connect()
            connection.send_command("CLUSTER", "SLOTS")
            rows: list[Any] = connection.read_response()
        finally:
            connection.disconnect()
        return rows

    def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> Any:  # noqa: ARG002
        """A connection to any node that can be reached."""
        for last in (*[False] * (len(self.slots.primaries()) - 1), True):
            pool = self.any_node().connection_pool
            try:
                connection = pool.get_connection()
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                self.skip()
                if last:
                    raise
            else:
                self._origins[connection] = pool
                return connection
        raise AssertionError("one of the tries is the last")

    def release(self, connection: Any) -> None:
        """The opposite."""
        self._origins.pop(connection).release(connection)

    def disconnect(self, inuse_connections: bool = True) -> None:
        """All connections to all nodes."""
        for node in list(self._nodes.values()):
            node.connection_pool.disconnect(inuse_connections)


class ClusterClient(redis.Redis):
    """`connection_pool` is a ClusterPools."""

    connection_pool: ClusterPools

    def node_of(self, key: str | bytes) -> Node:
        """The node that owns the key's slot, as far as known."""
        return self.connection_pool.node(self.connection_pool.slots.owner(key))

    def primaries(self) -> list[Node]:
        """All nodes that own slots."""
        return [self.connection_pool.node(address) for address in self.connection_pool.slots.primaries()]

    def redirected(self, error: redis.exceptions.AskError) -> Node:
        """The node that a reply refers to; MOVED is remembered, ASK holds for this command alone."""
        address = address_of(error.host, error.port)
        if isinstance(error, redis.exceptions.MovedError):
            self.connection_pool.slots.moved(error.slot_id, address)
        return self.connection_pool.node(address)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """As Redis.execute_command."""
        key = key_of(args)
        if key is not None:
            return self._follow(self.node_of(key), args, options)
        if str(args[0]).split()[0].upper() in EVERYWHERE:
            replies = [node.execute_command(*args, **options) for node in self.primaries()]
            return replies[0]
        node = self.connection_pool.any_node()
        try:
            return node.execute_command(*args, **options)
        except _FAILURES:
            self.connection_pool.skip()
            raise

    def _follow(self, node: Node, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        for _ in range(REDIRECTS):
            try:
                return node.execute_command(*args, **options)
            except redis.exceptions.AskError as error:
                node, asked = self.redirected(error), not isinstance(error, redis.exceptions.MovedError)
            if asked:
                with node.watched():
                    pipe = node.pipeline(transaction=False)
                    pipe.execute_command("ASKING")
                    pipe.execute_command(*args, **options)
                    # Not by the pipeline's own raising: that puts words of its own before the server's.
                    replies = pipe.execute(raise_on_error=False)
                _raise_first(replies)
                return replies[1]
        raise redis.exceptions.TryAgainError("TRYAGAIN the slot moves about")

    def scan_iter(self, *args: Any, **options: Any) -> Iterator[Any]:
        """As Redis.scan_iter, over all nodes. A key whose slot moves meanwhile may come twice, or not at all."""
        for node in self.primaries():
            yield from node.scan_iter(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> ClusterPipeline:
        """Commands that go out together, node by node; there are no transactions."""
        if transaction or shard_hint:
            raise TypeError("a pipeline over a cluster is no transaction")
        return ClusterPipeline(self)


class ClusterPipeline(redis.client.Pipeline):
    """One trip to each node that its commands concern. A command without a key goes with the one before it."""

    def __init__(self, client: ClusterClient) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction=False, shard_hint=None)
        self._client = client

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """As Pipeline.execute."""
        stack: list[Any] = self.command_stack
        replies: dict[int, Any] = {}
        self.reset()
        for node, positions in grouped(self._client, [args for args, _ in stack]).items():
            pipe = node.pipeline(transaction=False)
            for at in positions:
                args, options = stack[at]
                pipe.execute_command(*args, **options)
            with node.watched():
                replies |= zip(positions, pipe.execute(raise_on_error=False), strict=True)
        answers = [self._settled(command, replies[at]) for at, command in enumerate(stack)]
        if raise_on_error:
            _raise_first(answers)
        return answers

    def _settled(self, command: Any, reply: Any) -> Any:
        """The reply; from elsewhere when the key has moved."""
        if not isinstance(reply, redis.exceptions.AskError):
            return reply
        args, options = command
        try:
            return self._client.execute_command(*args, **options)
        except redis.exceptions.ResponseError as error:
            return error


def _raise_first(answers: list[Any]) -> None:
    for answer in answers:
        if isinstance(answer, redis.exceptions.ResponseError):
            raise answer


def grouped(client: ClusterClient, commands: list[Any]) -> dict[Node, list[int]]:
    """The commands' positions by the node each goes to, in order. What a node answers for itself, as its time, is asked
    of the node of the command before; by itself, of any."""
    groups: dict[Node, list[int]] = {}
    node: Node | None = None
    for at, command in enumerate(commands):
        key = None if command[0] in ("TIME", "PUBLISH") else key_of(command)
        if key is not None:
            node = client.node_of(key)
        elif node is None:
            node = client.connection_pool.any_node()
        groups.setdefault(node, []).append(at)
    return groups


def cluster_client(address: ClusterAddress, make_pool: MakePool) -> ClusterClient:
    """A client of the cluster; it connects on first use."""
    client = ClusterClient(connection_pool=ClusterPools(address, make_pool))
    client.auto_close_connection_pool = True
    return client

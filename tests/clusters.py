"""Redis Clusters of real servers on loopback ports, made without any tool but the servers themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from pool.store.connection import Client, connect
from pool.store.server import StateServer
from pool.store.slot_map import slot_of
from tests.processes import free_port
from tests.waiting import wait_until


class ClusterNode:
    """One server of a cluster, and a client that talks to it alone."""

    def __init__(self, folder: Path, arguments: Sequence[str] = ()) -> None:
        self.bus_port = free_port()
        # Without its own number the cluster port is the server's plus 10,000, which is none for a high port.
        own = ["--cluster-enabled", "yes", "--cluster-port", str(self.bus_port), *arguments]
        self.server = StateServer(folder, port=0, extra_args=own)
        self.address = self.server.url.removeprefix("redis://").removesuffix("/0")
        self.client: Client = connect(self.server.url)

    @property
    def id(self) -> str:
        """What the other nodes call it."""
        return str(self.client.execute_command("CLUSTER", "MYID").decode())

    def cluster(self, *words: Any) -> Any:
        """A CLUSTER command."""
        return self.client.execute_command("CLUSTER", *words)


class StateCluster:
    """`primaries` nodes that own all slots between them, and `replicas` of the first ones."""

    def __init__(self, folder: Path, *, primaries: int = 3, replicas: int = 0, arguments: Sequence[str] = ()) -> None:
        self.nodes = [ClusterNode(folder / f"node-{at}", arguments) for at in range(primaries + replicas)]
        self.primaries, self.replicas = self.nodes[:primaries], self.nodes[primaries:]
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """As `state.url` names it."""
        return f"redis+cluster://{','.join(node.address for node in self.nodes)}"

    @property
    def pid(self) -> int:
        """The process that has the slots of the tests' model."""
        return self.owner("{tiny:0}").server.pid

    def start(self) -> None:
        """Start the servers, make them one cluster, and wait until all of them know it."""
        for node in self.nodes:
            self._stack.enter_context(node.server)
            self._stack.callback(node.client.connection_pool.disconnect)
        share = -(-REDIS_CLUSTER_HASH_SLOTS // len(self.primaries))
        for at, node in enumerate(self.primaries):
            node.cluster("ADDSLOTSRANGE", at * share, min((at + 1) * share, REDIS_CLUSTER_HASH_SLOTS) - 1)
            # Nodes that meet with the same epoch argue about it first.
            node.cluster("SET-CONFIG-EPOCH", at + 1)
        host, port = self.nodes[0].address.split(":")
        for node in self.nodes[1:]:
            node.cluster("MEET", host, port, self.nodes[0].bus_port)
        for replica, primary in zip(self.replicas, self.primaries, strict=False):
            self._replicate(replica, primary)
        wait_until(self._is_whole, description="the cluster to be up")

    def close(self) -> None:
        """Stop all servers."""
        self._stack.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def owner(self, key: str) -> ClusterNode:
        """The node that owns the slot of a key, as the first node that answers sees it."""
        slot = slot_of(key)
        for first, last, (_, port, *_), *_ in self._slots():
            if first <= slot <= last:
                return next(node for node in self.nodes if node.address.endswith(f":{int(port)}"))
        raise LookupError(f"no node owns the slot of {key}")

    def _slots(self) -> Any:
        for node in self.nodes:
            with contextlib.suppress(redis.exceptions.ConnectionError):
                return node.cluster("SLOTS")
        raise LookupError("no node answers")

    def move(self, key: str, target: ClusterNode) -> None:
        """Give the slot of `key` with all its keys to another node, key by key, as resharding tools do."""
        source, slot = self.owner(key), slot_of(key)
        self.begin_move(key, target)
        while keys := source.cluster("GETKEYSINSLOT", slot, 10):
            self.migrate(source, target, *keys)
        for node in (target, source, *self.primaries):
            node.cluster("SETSLOT", slot, "NODE", target.id)

    def begin_move(self, key: str, target: ClusterNode) -> None:
        """From now on keys of the slot may be at either node: the old one answers ASK for those it does not have."""
        source, slot = self.owner(key), slot_of(key)
        target.cluster("SETSLOT", slot, "IMPORTING", source.id)
        source.cluster("SETSLOT", slot, "MIGRATING", target.id)

    def migrate(self, source: ClusterNode, target: ClusterNode, *keys: bytes | str) -> None:
        """Move these keys of a slot that is being moved."""
        host, port = target.address.split(":")
        source.client.execute_command("MIGRATE", host, port, "", 0, 5000, "KEYS", *keys)

    def _replicate(self, replica: ClusterNode, primary: ClusterNode) -> None:
        wait_until(lambda: primary.id.encode() in replica.cluster("NODES"), description="the replica to know it")
        replica.cluster("REPLICATE", primary.id)

    def _is_whole(self) -> bool:
        """All nodes say that all slots are served, by the same nodes, and that their replicas follow."""
        views = [sorted((row[0], row[1], len(row)) for row in node.cluster("SLOTS")) for node in self.nodes]
        up = all(b"cluster_state:ok" in node.cluster("INFO") for node in self.nodes)
        following = all(replica.client.info("replication")["master_link_status"] == "up" for replica in self.replicas)
        return up and following and all(view == views[0] for view in views) and len(views[0]) == len(self.primaries)

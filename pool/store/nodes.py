"""The servers behind a client: one, or the nodes of a cluster. For what a server answers for itself: its clock, its
memory, its connections, all its keys."""

from __future__ import annotations

from pool.store.cluster_client import ClusterClient
from pool.store.connection import Client


def node_of(client: Client, key: str) -> Client:
    """The server that has the key. In a cluster it may have just moved: commands on keys go to the client itself."""
    return client.node_of(key) if isinstance(client, ClusterClient) else client


def nodes(client: Client) -> list[Client]:
    """All servers that have keys."""
    return list(client.primaries()) if isinstance(client, ClusterClient) else [client]


def name_of(client: Client, node: Client) -> str:
    """What to call one of several servers in a message: its address; "" for the only one."""
    if not isinstance(client, ClusterClient):
        return ""
    kwargs = node.connection_pool.connection_kwargs
    return f"{kwargs['host']}:{kwargs['port']}"


def server_ms(client: Client, key: str) -> int:
    """The clock of the server that has the key."""
    seconds, micros = node_of(client, key).time()
    return int(seconds * 1000 + micros // 1000)

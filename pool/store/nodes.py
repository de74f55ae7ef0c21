"""The servers behind a client: one, or the nodes of a cluster. For what a server answers for itself: its clock, its
memory, its connections, all its keys."""

from __future__ import annotations

import redis

from pool.store.cluster_client import ClusterClient
from pool.store.connection import Client


def node_of(client: Client, key: str) -> Client:
    """The server that has the key. In a cluster it may have just moved: commands on keys go to the client itself."""
    return client.node_of(key) if isinstance(client, ClusterClient) else client


def same_node(client: Client, node: Client) -> Client:
    """A server that another client talks to, as this one does."""
    return client.connection_pool.node(node.address) if isinstance(client, ClusterClient) else client


def learn(client: Client, error: redis.exceptions.AskError) -> None:
    """A node said that a key is elsewhere. Raises `error` where there is but one."""
    if not isinstance(client, ClusterClient):
        raise error
    client.redirected(error)


def nodes(client: Client) -> list[Client]:
    """All servers that have keys."""
    return list(client.primaries()) if isinstance(client, ClusterClient) else [client]


def is_spread(client: Client) -> bool:
    """Whether models may be on different servers, so that one being away says nothing of the others."""
    return isinstance(client, ClusterClient)


def name_of(client: Client, node: Client) -> str:
    """What to call one of several servers in a message: its address; "" for the only one."""
    return node.address if isinstance(client, ClusterClient) else ""


def server_ms(client: Client, key: str) -> int:
    """The clock of the server that has the key."""
    seconds, micros = node_of(client, key).time()
    return int(seconds * 1000 + micros // 1000)

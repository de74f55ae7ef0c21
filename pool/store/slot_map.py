"""Which node of a Redis Cluster owns which slot, and which key says where a command goes.

Nothing is asked before it is needed, so a process starts while the cluster is away, as it does with a single server.
What was learnt holds until a node says otherwise (MOVED) or fails; then the next call asks again, another node first.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from pool.state_settings import CLUSTER_URL

#: After a look at the cluster, none follows for this long: while one node is away, calls to the others need no look.
LOOK_AGAIN_S = 0.25
#: Commands without a key that any node serves alike.
ANYWHERE = frozenset({"PUBLISH", "PING", "ECHO"})
#: Those that mean the whole cluster: every node that owns slots gets them.
EVERYWHERE = frozenset({"FLUSHALL", "SCRIPT", "CONFIG", "ACL"})
#: Those whose key comes behind the name of a subcommand, where that is an argument of its own.
_SUBCOMMANDS = frozenset({"XGROUP", "XINFO", "OBJECT", "MEMORY"})
#: Those without a key whose answer is a node's own.
_OF_A_NODE = frozenset({"TIME", "INFO", "ROLE", "CLIENT", "CLUSTER", "SCAN", "KEYS", "DBSIZE", "RANDOMKEY", "WAIT"})


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """A cluster's URL, in parts: some of its nodes as `host:port`, and what goes before and behind in a node's URL."""

    nodes: tuple[str, ...]
    before: str
    behind: str

    def node_url(self, address: str) -> str:
        """One node's URL in redis-py's form."""
        return f"{self.before}{address}{self.behind}"


def cluster_address(url: str) -> ClusterAddress | None:
    """The parts of `redis+cluster://[user:password@]host:port,host:port/?options` (rediss: TLS); None for any other."""
    found = re.fullmatch(CLUSTER_URL, url)
    if found is None:
        return None
    return ClusterAddress(tuple(found["nodes"].split(",")), f"{found['tls']}://{found['user'] or ''}", found["options"])


def key_of(command: Sequence[Any]) -> str | bytes | None:
    """The first key of a command, None where it has none. TypeError for one that only a node can answer: name one
    (pool/store/nodes.py)."""
    name, _, subcommand = str(command[0]).upper().partition(" ")
    if name in ("EVALSHA", "EVAL"):
        return _text(command[3]) if int(command[2]) else None
    if name in ("XREADGROUP", "XREAD"):
        at = next(i for i, word in enumerate(command) if word in (b"STREAMS", "STREAMS"))
        return _text(command[at + 1])
    if name in ANYWHERE or name in EVERYWHERE:
        return None
    if name in _OF_A_NODE:
        raise TypeError(f"{name} is answered by a node of the cluster: name one by a key")
    return _text(command[2 if name in _SUBCOMMANDS and not subcommand else 1])


def _text(key: Any) -> str | bytes:
    return key if isinstance(key, bytes) else str(key)


def slot_of(key: str | bytes) -> int:
    """The slot of a key."""
    slot: int = key_slot(key if isinstance(key, bytes) else key.encode())
    return slot


#: Asks a node, `host:port`, for CLUSTER SLOTS. Raises what the client library raises.
Ask = Callable[[str], list[Any]]


class SlotMap:
    """Thread-safe. Nodes are named `host:port`."""

    def __init__(self, seeds: Sequence[str], ask: Ask) -> None:
        self._seeds = tuple(seeds)
        self._ask = ask
        self._lock = threading.Lock()
        self._owners: list[str] = []
        self._known: tuple[str, ...] = ()
        self._suspect = ""
        self._doubted = True
        self._looked_s = float("-inf")
        self._failure: Exception | None = None

    def owner(self, key: str | bytes) -> str:
        """The node that owns the key's slot. Raises redis-py's ClusterDownError where none does, and ConnectionError
        when no node answers."""
        owner = self._looked()[slot_of(key)]
        if not owner:
            self.doubt("")
            raise redis.exceptions.ClusterDownError("CLUSTERDOWN no node owns the slot")
        return owner

    def primaries(self) -> list[str]:
        """The nodes that own slots, in the order of their first slots."""
        return list(dict.fromkeys(filter(None, self._looked())))

    def moved(self, slot: int, address: str) -> None:
        """A node says that another one owns the slot. It knows; others, if asked for all slots, may not know yet."""
        with self._lock:
            self._known = tuple(dict.fromkeys([*self._known, address]))
            if self._owners:
                self._owners[slot] = address

    def doubt(self, address: str) -> None:
        """A node failed, or says that the cluster is down: it may have lost its slots."""
        with self._lock:
            self._suspect = address or self._suspect
            self._doubted = True

    def _looked(self) -> list[str]:
        if not self._doubted:
            return self._owners
        asked_s = time.monotonic()
        with self._lock:
            # Whoever waited for a look need not look again, whatever it brought.
            if self._doubted and (self._looked_s < asked_s - LOOK_AGAIN_S):
                self._look()
            if not self._owners:
                assert self._failure is not None, "a look brings owners or a failure"
                raise redis.exceptions.ConnectionError("no node of the cluster answers") from self._failure
            return self._owners

    def _look(self) -> None:
        """Ask one node after the other, one that failed last, until one tells."""
        nodes = dict.fromkeys([*self._known, *self._seeds])
        for address in sorted(nodes, key=lambda node: node == self._suspect):
            try:
                self._learn(address, self._ask(address))
            except (redis.exceptions.RedisError, OSError) as error:
                self._failure = error
            else:
                self._doubted, self._suspect = False, ""
                break
        self._looked_s = time.monotonic()

    def _learn(self, asked: str, rows: list[Any]) -> None:
        """`rows`: [first slot, last slot, [host, port, ...] of the primary, of replicas ...] each."""
        owners = [""] * REDIS_CLUSTER_HASH_SLOTS
        known: dict[str, None] = {}
        for first, last, *nodes in rows:
            addresses = [_address(node, asked) for node in nodes]
            owners[first : last + 1] = [addresses[0]] * (last + 1 - first)
            known |= dict.fromkeys(addresses)
        if not known:
            raise redis.exceptions.ClusterDownError("CLUSTERDOWN no node owns any slot")
        self._owners, self._known = owners, tuple(known)


def _address(node: list[Any], asked: str) -> str:
    """A node that does not know its own host is known by the name it was asked under."""
    host = (node[0] or b"").decode() or asked.rpartition(":")[0]
    return address_of(host, int(node[1]))


def address_of(host: str, port: int) -> str:
    """`host:port`, with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"

"""The memory gate: new jobs are refused before the state server is full, so that running ones can still end."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pool.errors import StateUnavailable
from pool.store.connection import Client, state_errors
from pool.store.nodes import node_of, nodes

#: Share of `maxmemory` above which no new job is accepted.
FULL_SHARE = 0.85
#: How long a measurement is used.
FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Memory:
    """The server's memory; `limit_bytes`: its `maxmemory`, 0 for none."""

    used_bytes: int
    limit_bytes: int

    @property
    def share(self) -> float | None:
        """The part of the limit that is in use; None without a limit."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else None


def memory_of(server: Client) -> Memory:
    """Ask a server; of a cluster, one of its nodes. Raises StateUnavailable."""
    with state_errors():
        found = server.info("memory")
    return Memory(int(found["used_memory"]), int(found.get("maxmemory", 0)))


def memories(client: Client) -> list[Memory]:
    """Of all servers that have keys. Raises StateUnavailable."""
    with state_errors():
        servers = nodes(client)
    return [memory_of(server) for server in servers]


class MemoryGate:
    """Looks at a server's memory at most once a second."""

    def __init__(self, client: Client) -> None:
        self._client = client
        #: Share in use, and when that was, by server.
        self._measured: dict[Client, tuple[float, float]] = {}

    def refusal(self, key: str) -> StateUnavailable | None:
        """Why no new job is taken: more than 85 % of `maxmemory` are in use where the key is. Without a limit there is
        never a reason.

        Raises StateUnavailable when the server cannot be asked.
        """
        now_s = time.monotonic()
        with state_errors():
            server = node_of(self._client, key)
        share, measured_s = self._measured.get(server, (0.0, float("-inf")))
        if now_s - measured_s > FRESH_S:
            share = memory_of(server).share or 0.0
            self._measured[server] = (share, now_s)
        if share <= FULL_SHARE:
            return None
        return StateUnavailable(
            f"The state server uses {share:.0%} of its memory; new jobs are accepted below {FULL_SHARE:.0%}.",
            code="state_memory_full",
        )

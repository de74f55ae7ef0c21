"""The memory gate: new jobs are refused before the state server is full, so that running ones can still end."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pool.errors import StateUnavailable
from pool.store.connection import Client, state_errors

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


def memory_of(client: Client) -> Memory:
    """Ask the server. Raises StateUnavailable."""
    with state_errors():
        found = client.info("memory")
    return Memory(int(found["used_memory"]), int(found.get("maxmemory", 0)))


class MemoryGate:
    """Looks at the server's memory at most once a second."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._share = 0.0
        self._measured_s = float("-inf")

    def refusal(self) -> StateUnavailable | None:
        """Why no new job is taken: more than 85 % of `maxmemory` are in use. Without a limit there is never a reason.

        Raises StateUnavailable when the server cannot be asked.
        """
        now_s = time.monotonic()
        if now_s - self._measured_s > FRESH_S:
            self._share = memory_of(self._client).share or 0.0
            self._measured_s = now_s
        if self._share <= FULL_SHARE:
            return None
        return StateUnavailable(
            f"The state server uses {self._share:.0%} of its memory; new jobs are accepted below {FULL_SHARE:.0%}.",
            code="state_memory_full",
        )

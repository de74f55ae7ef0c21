"""The state server's clock as seen from here: what must not happen late is given a last moment by that clock. In a
cluster each node has its own; the one that counts is that of the node which has the job."""

from __future__ import annotations

import time

from pool.store.connection import Client, state_errors
from pool.store.keys import ModelKeys
from pool.store.nodes import server_ms


class ServerClock:
    """Goes on from what the server said last. It is a little behind the server's own, by the way of a reply, and wrong
    after the server's was set, until the next reply. Thread-safe: any reply is as good as another."""

    def __init__(self, client: Client) -> None:
        self._client = client
        #: What was said last, and when by our own clock, by model.
        self._told: dict[str, tuple[int, float]] = {}

    def ask(self, keys: ModelKeys) -> None:
        """Ask the model's server, unless it was heard before. Raises StateUnavailable."""
        if keys.tag not in self._told:
            with state_errors():
                at_ms = server_ms(self._client, keys.queue)
            self.told(keys, at_ms)

    def told(self, keys: ModelKeys, at_ms: int) -> None:
        """A reply, just come, says that this is the server's time."""
        self._told[keys.tag] = (at_ms, time.monotonic())

    def now_ms(self, keys: ModelKeys) -> int:
        """The server's time; `ask` comes first."""
        at_ms, heard_s = self._told[keys.tag]
        return at_ms + int((time.monotonic() - heard_s) * 1000)

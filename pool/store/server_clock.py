"""The state server's clock as seen from here: what must not happen late is given a last moment by that clock."""

from __future__ import annotations

import time

from pool.store.connection import Client, state_errors


class ServerClock:
    """Goes on from what the server said last. It is a little behind the server's own, by the way of a reply, and wrong
    after the server's was set, until the next reply. Thread-safe: any reply is as good as another."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._told: tuple[int, float] | None = None

    def ask(self) -> None:
        """Ask the server, unless it was heard before. Raises StateUnavailable."""
        if self._told is None:
            with state_errors():
                seconds, micros = self._client.time()
            self.told(seconds * 1000 + micros // 1000)

    def told(self, at_ms: int) -> None:
        """A reply, just come, says that this is the server's time."""
        self._told = (at_ms, time.monotonic())

    def now_ms(self) -> int:
        """The server's time; `ask` comes first."""
        assert self._told is not None, "the server was never asked"
        at_ms, heard_s = self._told
        return at_ms + int((time.monotonic() - heard_s) * 1000)

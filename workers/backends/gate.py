"""Whether a server takes requests now. Shut while it is away, or for as long as it asks to be left alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from workers.backends.failures import Away, Busy, UpstreamFailure

#: Waits after a refusal that names no time, and between two looks at a server that is away.
FIRST_WAIT_S = 0.25
MAX_WAIT_S = 8.0


def backoff_s(failures: int) -> float:
    """How long to wait after so many failures in a row (>= 1): twice as long each time, and not all at once."""
    most_s = min(FIRST_WAIT_S * 2.0 ** min(failures - 1, 30), MAX_WAIT_S)
    return most_s * random.uniform(0.5, 1.0)


class Gate:
    """For the runner's thread, except for `reason`. `look`: called when the server was found away, for somebody to find
    out when it is back (`open`), after so many seconds at first."""

    def __init__(self, look: Callable[[float], None], clock: Callable[[], float]) -> None:
        self._look = look
        self._clock = clock
        self._open = asyncio.Event()
        self._open.set()
        self._until_s = 0.0
        self._refusals = 0
        #: Why it is shut, None while it is open. Read by any thread.
        self.reason: UpstreamFailure | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent."""
        return self.reason is None

    def shut(self, failure: Away | Busy) -> None:
        """A request was refused without any fault of its own."""
        if isinstance(failure, Away):
            if not isinstance(self.reason, Away):
                self._refusals += 1
                self._look(backoff_s(self._refusals))
            self.reason = failure
            self._open.clear()
        elif self.reason is None:
            self._refusals += 1
            wait_s = backoff_s(self._refusals) if failure.retry_after_s is None else failure.retry_after_s
            self._until_s = self._clock() + wait_s
            self.reason = failure
            self._open.clear()

    def open(self) -> None:
        """The server serves."""
        self.reason = None
        self._open.set()

    def served(self) -> None:
        """A request was taken."""
        self._refusals = 0

    def check(self) -> None:
        """Open it when the time has come that the server named."""
        if isinstance(self.reason, Busy) and self._clock() >= self._until_s:
            self.open()

    async def wait(self) -> None:
        """Until it is open."""
        await self._open.wait()

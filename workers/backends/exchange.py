"""One request to a server and its answer, event by event, until it is over or nobody wants more of it.

Hanging up: the connection is shut for writing, and read (and dropped) until the server closes it. So whoever counts
requests at the server never sees one more than there are slots. A server that does not close in time is cut off.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import httpx2

from workers.backends.dialect import Ask, Dialect, News
from workers.backends.endpoint import Endpoint, Slot
from workers.backends.failures import Away, Broken, UpstreamFailure, failure_of_status, invalid_answer

#: How long a server may take to notice that nobody wants more.
CLOSE_S = 3.0
#: An error's body is read so far.
MAX_ERROR_BYTES = 65_536
#: The longest answer in one piece.
MAX_WHOLE_BYTES = 8 * 2**20

#: Takes what an event tells. In the runner's thread.
Take = Callable[[News], Awaitable[None]]


class Exchange:
    """Created and used in the runner's thread."""

    def __init__(self, endpoint: Endpoint, dialect: Dialect, slot: Slot) -> None:
        self._endpoint = endpoint
        self._dialect = dialect
        self._slot = slot
        self._hung_up_s: float | None = None
        self.heard_s = time.monotonic()
        #: Whether the server has told a token.
        self.spoke = False
        self.failure: UpstreamFailure | None = None

    @property
    def hung_up(self) -> bool:
        """Whether nobody wants more of it."""
        return self._hung_up_s is not None

    def hang_up(self, failure: UpstreamFailure | None = None) -> None:
        """Want no more of it; `failure`: which `run` then raises."""
        if self._hung_up_s is None:
            self._hung_up_s = time.monotonic()
            self.failure = failure
            self._slot.shut()

    def check(self, now_s: float, *, first_s: float, stall_s: float) -> None:
        """Hang up on a server that is silent for too long, and cut one off that does not hang up."""
        if self._hung_up_s is not None:
            if now_s - self._hung_up_s > CLOSE_S:
                self._slot.cut()
        elif now_s - self.heard_s > (stall_s if self.spoke else first_s):
            self.hang_up(Broken("The upstream server was silent for too long.", code="upstream_stalled"))

    async def run(self, ask: Ask, take: Take) -> None:
        """Send, and take what comes until it is over. Returns early where somebody hung up. Raises UpstreamFailure."""
        found: UpstreamFailure | None = None
        try:
            await self._run(ask, take)
        except UpstreamFailure as error:
            found = error
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError):
            found = Away("The upstream server cannot be reached.")
        except httpx2.SSEError:
            found = invalid_answer("it is no stream of events")
        except httpx2.DecodingError:
            found = invalid_answer("its encoding is broken")
        except httpx2.TransportError:
            found = Broken("The connection to the upstream server was lost.", code="upstream_lost")
        if self.hung_up:
            # What happens to a connection after that is nobody's failure.
            found = self.failure
            await self._slot.close()
        if found is not None:
            raise found

    async def _run(self, ask: Ask, take: Take) -> None:
        request = self._slot.client.stream(
            "POST",
            self._endpoint.url(ask.path),
            json=ask.body,
            headers=self._endpoint.headers,
            extensions={"trace": self._slot.trace},
        )
        async with request as response:
            if response.status_code != 200:
                raise await _failure_of(response)
            if ask.whole:
                await take(self._dialect.read(await _text_of(response)))
                return
            over = False
            async for event in httpx2.EventSource(response):
                if self.hung_up or over:
                    # To its end: until then the server counts it, and the connection is not free.
                    continue
                news = self._dialect.read(event.data)
                self.heard_s = time.monotonic()
                self.spoke = self.spoke or bool(news.token_ids or news.text)
                over = news.over
                await take(news)


async def _failure_of(response: httpx2.Response) -> UpstreamFailure:
    """What an answer without success means; only the beginning of its body is read."""
    body = b""
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_ERROR_BYTES:
            break
    return failure_of_status(response.status_code, body, response.headers.get("retry-after"), now_s=time.time())


async def _text_of(response: httpx2.Response) -> str:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_WHOLE_BYTES:
            raise invalid_answer("it is too long")
    return body.decode("utf-8", "replace")

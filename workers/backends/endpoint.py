"""Where a server over HTTP is, and the connections to it: a slot for each request that may be in flight."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2

from pool.errors import ConfigurationError

# It tells of every request.
logging.getLogger("httpx2").setLevel(logging.WARNING)

CONNECT_S = 5.0
WRITE_S = 30.0
#: Unused connections are closed after this; one that the server closed first is noticed before it is used.
KEEP_ALIVE_S = 30.0
#: A question about health or figures shall be answered in this time.
PROBE_S = 2.0
LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class Endpoint:
    """`base`: the API's base URL, which usually ends with /v1; `key`: sent as a bearer token; `rank`: which of the
    ranks behind the URL is meant, None where there is one."""

    base: str
    key: str = ""
    rank: int | None = None
    #: Whether the environment may name a proxy for it.
    trust_env: bool = True
    _context: ssl.SSLContext | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def url(self, path: str) -> str:
        """Below the base, or below the server's root for a path that begins with a slash."""
        return self.base.removesuffix("/v1") + path if path.startswith("/") else f"{self.base}/{path}"

    @property
    def headers(self) -> dict[str, str]:
        """Of each request."""
        found = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return found if self.rank is None else found | {"X-data-parallel-rank": str(self.rank)}

    def open(self) -> httpx2.AsyncClient:
        """A client of one connection. What a server takes to answer, somebody else bounds."""
        return httpx2.AsyncClient(
            limits=httpx2.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_ALIVE_S),
            timeout=httpx2.Timeout(None, connect=CONNECT_S, write=WRITE_S),
            verify=self._ssl(),
            trust_env=self.trust_env,
        )

    def probe(self) -> httpx2.Client:
        """A client for short questions, from any thread."""
        return httpx2.Client(timeout=PROBE_S, verify=self._ssl(), trust_env=self.trust_env, headers=self.headers)

    def _ssl(self) -> ssl.SSLContext | bool:
        """One for all: making one reads all the certificates, which takes longer than many a request. Without TLS there
        is nothing to verify, as no redirect is followed."""
        if not self.base.startswith("https:"):
            return False
        with self._lock:
            if self._context is None:
                self._context = httpx2.create_ssl_context(trust_env=self.trust_env)
            return self._context


def key_of(variable: str) -> str:
    """The key that an environment variable holds. Raises ConfigurationError for one that is not set."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigurationError(f"The variable {variable} is not set.", param="upstream.api_key_env")
    if not (key.isascii() and key.isprintable()):
        raise ConfigurationError(f"The variable {variable} holds no key.", param="upstream.api_key_env")
    return key


class Slot:
    """A place for one request at a time, with a connection of its own. For the runner's thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client: httpx2.AsyncClient | None = None
        self._stream: Any = None
        #: How the connection is to be shut, also one that is still being made.
        self._shut: int | None = None

    @property
    def client(self) -> httpx2.AsyncClient:
        """Opened when it is first used."""
        if self._client is None:
            self._client = self._endpoint.open()
        return self._client

    async def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Told by the client what it does: so its connection is known before anything was answered on it."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._stream = info["return_value"]
            if self._shut is not None:
                self._shut_down(self._shut)

    def shut(self) -> None:
        """Let the server see that nobody wants more on this connection; it is still read until the server closes."""
        self._shut_down(socket.SHUT_WR)

    def cut(self) -> None:
        """Do not wait for the server: whoever reads finds the end."""
        self._shut_down(socket.SHUT_RDWR)

    def _shut_down(self, how: int) -> None:
        self._shut = how
        found = None if self._stream is None else self._stream.get_extra_info("socket")
        if found is not None:
            with suppress(OSError):
                found.shutdown(how)

    async def close(self) -> None:
        """Close the connection; the next request makes another."""
        client, self._client, self._stream, self._shut = self._client, None, None, None
        if client is not None:
            await client.aclose()


class Slots:
    """As many slots as requests may be in flight, handed out in the order of asking. For the runner's thread."""

    def __init__(self, endpoint: Endpoint, limit: int) -> None:
        self._endpoint = endpoint
        self._limit = limit
        self._free: list[Slot] = []
        self._taken = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def taken(self) -> int:
        """Requests in flight, those that are being hung up included."""
        return self._taken

    def resize(self, limit: int) -> None:
        """More, or fewer; those in use are not taken away."""
        self._limit = limit
        self._wake()

    async def acquire(self) -> Slot:
        """Wait for one."""
        if self._waiters or self._taken >= self._limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._taken -= 1
                    self._wake()
                raise
        else:
            self._taken += 1
        return self._free.pop() if self._free else Slot(self._endpoint)

    def release(self, slot: Slot) -> None:
        """Give it back."""
        self._free.append(slot)
        self._taken -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiters and self._taken < self._limit:
            turn = self._waiters.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)

    async def close(self) -> None:
        """Close all connections that are not in use."""
        while self._free:
            await self._free.pop().close()

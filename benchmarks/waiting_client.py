"""Many clients in one process: requests that wait for their answers, at one API, answering a benchmark's dialogue.

    python -m benchmarks.waiting_client PORT MODEL

| line in | what it does | line out |
|---|---|---|
| `open N` | sends N synchronous requests and N for streams, in turn | how many connections are open |
| `answers N` | waits until N answers have come, or nothing has for some seconds | list of answers, then forgotten |

An answer is `[job's token, "sync" or "stream", monotonic time in ns, whether it is the right one]`: status 200, and the
text that the worker gives to just this job. A stream's answer is its last event. A connection that ends before its
answer is one with an empty token.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from functools import partial
from typing import Any

from benchmarks.peers.dialogue import answer_text

#: No answer for this long: there will be none. Longer than the slowest poll that stands in for a lost hint.
SILENCE_S = 15.0
#: Between two requests: an API that starts a thread for each accepts them without a backlog.
PAUSE_S = 0.002
HOST = "127.0.0.1"
LAST_EVENT = b"event: response.completed\ndata: "

Answer = tuple[str, str, int, bool]


class Connection(asyncio.Protocol):
    """One request and its answer, after which the connection is closed."""

    def __init__(self, request: bytes, kind: str, answers: list[Answer]) -> None:
        self._request = request
        self._kind = kind
        self._answers = answers
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Take the answer when it is complete."""
        self._received += data
        final = self._final()
        if final is not None and not self._answered:
            self._take(json.loads(final), time.monotonic_ns())

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        """An end without an answer is a wrong answer."""
        if not self._answered:
            self._answered = True
            self._answers.append(("", self._kind, time.monotonic_ns(), False))

    def _final(self) -> bytes | None:
        """The JSON of the answer, None while it is not complete."""
        if self._kind == "stream":
            _, found, rest = self._received.partition(LAST_EVENT)
            final, ended, _ = rest.partition(b"\n\n")
            return bytes(final) if found and ended else None
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return None
        _, _, length = head.lower().partition(b"content-length:")
        return bytes(body) if len(body) >= int(length.split(b"\r\n")[0]) else None

    def _take(self, final: dict[str, Any], at_ns: int) -> None:
        self._answered = True
        shown = final.get("response", final)
        token = str(shown.get("id", "")).rpartition("_")[2]
        right = self._received.startswith(b"HTTP/1.1 200 ") and answer_text(token) in json.dumps(shown)
        self._answers.append((token, self._kind, at_ns, right))
        assert self._transport is not None
        self._transport.close()


class Clients:
    """All connections to one API. Its methods run in the event loop's thread."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._requests = {kind: _request(port, model, kind) for kind in ("sync", "stream")}
        self._answers: list[Answer] = []
        self._open = 0

    async def open(self, count: int) -> int:
        """Send `count` requests of each kind."""
        loop = asyncio.get_running_loop()
        for number in range(2 * count):
            kind = ("sync", "stream")[number % 2]
            make = partial(Connection, self._requests[kind], kind, self._answers)
            await loop.create_connection(make, HOST, self._port)
            self._open += 1
            await asyncio.sleep(PAUSE_S)
        return self._open

    async def answers(self, count: int) -> list[Answer]:
        """At least `count` answers, fewer when no more come."""
        seen, heard_s = 0, time.monotonic()
        while len(self._answers) < count and time.monotonic() - heard_s < SILENCE_S:
            if len(self._answers) > seen:
                seen, heard_s = len(self._answers), time.monotonic()
            await asyncio.sleep(0.01)
        taken = self._answers[:]
        del self._answers[: len(taken)]
        self._open -= len(taken)
        return taken


def _request(port: int, model: str, kind: str) -> bytes:
    body = json.dumps({"model": model, "input": "Wait", "stream": kind == "stream"})
    head = f"POST /v1/responses HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def main() -> None:
    """Answer until the input ends."""
    port, model = sys.argv[1:]
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    clients = Clients(int(port), model)
    for line in sys.stdin:
        word, count = line.split()
        step = clients.open if word == "open" else clients.answers
        print(json.dumps(asyncio.run_coroutine_threadsafe(step(int(count)), loop).result()), flush=True)


if __name__ == "__main__":
    main()

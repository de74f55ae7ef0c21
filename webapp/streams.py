"""One job's stream to one client: views in, server-sent events out, until the job's end or the connection's.

| event | what happens |
|---|---|
| news | the renderer turns it into events |
| nothing to say at first, or for `keepalive_seconds` | a comment line: headers go out with the first line |
| the client is gone | the job is cancelled if it was this request's own plain stream, else it goes on |
| the process is to end | the connection breaks (Responses: continue elsewhere), or an error in band (chat) |
| the job was deleted | it ends as a cancelled one does |
| the job is gone, or cannot be read | an error in band |
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from typing import Protocol

from flask import Response, request

from pool.errors import GenpoolError, JobErased
from pool.store.jobs import View
from webapp.node import Node
from webapp.rendering import sse
from webapp.sockets import client_gone
from webapp.waits import Waiter

TICK_S = 1.0
#: A client that takes nothing of what is sent for this long is cut.
SEND_TIMEOUT_S = 60.0


class Renderer(Protocol):
    """Turns a job's views into events of a dialect."""

    @property
    def ended(self) -> bool:
        """Whether the last event was given."""
        ...

    def feed(self, view: View) -> Iterator[str]: ...

    def failure(self, error: GenpoolError) -> Iterator[str]: ...

    def cut(self) -> Iterator[str]:
        """Last words when the process ends; without any, the connection breaks."""
        ...


class JobStream:
    """The body of a streaming response, holding a waiting place. `close` is called in every case, also when nothing was
    ever sent."""

    def __init__(
        self,
        node: Node,
        waiter: Waiter,
        first: View,
        renderer: Renderer,
        *,
        cancels: bool,
        sock: socket.socket | None,
    ) -> None:
        self._node = node
        self._waiter = waiter
        self._renderer = renderer
        self._cancels = cancels
        self._sock = sock
        self._closed = False
        self._cut = False
        self._seen = first
        self._chunks = self._run(first)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._chunks)

    def close(self) -> None:
        """Give back what the stream holds; an own plain stream that was left early cancels its job. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._node.places.give_back()
        self._waiter.close()
        if self._cut:
            # This node ends, the job goes on, and may be read elsewhere.
            self._node.waits.let_go(self._waiter.ref)
            return
        if self._renderer.ended:
            return
        if self._cancels:
            self._node.waits.abandon(self._waiter.ref)
        else:
            self._node.waits.unwatch(self._waiter)

    def _run(self, first: View) -> Iterator[bytes]:
        if self._sock is not None:
            self._sock.settimeout(SEND_TIMEOUT_S)
        try:
            opening = self._frames(self._renderer.feed(first))
            yield next(opening, sse.KEEP_ALIVE.encode())
            yield from opening
            yield from self._follow()
        except JobErased:
            seen = self._seen
            record = seen.record.deleted(seen.entries[-1].next_seq if seen.entries else 0)
            yield from self._frames(self._renderer.feed(View(record, (), seen.cursor)))
        except GenpoolError as error:
            yield from self._frames(self._renderer.failure(error))

    def _follow(self) -> Iterator[bytes]:
        keepalive_s = self._node.settings.server.keepalive_seconds
        spoke_s = looked_s = time.monotonic()
        while not self._renderer.ended:
            view = self._waiter.next(min(TICK_S, spoke_s + keepalive_s - time.monotonic()))
            if view is not None:
                self._seen = view
                chunk = b"".join(self._frames(self._renderer.feed(view)))
                if chunk:
                    yield chunk
                    spoke_s = time.monotonic()
            if (view is None or time.monotonic() - looked_s >= TICK_S) and not self._renderer.ended:
                looked_s = time.monotonic()
                if client_gone(self._sock):
                    return
            if self._node.stopping() and not self._renderer.ended:
                self._cut = True
                last_words = b"".join(self._frames(self._renderer.cut()))
                if not last_words:
                    raise BrokenPipeError(errno.EPIPE, "the process is to end")
                yield last_words
                return
            if time.monotonic() - spoke_s >= keepalive_s:
                yield sse.KEEP_ALIVE.encode()
                spoke_s = time.monotonic()

    @staticmethod
    def _frames(events: Iterator[str]) -> Iterator[bytes]:
        return (event.encode("ascii") for event in events)


def stream_of(node: Node, waiter: Waiter, first: View, renderer: Renderer, *, cancels: bool) -> Response:
    """The response that streams a job from its `first` view on. `cancels`: leaving early ends the job."""
    stream = JobStream(node, waiter, first, renderer, cancels=cancels, sock=request.environ.get("gunicorn.socket"))
    response = Response(stream, mimetype="text/event-stream")
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    return response

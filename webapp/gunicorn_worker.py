"""gunicorn's threaded worker, except that no thread ever waits for a client to say something.

gthread alone gives a connection a thread with its first byte (or for 5 s without one), and that thread reads for as
long as the client likes; and a client that does not close its side holds up the main loop for 2 s. Here the main loop
collects the bytes of all connections, and a request gets a thread once it has arrived.

| event | what happens |
|---|---|
| a request is whole (`webapp.arrivals`) | a thread parses and serves it, from memory |
| it announces too large a body | the same at once; the answer ends the connection |
| its request line or its head is too long | 414, 431 |
| its head expects, or is coded as, what is not supported, or has no Host | 417, 501, 400, before its body |
| it is not whole after `receive_seconds`, from accept or from its first byte | 408, cut |
| it is not whole when the process ends | 503, cut |
| no byte of a next request for `idle_seconds` | cut |
| an answer that ends its connection was given | our side is shut; what still comes is read away, for a while |
| no room for a further connection | the longest idle, else the longest arriving one is cut |
| all requests in memory together are too large | 503 to the large one that has been arriving longest |

Requests that are being served, waits and streams among them, are none of these: `webapp.sync` and `webapp.streams` end
those.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from enum import IntEnum
from functools import cache, partial
from http import HTTPStatus
from typing import Any

from gunicorn.http import get_parser
from gunicorn.workers.gthread import TConn, ThreadWorker

from pool.errors import ConfigurationError
from tasks.config import load_settings
from webapp import raw_answers
from webapp.arrivals import Arrival, Verdict
from webapp.node import EXTENSION
from webapp.raw_answers import RawAnswer
from webapp.request_ids import request_id_for

READ_BYTES = 256 * 1024
#: How long a client may take to receive an answer that is given in one piece.
SEND_LIMIT_S = 30.0
#: After an answer that ends its connection: for how long, and how much, is read away so that the client can read it;
#: and how long the client may be silent.
LINGER_S, LINGER_SILENT_S, LINGER_BYTES = 15.0, 3.0, 128 * 2**20
#: Memory for requests, arriving and being served: so many of the largest bodies, but not less than that.
BODIES, LEAST_BYTES = 16, 64 * 2**20
#: What is smaller is not worth cutting for memory.
LARGE_BYTES = 64 * 1024
#: What has been arriving for less long is not cut for want of room.
YOUNG_S = 1.0
#: How often deadlines are looked at, at most.
LOOK_S = 0.25
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Phase(IntEnum):
    """Of a connection that the main loop has, in the order in which they are cut for want of room."""

    LINGERING = 0
    IDLE = 1
    ARRIVING = 2


class Connection(TConn):  # type: ignore[misc]  # gunicorn ships no types
    """A client's connection. The main loop's while it is in one of the phases, else one thread's."""

    phase = Phase.IDLE
    since_s = deadline_s = 0.0
    oversize = False
    lingered_bytes = 0

    def __init__(self, *args: Any, body_limit_bytes: int) -> None:
        super().__init__(*args)
        self.arrival = Arrival(body_limit_bytes)
        # So that gthread neither waits for data nor makes a parser that reads from the socket.
        self.initialized = self.data_ready = True


class Worker(ThreadWorker):  # type: ignore[misc]  # gunicorn ships no types
    """One API process."""

    @classmethod
    def check_config(cls, cfg: Any, log: Any) -> None:
        """Raises ConfigurationError for what this worker cannot do."""
        super().check_config(cfg, log)
        if cfg.is_ssl:
            raise ConfigurationError("The API does not speak TLS; put a proxy in front of it.")

    def init_process(self) -> None:
        """In the forked process; returns when it ends."""
        settings = load_settings()
        self._body_limit_bytes = settings.limits.body_bytes
        self._most_bytes = max(LEAST_BYTES, BODIES * settings.limits.body_bytes)
        self._receive_s = settings.server.receive_seconds
        self._idle_s = settings.server.idle_seconds
        #: Those that the main loop has, by the time they came into their phase.
        self._open: dict[Connection, None] = {}
        self._held_bytes = 0
        self._next_look_s = 0.0
        #: `conn`: the connection that the current thread serves.
        self._served = threading.local()
        self._end_s = float("inf")
        super().init_process()

    # --- the main loop: connections come and go

    def accept(self, listener: socket.socket) -> None:
        """A new connection. Often its request is there already."""
        try:
            sock, address = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            elif error.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.EWOULDBLOCK):
                raise
            return
        self.nr_conns += 1
        if self.nr_conns >= self.worker_connections:
            self._make_room()
        limit = self._body_limit_bytes
        conn = Connection(self.cfg, sock, address, listener.getsockname(), body_limit_bytes=limit)
        self._enter(conn, Phase.IDLE, self._receive_s)
        self._on_readable(conn)

    def finish_request(self, conn: Connection, served: Future[Any]) -> None:
        """A thread is done with a request."""
        self._held_bytes -= len(conn.arrival.data)
        rest = conn.arrival.rest()
        conn.arrival = Arrival(self._body_limit_bytes)
        if served.cancelled() or served.exception() is not None or not served.result():
            self._linger(conn)
            return
        self._enter(conn, Phase.IDLE, self._idle_s)
        if rest:
            self._take(conn, rest)

    def murder_keepalived(self, force: bool = False) -> None:
        """End what has had its time; called in every turn of the loop."""
        now_s = time.monotonic()
        if now_s < self._next_look_s and not force:
            return
        self._next_look_s = now_s + LOOK_S
        for conn in [conn for conn in self._open if force or conn.deadline_s <= now_s]:
            if conn.phase is Phase.ARRIVING:
                ending = force or now_s >= self._end_s
                self._answer(conn, raw_answers.stopping() if ending else raw_answers.too_slow())
            self._drop(conn)

    def notify(self) -> None:
        """The heartbeat; called in every turn of the loop."""
        if self.nr_conns >= self.worker_connections:
            self._make_room()
        super().notify()

    def _cap_keepalive(self, deadline: float) -> None:
        """The process is to end: nobody is waited for any longer than that."""
        self._end_s = deadline
        for conn in self._open:
            conn.deadline_s = min(conn.deadline_s, deadline)

    def _enter(self, conn: Connection, phase: Phase, limit_s: float) -> None:
        """The main loop has this connection now, for `limit_s` at most; or it goes on to another phase."""
        if conn not in self._open:
            conn.sock.setblocking(False)
            self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._on_readable, conn))
        self._open.pop(conn, None)
        self._open[conn] = None
        conn.phase, conn.since_s = phase, time.monotonic()
        conn.deadline_s = min(conn.since_s + limit_s, max(self._end_s, conn.since_s))

    def _leave(self, conn: Connection) -> None:
        """The main loop no longer has this connection. Idempotent."""
        if conn in self._open:
            del self._open[conn]
            self.poller.unregister(conn.sock)

    def _drop(self, conn: Connection) -> None:
        self._leave(conn)
        self._forget_bytes(conn)
        self.nr_conns -= 1
        conn.close()

    def _forget_bytes(self, conn: Connection) -> None:
        self._held_bytes -= len(conn.arrival.data)
        conn.arrival = Arrival(self._body_limit_bytes)

    # --- the main loop: bytes come

    def _on_readable(self, conn: Connection, _sock: Any = None) -> None:
        try:
            data = conn.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(conn)
        elif conn.phase is Phase.LINGERING:
            conn.lingered_bytes += len(data)
            conn.deadline_s = min(time.monotonic() + LINGER_SILENT_S, conn.since_s + LINGER_S, self._end_s)
            if conn.lingered_bytes > LINGER_BYTES:
                self._drop(conn)
        else:
            self._take(conn, data)

    def _take(self, conn: Connection, data: bytes) -> None:
        """Bytes of a request."""
        if conn.phase is Phase.IDLE:
            is_first = conn.parser is None
            spent_s = time.monotonic() - conn.since_s if is_first else 0.0
            self._enter(conn, Phase.ARRIVING, max(self._receive_s - spent_s, 0.0))
        held_bytes = len(conn.arrival.data)
        verdict = conn.arrival.feed(data)
        self._held_bytes += len(conn.arrival.data) - held_bytes
        match verdict:
            case Verdict.MORE:
                if conn.arrival.waits_for_continue:
                    conn.arrival.waits_for_continue = False
                    self._say(conn, CONTINUE)
                self._bound_memory()
            case Verdict.LINE_TOO_LONG:
                self._refuse(conn, raw_answers.line_too_long())
            case Verdict.HEAD_TOO_LARGE:
                self._refuse(conn, raw_answers.head_too_large())
            case Verdict.EXPECTS_MORE:
                self._refuse(conn, raw_answers.expectation_failed())
            case Verdict.CODED:
                self._refuse(conn, raw_answers.unsupported_transfer_coding())
            case Verdict.HOSTLESS:
                self._refuse(conn, raw_answers.not_valid())
            case Verdict.WHOLE | Verdict.OVERSIZE:
                self._leave(conn)
                conn.oversize = verdict is Verdict.OVERSIZE
                conn.parser = get_parser(self.cfg, conn.arrival.pieces(), conn.client)
                self.enqueue_req(conn)

    def _say(self, conn: Connection, answer: bytes) -> None:
        """Send a few bytes, without waiting: a client that leaves no room for them does without."""
        with suppress(OSError):
            conn.sock.send(answer)

    def _answer(self, conn: Connection, answer: RawAnswer) -> None:
        self._say(conn, answer.sent(request_id_for(conn.arrival.given_id)))
        self._count(answer)

    def _count(self, answer: RawAnswer) -> None:
        self.wsgi.extensions[EXTENSION].on_raw_answer(answer.status)

    def _refuse(self, conn: Connection, answer: RawAnswer) -> None:
        self._answer(conn, answer)
        self._linger(conn)

    def _linger(self, conn: Connection) -> None:
        """End a connection so that its client reads the answer: bytes that arrive at a closed socket would make the
        client's side drop what it has not read yet."""
        self._forget_bytes(conn)
        try:
            conn.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(conn)
            return
        self._enter(conn, Phase.LINGERING, LINGER_SILENT_S)

    def _make_room(self) -> None:
        """Cut one connection that nobody would miss."""
        young_s = time.monotonic() - YOUNG_S
        old = (conn for conn in self._open if conn.phase is not Phase.ARRIVING or conn.since_s < young_s)
        if (conn := min(old, key=lambda conn: conn.phase, default=None)) is not None:
            self._drop(conn)

    def _bound_memory(self) -> None:
        if self._held_bytes > self._most_bytes and (conn := next(self._large(), None)) is not None:
            self._refuse(conn, raw_answers.too_busy())

    def _large(self) -> Iterator[Connection]:
        """Those that arrive and are large, the oldest first."""
        return (conn for conn in self._open if len(conn.arrival.data) > LARGE_BYTES)

    # --- the threads

    def handle(self, conn: Connection) -> Any:
        """Serve a connection's request."""
        self._served.conn = conn
        return super().handle(conn)

    def handle_request(self, req: Any, conn: Connection) -> Any:
        """Serve a request whose head was understood."""
        conn.sock.settimeout(SEND_LIMIT_S)
        req._expected_100_continue = False  # it was said when there was something to wait for
        req.body.oversize = conn.oversize
        if not conn.arrival.has_known_end or _says_close(req):
            req.force_close()
        self._end_when_stopping(req)
        try:
            return super().handle_request(req, conn)
        except TimeoutError:
            raise BrokenPipeError(errno.EPIPE, "the client takes no answer") from None

    def _end_when_stopping(self, req: Any) -> None:
        """Have this request's answer say `Connection: close` if the process is to end when it is sent. What an answer
        has said is kept: gunicorn asks once for its head, and again when it is over."""
        asked_to: Any = req.should_close
        req.should_close = cache(lambda: not self.alive or asked_to())

    def handle_error(self, req: Any, client: Any, addr: Any, exc: Exception) -> None:  # noqa: ARG002 - gunicorn's
        """Answer what could not be understood."""
        answer = raw_answers.answer_to(exc)
        if answer.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            self.log.exception("Error handling a request")
        else:
            self.log.info("Refused what is no request: %s", type(exc).__name__)
        with suppress(OSError):
            client.settimeout(SEND_LIMIT_S)
            client.sendall(answer.sent(request_id_for(self._served.conn.arrival.given_id)))
        self._count(answer)

    def _keepalive_after(self, conn: Connection, keepalive: bool) -> bool:
        """Whether the connection may carry a further request: not if gunicorn and we disagree on where this one ends,
        which would make one client's bytes another request. A body that nobody read is in memory: it is passed over
        whole, where gunicorn's own reading gives up after 64 KiB, and with it a connection promised to the client."""
        try:
            return bool(keepalive and conn.parser.finish_body() and not conn.parser.unreader.read())
        except Exception:  # noqa: BLE001 - the answer has been given; whatever is wrong with the rest ends here
            return False


def _says_close(req: Any) -> bool:
    """Whether `close` is among the words of the request's Connection; gunicorn takes them for one word."""
    values = [value for name, value in req.headers if name == "CONNECTION"]
    return "close" in (word.strip(" \t").lower() for word in ",".join(values).split(","))

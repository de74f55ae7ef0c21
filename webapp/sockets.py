"""What a client's connection can tell, and how long it may take to say what it wants."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


def client_gone(sock: socket.socket | None) -> bool:
    """Whether the client has closed its side. Reads nothing away: a request sent ahead keeps its bytes.

    `sock` None (no such access under this server) is never gone.
    """
    if sock is None:
        return False
    try:
        poller = select.poll()
        poller.register(sock, select.POLLIN | select.POLLERR | select.POLLHUP)
        return bool(poller.poll(0)) and sock.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


class ReadDeadlines:
    """Connections that are being read from, with the time by which that must be over.

    A blocked reader cannot watch its own clock, and a socket timeout starts anew with every byte. So readers register
    here, and `cut_overdue`, called regularly by somebody else, ends what takes too long: the reader sees an end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due_s: dict[socket.socket, float] = {}

    @contextmanager
    def reading(self, sock: socket.socket | None, limit_s: float) -> Iterator[None]:
        """Allow the reads of a block `limit_s` altogether."""
        if sock is None:
            yield
            return
        self.begin(sock, limit_s)
        try:
            yield
        finally:
            self.end(sock)

    def begin(self, sock: socket.socket, limit_s: float) -> None:
        """From now on, `sock` has `limit_s`."""
        with self._lock:
            self._due_s[sock] = time.monotonic() + limit_s

    def end(self, sock: socket.socket) -> None:
        """`sock` was read in time. Idempotent."""
        with self._lock:
            self._due_s.pop(sock, None)

    def cut_overdue(self) -> int:
        """End the reads that took too long; returns how many."""
        with self._lock:
            now_s = time.monotonic()
            overdue = [sock for sock, due_s in self._due_s.items() if due_s <= now_s]
            for sock in overdue:
                del self._due_s[sock]
                try:
                    sock.shutdown(socket.SHUT_RD)
                except OSError:
                    continue  # it has just gone by itself
        return len(overdue)


#: Those of this process.
deadlines = ReadDeadlines()

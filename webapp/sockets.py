"""What a client's connection can tell."""

from __future__ import annotations

import select
import socket

#: The client's side is closed, whatever bytes still lie before its end: Linux says so, others leave it to be read.
CLOSED = getattr(select, "POLLRDHUP", 0)


def client_gone(sock: socket.socket | None) -> bool:
    """Whether the client has closed its side, or only its sending side: over TCP that looks the same until it is
    written to, and no client needs to close its sending side to end a request. Reads nothing away: a request sent ahead
    keeps its bytes, and hides no end.

    `sock` None (no such access under this server) is never gone.
    """
    if sock is None:
        return False
    try:
        poller = select.poll()
        poller.register(sock, select.POLLIN | CLOSED)
        seen = dict(poller.poll(0)).get(sock.fileno(), 0)
        if seen & (CLOSED | select.POLLHUP | select.POLLERR | select.POLLNVAL):
            return True
        return bool(seen) and sock.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True

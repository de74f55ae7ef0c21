"""What a client's connection can tell."""

from __future__ import annotations

import select
import socket


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

"""A link to the state server that loses chosen replies: the command has run, its sender never learns it."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass

CHUNK_BYTES = 65536


@dataclass(frozen=True)
class Loss:
    """Which reply to lose: one that holds `reply`, to a request that holds `request`; the first, or `always`."""

    request: bytes
    reply: bytes = b""
    always: bool = False


class LossyLink:
    """Listens on a free port and pumps to `target_port`. An armed loss closes its connection instead of replying."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._loss: Loss | None = None
        self._lock = threading.Lock()
        self.lost = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, loss: Loss | None) -> None:
        """Lose this reply; None: none any more."""
        with self._lock:
            self._loss, self.lost = loss, 0

    def close(self) -> None:
        """Take no more connections; those that exist end with their ends."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=_Connection(self, near, self._target_port).run, daemon=True).start()

    def take(self, request: bytes, reply: bytes) -> bool:
        """Whether this is a reply to lose; `lost` counts them."""
        with self._lock:
            if self._loss is None or self._loss.request not in request or self._loss.reply not in reply:
                return False
            self.lost += 1
            self._loss = self._loss if self._loss.always else None
            return True


class _Connection:
    def __init__(self, link: LossyLink, near: socket.socket, target_port: int) -> None:
        self._link = link
        self._near = near
        self._far = socket.create_connection(("127.0.0.1", target_port))
        self._request = b""

    def run(self) -> None:
        with self._near, self._far:
            threading.Thread(target=self._forward, daemon=True).start()
            with contextlib.suppress(OSError):
                while (reply := self._far.recv(CHUNK_BYTES)) and not self._link.take(self._request, reply):
                    self._near.sendall(reply)
            for end in (self._near, self._far):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _forward(self) -> None:
        with contextlib.suppress(OSError):
            while request := self._near.recv(CHUNK_BYTES):
                self._request = request
                self._far.sendall(request)
            self._far.shutdown(socket.SHUT_RDWR)

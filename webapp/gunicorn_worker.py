"""gunicorn's threaded worker, with a limit on how long a client may take to send a request's head.

gthread alone hands a connection to a thread with its first byte, and that thread waits for the rest for as long as the
client likes: as many half heads as there are threads would stop the node. Bodies are limited in `webapp.bodies`.
"""

from __future__ import annotations

from typing import Any

from gunicorn.workers.gthread import ThreadWorker

from webapp.sockets import deadlines


class Worker(ThreadWorker):  # type: ignore[misc]  # gunicorn ships no types
    """One API process."""

    #: How long a request's head may take, from the moment that the connection has a thread.
    head_limit_s = 20.0

    def handle(self, conn: Any) -> Any:
        """Serve one request of a connection; runs in a thread of the pool."""
        deadlines.begin(conn.sock, self.head_limit_s)
        try:
            return super().handle(conn)
        finally:
            deadlines.end(conn.sock)

    def handle_request(self, req: Any, conn: Any) -> Any:
        """The head is complete; from here on the application keeps the time."""
        deadlines.end(conn.sock)
        return super().handle_request(req, conn)

    def notify(self) -> None:
        """The main thread's heartbeat, once a second or more often."""
        deadlines.cut_overdue()
        super().notify()

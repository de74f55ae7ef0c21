"""The node's own gunicorn worker with so short a limit for a request's head that a test can wait for it."""

from __future__ import annotations

from webapp.gunicorn_worker import Worker


class HastyWorker(Worker):
    """Gives a head half a second."""

    head_limit_s = 0.5

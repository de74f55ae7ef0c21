"""A small client that talks to the store directly: the command line's way in, and a script's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from pool.store.ids import parse_ref
from pool.store.jobs import View
from pool.store.log import LogEntry
from pool.store.records import JobRecord
from tasks.config import Settings
from tasks.payloads import GenerationRequest
from tasks.services import open_services

#: How often a followed job is looked at.
FOLLOW_S = 0.05


class Client:
    """Submit, read, cancel and follow jobs on the state server of these settings."""

    def __init__(self, settings: Settings) -> None:
        self._services = open_services(settings, max_connections=2)
        self._name = f"client-{secrets.token_hex(8)}"

    def submit(self, request: GenerationRequest, *, door: str = "celery", **record: Any) -> str:
        """Queue a generation and return its id. Raises the Refused errors."""
        return str(self._services.submitter.submit(request, door=door, background=True, **record))

    def get(self, job_id: str) -> JobRecord:
        """The job's record. Raises JobUnknown."""
        return self._services.store.read(parse_ref(job_id))

    def view(self, job_id: str) -> View:
        """The job's record and its log. Raises JobUnknown."""
        return self._services.store.view(parse_ref(job_id))

    def cancel(self, job_id: str) -> JobRecord:
        """Cancel it. Raises JobUnknown and JobNotCancellable."""
        return self._services.store.cancel(parse_ref(job_id))

    def follow(self, job_id: str, start: int = 0) -> Iterator[LogEntry]:
        """Log entries from index `start` on, until the job has ended. Raises JobUnknown."""
        ref, cursor = parse_ref(job_id), start
        # Nobody listens under this name: it only makes the worker write each token at once.
        self._services.store.watch(ref, self._name)
        while True:
            view = self._services.store.view(ref, cursor)
            yield from view.entries
            cursor = view.cursor
            if view.record.terminal:
                return
            if not view.entries:
                time.sleep(FOLLOW_S)

    def close(self) -> None:
        """Close all connections."""
        self._services.close()

"""Celery's consumer, which outlives every message and shows none of it.

A list of the broker is open to whoever reaches the broker, and Celery's own answers to a message that it cannot use log
the whole of it, prompts included, or let the exception end the worker.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable
from typing import Any

from celery.exceptions import NotRegistered
from celery.worker import consumer

from tasks.broker import DROPS

log = logging.getLogger("genpool.consumer")

#: Ids and names of this form may be shown, and a result may be stored under such an id.
_PLAIN = re.compile(r"[A-Za-z0-9_.:-]{1,200}")


#: Losses of the broker that follow each other within this time are one line in the log.
QUIET_S = 5.0
#: Between losing the broker and the first try to connect again.
RECONNECT_S = 0.5


class Consumer(consumer.Consumer):
    """Refuses by name what it cannot use: message dropped, one line in the log."""

    _quiet_until_s = float("-inf")

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        """Celery's handler of a received message, which cannot fail by what is in it."""
        handle = super().create_task_handler(*args, **kwargs)

        def handle_any(message: Any) -> None:
            try:
                handle(message)
            except Exception as error:
                # The transport's connection errors include KeyError, which here comes from a field that is missing.
                if isinstance(error, self.connection_errors + self.channel_errors) and not isinstance(error, KeyError):
                    raise
                self._drop(message, type(error).__name__)

        return handle_any

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """A body of another content type than JSON (it is not even looked at), or one that is no JSON."""
        self._drop(message, f"its body cannot be read ({type(exc).__name__})")

    def on_unknown_message(self, body: Any, message: Any) -> None:  # noqa: ARG002 - Celery's signature
        """A message that is no task."""
        self._drop(message, "it is no task")

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002 - Celery's signature
        """A task message that breaks the protocol."""
        self._drop(message, f"it is no valid task ({type(exc).__name__})")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002 - Celery's signature
        """A task that is not genpool's: its sender learns so from the result."""
        name, task_id = message.headers.get("task"), message.headers.get("id")
        shown = name if _is_plain(name) else "of that name"
        self._drop(message, f"there is no task {shown}")
        if _is_plain(task_id):
            self.app.backend.store_result(task_id, NotRegistered(shown), "FAILURE")

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """The broker was lost, or takes no writes (a replica refuses each new connection's first one): connect again,
        without haste and without a traceback a try."""
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            log.warning("broker: %s; connecting again until it serves", type(exc).__name__)
        self._quiet_until_s = now_s + QUIET_S
        with contextlib.suppress(Exception):
            self.connection.collect()
        time.sleep(RECONNECT_S)

    def _drop(self, message: Any, why: str) -> None:
        queue = message.delivery_info.get("routing_key")
        body = message.body if isinstance(message.body, bytes | str) else None
        DROPS.note(f"queue {queue}" if _is_plain(queue) else "a queue", why, body)
        if not message.acknowledged:
            message.reject()


def _is_plain(text: Any) -> bool:
    return isinstance(text, str) and _PLAIN.fullmatch(text) is not None

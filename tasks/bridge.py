"""The bridge for `send_task("genpool.generate", kwargs=..., queue="MODEL")`: from the broker's list into the stream.

A task strategy is Celery's hook between a received message and the pool. Ours submits the generation and acknowledges
the message; a plain task body would show the prompt in events and succeed long before the text exists.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery
from celery.exceptions import InvalidTaskError

from pool.errors import GenpoolError, InvalidRequest, StateUnavailable
from tasks.generate import Generate, request_of

log = logging.getLogger("genpool.bridge")

#: How long a message waits before it is tried again when the state server is away.
RETRY_S = 1.0
#: An id under which a result may be stored, and which the log may show.
_PLAIN_ID = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Handler = Callable[..., None]


def strategy(task: Generate, app: Celery, consumer: Any) -> Handler:
    """Celery's strategy protocol: the returned handler gets each message of the task."""

    def handle(message: Any, body: Any, ack: Callable[..., None], reject: Any, callbacks: Any, **_: Any) -> None:
        task_id = message.headers.get("id")
        if not isinstance(task_id, str) or _PLAIN_ID.fullmatch(task_id) is None:
            raise InvalidTaskError("no usable id")  # nobody could ask for its result
        try:
            _submit(task, message, body, task_id)
        except StateUnavailable:
            log.warning("task %s: the state server is away; trying again", task_id)
            consumer.timer.call_after(RETRY_S, handle, (message, body, ack, reject, callbacks))
            return
        except GenpoolError as error:
            log.info("task %s refused: %s", task_id, error.code)
            app.backend.store_result(task_id, error, "FAILURE")
        except Exception as error:  # noqa: BLE001 - one odd message must not end the consumer, nor show its content
            log.error("task %s cannot be read: %s", task_id, type(error).__name__)
            app.backend.store_result(task_id, InvalidRequest("The message cannot be read."), "FAILURE")
        ack(log, consumer.connection_errors)

    return handle


def _submit(task: Generate, message: Any, body: Any, task_id: str) -> None:
    """Submit under the token that the uuid gives, so that a redelivered message finds its job."""
    args, kwargs = _arguments(message, body)
    if args:
        raise InvalidRequest("Positional arguments are not supported; name them.", param="args")
    call = {"model": message.delivery_info.get("routing_key"), **kwargs}
    if _UUID.fullmatch(task_id) is None:
        raise InvalidRequest("The task id must be a uuid.", param="task_id")
    token = task_id.replace("-", "")
    task.services.submitter.submit(
        request_of(call), door="celery", token=token, task_id=task_id, background=True, celery=True
    )


def _arguments(message: Any, body: Any) -> tuple[list[Any], Mapping[str, Any]]:
    """Arguments of a protocol 2 message (the body is [args, kwargs, embed]); `body` is None when not yet decoded."""
    args, kwargs, _ = body if body is not None else message.payload
    return list(args), kwargs

"""The Celery task of a generation. Sending it puts a job into the model's stream; it never runs in a Celery pool.

from tasks.celery import app
result = app.tasks["genpool.generate"].delay(model="smollm2-135m-instruct", prompt="Hello", max_tokens=20)
result.get()["outputs"][0]["text"]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from celery import Task
from celery.result import AsyncResult
from pydantic import ValidationError

from pool.errors import InvalidRequest
from tasks import names
from tasks.payloads import GenerationRequest, Sampling, invalid_request
from tasks.services import Services

_SAMPLING = tuple(Sampling.model_fields)
_REQUEST = ("model", "max_tokens", "n", "lane", "fairness_key")
#: Options of `apply_async` that change nothing for a generation.
_HARMLESS = frozenset({"queue", "routing_key", "serializer", "add_to_parent", "retry", "retry_policy", "connection"})


def request_of(call: Mapping[str, Any]) -> GenerationRequest:
    """The request that a task's keyword arguments describe: `model`, one of `prompt` (text), `messages` or
    `prompt_token_ids`, `max_tokens`, `n`, `lane`, `fairness_key` and the sampling options. Raises InvalidRequest naming
    the argument."""
    unknown = set(call) - {*_SAMPLING, *_REQUEST, "prompt", "messages", "prompt_token_ids"}
    if unknown:
        raise InvalidRequest(f"Unknown argument: {sorted(unknown)[0]}.", param=sorted(unknown)[0])
    body: dict[str, Any] = {name: call[name] for name in _REQUEST if call.get(name) is not None}
    body["prompt"] = _prompt_of(call)
    body["sampling"] = {name: call[name] for name in _SAMPLING if call.get(name) is not None}
    stop = body["sampling"].get("stop")
    if isinstance(stop, str):
        body["sampling"]["stop"] = [stop]
    try:
        # Validated in the form in which arguments travel: a JSON array is a tuple, but nothing else is coerced.
        return GenerationRequest.model_validate_json(json.dumps(body, allow_nan=False))
    except ValidationError as error:
        raise invalid_request(error) from None
    except (TypeError, ValueError):
        raise InvalidRequest("The arguments are not plain JSON values.", param="kwargs") from None


def _prompt_of(call: Mapping[str, Any]) -> dict[str, Any]:
    given = [name for name in ("prompt", "messages", "prompt_token_ids") if call.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest("Give exactly one of prompt, messages and prompt_token_ids.", param="prompt")
    forms = {
        "prompt": {"type": "text", "text": call.get("prompt")},
        "messages": {"type": "chat", "messages": call.get("messages")},
        "prompt_token_ids": {"type": "tokens", "token_ids": call.get("prompt_token_ids")},
    }
    return forms[given[0]]


class Generate(Task):
    """`delay` and `apply_async` write straight into the store: same validation and limits as every other door."""

    name = names.GENERATE
    Strategy = names.BRIDGE
    acks_late = False
    ignore_result = False
    typing = False

    def __init__(self, services: Services) -> None:
        self.services = services

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Submit a generation. Raises InvalidRequest, UnknownModel, QueueFull or StateUnavailable; nothing is queued
        then. The result's id is the job's id, valid in the HTTP API too."""
        if args:
            raise InvalidRequest("Positional arguments are not supported; name them.", param="args")
        unsupported = sorted(name for name in options if name not in _HARMLESS and options[name] is not None)
        if task_id is not None:
            unsupported.insert(0, "task_id")
        if unsupported:
            raise InvalidRequest(f"{unsupported[0]} is not supported for generations.", param=unsupported[0])
        ref = self.services.submitter.submit(request_of(kwargs or {}), door="celery", background=True, celery=True)
        return self.app.AsyncResult(str(ref))

    def run(self, **_: Any) -> None:
        """Unreachable in a worker (the bridge moves the message to the stream), refused elsewhere (`apply()`)."""
        raise InvalidRequest("A generation runs in a worker's batch; it cannot run inside the calling process.")

"""The command line's job commands: submit, read, cancel and follow jobs, straight on the store."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any, TextIO

from pydantic import ValidationError

from pool.errors import GenerationFailed, GenpoolError, InvalidRequest, UnknownModel
from pool.store.audit import Audit, Violation
from pool.store.ids import new_ref
from pool.store.jobs import View
from pool.store.log import LogEntry, texts_of
from pool.store.records import JobRecord
from tasks.client import Client
from tasks.config import Settings
from tasks.launch import enabled_models, require_model
from tasks.own_runtime import own_runtime
from tasks.payloads import ChatPrompt, GenerationRequest, Message, Sampling, invalid_request
from tasks.services import open_services
from tasks.supervisor import Supervisor

POLL_S = 0.05


def build_request(
    settings: Settings,
    prompt: str,
    *,
    model: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    option: Sequence[str] = (),
) -> GenerationRequest:
    """One user turn for `model` (None: the first enabled one). `option`: further sampling options, as `NAME=VALUE`.
    Raises UnknownModel or InvalidRequest."""
    if model is None:
        model = next(iter(enabled_models(settings)), None)
        if model is None:
            raise UnknownModel("No model is enabled in the configuration.", param="model")
    require_model(settings, model)
    own = {"temperature": temperature, "seed": seed}
    sampling = _sampling(dict(map(_named, option)) | {name: value for name, value in own.items() if value is not None})
    try:
        return GenerationRequest(
            model=model,
            prompt=ChatPrompt(messages=(Message(role="user", content=prompt),)),
            sampling=sampling,
            max_tokens=max_tokens,
        )
    except ValueError as error:
        raise InvalidRequest("The prompt is not valid Unicode text.", param="prompt") from error


def _named(option: str) -> tuple[str, Any]:
    """`NAME=VALUE`, the value in JSON; what is no JSON is a text."""
    name, separator, value = option.partition("=")
    if not separator:
        raise InvalidRequest(f"{name}: write it as NAME=VALUE.", param=name)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _sampling(options: dict[str, Any]) -> Sampling:
    unknown = next((name for name in options if name not in Sampling.model_fields), None)
    if unknown is not None:
        raise InvalidRequest(f"Unknown option: {unknown}.", param=unknown)
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    try:
        return Sampling.model_validate_json(json.dumps(options))
    except ValidationError as error:
        raise invalid_request(error) from None


def status(view: View) -> str:
    """A record as JSON, times in milliseconds since 1970. Outputs of a job without any of its own (it runs, or was
    cancelled or failed) are what its log has shown."""
    record = view.record
    shown = {
        "id": record.id,
        "model": record.model,
        "state": record.state,
        "lane": record.lane,
        "attempt": record.attempt,
        "seed": record.seed,
        "created_ms": record.created_ms,
        "started_ms": record.started_ms,
        "finished_ms": record.finished_ms,
        "usage": {
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
        },
        "outputs": [asdict(output) for output in record.outputs] or list(_logged(view)),
        "error": {"code": record.error_code, "message": record.error_message} if record.error_code else None,
    }
    return json.dumps(shown, indent=2, ensure_ascii=False)


def _logged(view: View) -> Iterator[dict[str, Any]]:
    """What each choice has shown so far, if it has shown anything."""
    for choice, text in enumerate(texts_of(view.entries, view.record.n)):
        if text:
            tokens = sum(len(entry.token_ids) for entry in view.entries if entry.choice == choice)
            yield {"text": text, "finish_reason": None, "tokens": tokens}


def tail(client: Client, job: str, out: TextIO) -> None:
    """Write the text so far and follow it to the end. Raises JobUnknown, GenerationFailed."""
    for entry in client.follow(job):
        _write(entry, out)
    _conclude(client.get(job), out)


def generate(settings: Settings, request: GenerationRequest, out: TextIO) -> None:
    """Run one request and stream its text to `out`, starting what it needs. An interrupt cancels the job."""
    with own_runtime(settings, request.model, _note) as runtime, closing(Client(settings)) as client:
        ref = new_ref("celery", request.model)  # chosen here: an interrupt may come before the answer of `submit`
        job = str(ref)
        try:
            client.submit(request, token=ref.token)
            for entry in _follow(client, job, runtime):
                _write(entry, out)
        except BaseException:
            with suppress(GenpoolError):  # it may have ended, or the state server may be what failed
                client.cancel(job)
            raise
        _conclude(client.get(job), out)


def _follow(client: Client, job: str, runtime: Supervisor) -> Iterator[LogEntry]:
    """The job's log, read on a thread of its own, while this one looks after the runtime."""
    received: queue.SimpleQueue[LogEntry | BaseException | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for entry in client.follow(job):
                received.put(entry)
            received.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            received.put(error)

    threading.Thread(target=read, name="follow", daemon=True).start()
    while True:
        if not runtime.turn():
            raise GenerationFailed(runtime.failure or "stopped")
        try:
            item = received.get(timeout=POLL_S)
        except queue.Empty:
            continue
        if item is None:
            return
        if isinstance(item, BaseException):
            raise item
        yield item


def _write(entry: LogEntry, out: TextIO) -> None:
    """The first choice's text; the command line never asks for more than one."""
    if entry.choice == 0 and entry.text:
        out.write(entry.text)
        out.flush()


def _conclude(record: JobRecord, out: TextIO) -> None:
    out.write("\n")
    out.flush()
    if record.state == "failed":
        raise GenerationFailed(record.error_message or "The generation failed.", code=record.error_code)
    if record.state == "cancelled":
        _note("cancelled")
    elif record.state == "incomplete":
        _note("stopped at the token limit")


def _note(text: str) -> None:
    print(f"genpool: {text}", file=sys.stderr, flush=True)


def audit(settings: Settings) -> list[Violation]:
    """Every violation of an invariant that the state server shows now, over all models. Raises StateUnavailable."""
    services = open_services(settings, max_connections=1)
    try:
        return [violation for model in settings.models for violation in Audit(services.client, model).run()]
    finally:
        services.close()

"""The description of the API, built from the URL map, the views' docstrings and the schemas that validate requests.

A request's optional fields may be null, which means absent. Options that genpool lacks are listed, because clients send
them: they are accepted where they ask for nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from flask import Flask
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from webapp.auth import OPEN
from webapp.node import EXTENSION
from webapp.schemas import admin, answers, chat, completions, programs, responses
from webapp.schemas.dialect import Neutral

VERSION = "3.1.0"
_PATH_PART = re.compile(r"<(?:[a-z]+:)?([a-z_]+)>")
#: Of routes that are not open to everybody.
KEY_ERRORS = ("401", "403")
#: Statuses whose answer is an Error, with what they mean here.
ERRORS = {
    "400": "A field is wrong; `param` names it. Or what is to be cancelled has already ended.",
    "401": "No key, or a wrong one.",
    "403": "This key may not do that.",
    "404": "There is no such model, generation or Program.",
    "409": "The model is being unloaded, is not loaded, or could not be loaded. Or the Idempotency-Key stands for "
    "another request. Or the chat completion or completion that was waited for was cancelled; a response then answers "
    "200 with `status: cancelled`.",
    "410": "The generation has ended and is no longer stored.",
    "413": "The body is too large.",
    "415": "The body is not plain JSON.",
    "429": "The queue is full, the key's owner has too many Programs, or a time limit passed in the queue; nothing "
    "stays enqueued. See Retry-After.",
    "500": "The engine failed.",
    "503": "The state server is away, this node is full or not ready, or no worker is there and requests are not to "
    "wait for one; nothing stays enqueued. See Retry-After.",
    "504": "A time limit has passed; or it has not ended in time, or this node stops, and the generation `id` goes on. "
    "`x-should-retry: false`.",
}


@dataclass(frozen=True)
class Operation:
    """What a view takes and gives. `answer`: a model of the JSON, or another media type; `unsupported`: options of the
    body that are accepted at neutral values only; `generates`: its body is a request for a generation, and required."""

    answer: type[BaseModel] | str
    body: type[BaseModel] | None = None
    unsupported: Mapping[str, Neutral] | None = None
    query: type[BaseModel] | None = None
    stream: str = ""
    generates: bool = False


OPERATIONS: Mapping[str, Operation] = {
    "responses.create": Operation(
        answers.Response,
        responses.ResponsesRequest,
        responses.UNSUPPORTED_HERE,
        stream="Numbered response events.",
        generates=True,
    ),
    "responses.read": Operation(answers.Response, query=responses.ReplayQuery, stream="Numbered response events."),
    "responses.cancel": Operation(answers.Response),
    "responses.delete": Operation(answers.Deleted),
    "responses.items": Operation(answers.InputItems, query=responses.ItemsQuery),
    "chat.create": Operation(
        answers.ChatCompletion, chat.ChatRequest, chat.UNSUPPORTED_HERE, stream="Chunks, then `[DONE]`.", generates=True
    ),
    "completions.create": Operation(
        answers.Completion,
        completions.CompletionRequest,
        completions.UNSUPPORTED_HERE,
        stream="Chunks, then `[DONE]`.",
        generates=True,
    ),
    "models.catalogue": Operation(answers.Models),
    "models.one": Operation(answers.Model),
    "programs.one": Operation(answers.Program),
    "programs.finish": Operation(answers.FinishedProgram, programs.FinishRequest),
    "programs.diagnostics": Operation(answers.Diagnostics, query=programs.DiagnosticsQuery),
    "admin_model_rows.rows": Operation(answers.ModelRows, query=admin.ModelRowsQuery),
    "admin_models.load": Operation(answers.ModelStanding, admin.LoadRequest),
    "admin_models.unload": Operation(answers.ModelStanding, admin.UnloadRequest),
    "admin_queues.queues": Operation(answers.ModelQueues),
    "admin_queues.read": Operation(answers.Job),
    "admin_queues.change": Operation(answers.Job, admin.JobChange),
    "admin_queues.end": Operation(answers.Job),
    "admin_models.reload": Operation(answers.Reloaded),
    "health.healthz": Operation(answers.Health),
    "health.readyz": Operation(answers.Health),
    "docs.page": Operation("text/html"),
    "docs.openapi": Operation("application/json"),
    "metrics": Operation("text/plain"),
}


def document(app: Flask) -> dict[str, Any]:
    """The OpenAPI document of `app`, as JSON can hold it."""
    paths: dict[str, dict[str, Any]] = {}
    for rule in app.url_map.iter_rules():
        operation = OPERATIONS.get(rule.endpoint)
        if operation is None:
            continue
        path = _PATH_PART.sub(r"{\1}", rule.rule)
        for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"}):
            view = app.view_functions[rule.endpoint]
            paths.setdefault(path, {})[method.lower()] = _operation(rule.endpoint, path, view.__doc__ or "", operation)
    return {
        "openapi": VERSION,
        "info": {
            "title": "genpool",
            "version": version("genpool"),
            "description": "Durable generations behind the OpenAI API: any official client works unchanged.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": _schemas(programs.described(app.extensions[EXTENSION].settings.programs)),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: str, path: str, doc: str, operation: Operation) -> dict[str, Any]:
    text = inspect.cleandoc(doc)
    described: dict[str, Any] = {
        "operationId": endpoint.replace(".", "_"),
        "summary": re.split(r"(?<=[.:])\s", text, maxsplit=1)[0].rstrip(".:"),
        "description": " ".join(text.split()),
        "parameters": [*_path_parameters(path), *_query_parameters(operation)],
        "responses": {"200": _success(operation)} | _errors(keyed=path not in OPEN),
    }
    if path in OPEN:
        described["security"] = []
    if operation.body is not None:
        described["requestBody"] = {"required": operation.generates, "content": _json(operation.body)}
    if operation.generates:
        described["parameters"].append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "A resend with the same key finds the same generation.",
                "schema": {"type": "string", "minLength": 1, "maxLength": 256, "pattern": r"^[!-~]([ -~]*[!-~])?$"},
            }
        )
    return described


def _success(operation: Operation) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        kind = "object" if operation.answer == "application/json" else "string"
        return {"description": "The whole of it.", "content": {operation.answer: {"schema": {"type": kind}}}}
    content: dict[str, Any] = _json(operation.answer)
    if operation.stream:
        content["text/event-stream"] = {"schema": {"type": "string", "description": operation.stream}}
    return {"description": (operation.answer.__doc__ or "").split("\n")[0], "content": content}


def _errors(*, keyed: bool) -> dict[str, Any]:
    given = {status: text for status, text in ERRORS.items() if keyed or status not in KEY_ERRORS}
    return {status: {"description": text, "content": _json(answers.Error)} for status, text in given.items()}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


def _path_parameters(path: str) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{([a-z_]+)}", path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    if operation.query is None:
        return
    for name, schema in operation.query.model_json_schema()["properties"].items():
        # A query cannot say null.
        kinds = [kind for kind in schema.pop("anyOf", []) if kind != {"type": "null"}]
        if schema.get("default", 0) is None:
            del schema["default"]
        yield {"name": name, "in": "query", "schema": schema | (kinds[0] if kinds else {})}


def _schemas(of_programs: Mapping[str, Any]) -> dict[str, Any]:
    models: list[type[BaseModel]] = [answers.Error]
    for operation in OPERATIONS.values():
        models += [
            model for model in (operation.answer, operation.body) if model is not None and not isinstance(model, str)
        ]
    _, found = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = found["$defs"]
    for operation in OPERATIONS.values():
        if operation.body is not None:
            _describe_body(schemas[operation.body.__name__], list(operation.unsupported or ()))
        if operation.body is not None and operation.generates:
            schemas[operation.body.__name__]["properties"] |= of_programs
    return schemas


def _describe_body(schema: dict[str, Any], unsupported: Sequence[str]) -> None:
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        if name not in required and {"type": "null"} not in field.get("anyOf", []):
            default = {"default": field.pop("default")} if "default" in field else {}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **default}
    for name in unsupported:
        text = "Not supported. null, and values that ask for nothing, are accepted."
        schema["properties"][name] = {"type": "null", "description": text}

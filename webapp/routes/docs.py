"""/openapi.json, and the same for people: /docs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import cache
from typing import Any

from flask import Blueprint, Response, current_app, jsonify, make_response, render_template

from webapp.node import Node, current_node
from webapp.openapi import ERRORS, document

blueprint = Blueprint("docs", __name__)

_CURL = """\
curl {url}/v1/responses \\
  -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "input": "Name three colours.", "max_output_tokens": 60}}'"""
_PYTHON = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
stream = client.responses.create(model="{model}", input="Name three colours.", max_output_tokens=60, stream=True)
for event in stream:
    if event.type == "response.output_text.delta":
        print(event.delta, end="", flush=True)"""
_RESUME = """\
# A background response outlives its client, and its stream goes on at any node.
job = client.responses.create(model="{model}", input="Tell a story.", max_output_tokens=200, background=True)
for event in client.responses.retrieve(job.id, stream=True, starting_after=0):
    print(event.sequence_number, event.type)"""
_NODE = """\
import OpenAI from "openai";

const client = new OpenAI({{ baseURL: "{url}/v1", apiKey: "{key}" }});
const answer = await client.chat.completions.create({{
  model: "{model}",
  messages: [{{ role: "user", content: "Name three colours." }}],
  max_completion_tokens: 60,
}});
console.log(answer.choices[0].message.content);"""
_CELERY = """\
from tasks.celery import app

messages = [{{"role": "user", "content": "Name three colours."}}]
result = app.tasks["genpool.generate"].delay(model="{model}", messages=messages, max_tokens=60)
print(result.get())"""
EXAMPLES = {
    "curl": _CURL,
    "Python, streamed": _PYTHON,
    "Python, in the background": _RESUME,
    "Node": _NODE,
    "Celery": _CELERY,
}


@blueprint.get("/openapi.json")
def openapi() -> Response:
    """This description."""
    return jsonify(_described())


@blueprint.get("/docs")
def page() -> Response:
    """Examples to copy, and every route."""
    node = current_node()
    nonce = secrets.token_urlsafe(16)
    models = node.services.submitter.models()
    values = {"url": _base_url(node), "model": models[0] if models else "MODEL", "key": "YOUR_KEY"}
    answer = make_response(
        render_template(
            "docs.html",
            nonce=nonce,
            base_url=values["url"],
            models=models,
            examples=[(title, code.format(**values)) for title, code in EXAMPLES.items()],
            routes=list(_routes()),
            errors=ERRORS.items(),
        )
    )
    policy = f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; frame-ancestors 'none'"
    answer.headers["Content-Security-Policy"] = policy
    return answer


@cache
def _described() -> dict[str, Any]:
    return document(current_app)


def _routes() -> Iterator[tuple[str, str, str]]:
    for path, operations in _described()["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), path, operation["description"]


def _base_url(node: Node) -> str:
    """Where this node listens, by its settings: what a request's Host header says is anybody's word."""
    host, port = node.settings.server.host, node.settings.server.port
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

"""/openapi.json, and the same for people: /docs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any

from flask import Blueprint, Response, current_app, jsonify, make_response, redirect, render_template
from markupsafe import Markup, escape
from werkzeug.wrappers import Response as BaseResponse

from webapp.node import Node, current_node
from webapp.openapi import ERRORS, document

blueprint = Blueprint("docs", __name__)
DESCRIPTION = "genpool-description"

_CURL = """\
curl {url}/v1/responses \\
  -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "input": "Name three colours.", "max_output_tokens": 60, "temperature": 0}}'"""
_CURL_STREAM = """\
curl -N {url}/v1/responses \\
  -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "input": "Name three colours.", "max_output_tokens": 60, "temperature": 0,
       "stream": true}}'"""
_CURL_STORED = """\
id=$(curl -s {url}/v1/responses \\
  -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "input": "Tell a story.", "max_output_tokens": 200, "temperature": 0,
       "background": true}}' | grep -o 'resp_[^"]*' | head -n 1)
curl -s {url}/v1/responses/$id -H 'Authorization: Bearer {key}'
curl -s -X POST {url}/v1/responses/$id/cancel -H 'Authorization: Bearer {key}'
curl -s -X DELETE {url}/v1/responses/$id -H 'Authorization: Bearer {key}'"""
_CURL_TURNS = """\
id=$(curl -s {url}/v1/responses \\
  -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "input": "Name three colours.", "max_output_tokens": 60, "temperature": 0}}' |
  grep -o 'resp_[^"]*' | head -n 1)
curl -s {url}/v1/responses \\
  -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "input": "Which is the warmest?", "max_output_tokens": 60, "temperature": 0,
       "previous_response_id": "'$id'"}}'"""
_CURL_TWICE = """\
curl {url}/v1/responses \\
  -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' \\
  -H "Idempotency-Key: colours-$(date +%F)" \\
  -d '{{"model": "{model}", "input": "Name three colours.", "max_output_tokens": 60, "temperature": 0}}'"""
_PYTHON = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
stream = client.responses.create(
    model="{model}", input="Name three colours.", max_output_tokens=60, temperature=0, stream=True
)
for event in stream:
    if event.type == "response.output_text.delta":
        print(event.delta, end="", flush=True)"""
_PYTHON_RESUMED = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
job = client.responses.create(
    model="{model}", input="Tell a story.", max_output_tokens=200, temperature=0, background=True
)
for event in client.responses.retrieve(job.id, stream=True, starting_after=0):
    print(event.sequence_number, event.type)"""
_PYTHON_POLLED = """\
import time

from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
job = client.responses.create(
    model="{model}", input="Tell a story.", max_output_tokens=200, temperature=0, background=True
)
while job.status in ("queued", "in_progress"):
    time.sleep(0.5)
    job = client.responses.retrieve(job.id)
print(job.status, job.output_text)"""
_PYTHON_CANCELLED = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
job = client.responses.create(
    model="{model}", input="Tell a story.", max_output_tokens=200, temperature=0, background=True
)
print(client.responses.cancel(job.id).status)
client.responses.delete(job.id)"""
_PYTHON_TURNS = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
options = {{"model": "{model}", "max_output_tokens": 60, "temperature": 0}}
first = client.responses.create(input="Name three colours.", **options)
second = client.responses.create(input="Which is the warmest?", previous_response_id=first.id, **options)
print(second.output_text)"""
_PYTHON_TWICE = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
for _ in range(2):
    answer = client.responses.create(
        model="{model}", input="Name three colours.", max_output_tokens=60, temperature=0,
        extra_headers={{"Idempotency-Key": "colours-1"}},
    )
    print(answer.id, answer.output_text)"""
_NODE = """\
import OpenAI from "openai";

const client = new OpenAI({{ baseURL: "{url}/v1", apiKey: "{key}" }});
const answer = await client.chat.completions.create({{
  model: "{model}",
  messages: [{{ role: "user", content: "Name three colours." }}],
  max_completion_tokens: 60,
  temperature: 0,
}});
console.log(answer.choices[0].message.content);"""
_CELERY = """\
from tasks.celery import app

messages = [{{"role": "user", "content": "Name three colours."}}]
result = app.tasks["genpool.generate"].delay(model="{model}", messages=messages, max_tokens=60, temperature=0)
print(result.get())"""
#: Title, a word about it, code. Each stands alone.
EXAMPLES = (
    ("curl", "", _CURL),
    ("curl, streamed", "", _CURL_STREAM),
    (
        "curl: in the background, polled, cancelled, deleted",
        "Cancelling what has already completed is refused with 400; a delete cancels by itself.",
        _CURL_STORED,
    ),
    ("curl: a conversation", "", _CURL_TURNS),
    (
        "curl: at most once",
        "Sent again with the same `Idempotency-Key` (choose your own), it finds the same generation.",
        _CURL_TWICE,
    ),
    ("Python, streamed", "With the official client: `pip install openai`.", _PYTHON),
    (
        "Python: in the background, streamed later",
        "A background response outlives its client, and its stream goes on at any node.",
        _PYTHON_RESUMED,
    ),
    ("Python: in the background, polled", "", _PYTHON_POLLED),
    ("Python: cancelled and deleted", "", _PYTHON_CANCELLED),
    ("Python: a conversation", "", _PYTHON_TURNS),
    ("Python: at most once", "Both answers are of one generation.", _PYTHON_TWICE),
    ("Node", "Save it as `ask.mjs`; then `npm install openai` and `node ask.mjs`.", _NODE),
    (
        "Celery",
        "Runs in genpool's own environment (`.venv/bin/python`) and with its settings: it speaks to the state server, "
        "not to the API.",
        _CELERY,
    ),
)


@blueprint.get("/openapi.json")
def openapi() -> Response:
    """This description, for programs."""
    return jsonify(_described())


@blueprint.get("/")
@blueprint.get("/docs/")
def to_page() -> BaseResponse:
    """To /docs."""
    return redirect("/docs")


@blueprint.app_template_filter("marked")
def marked(text: str) -> Markup:
    """Text for a page: escaped, and what stands between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


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
            examples=[(title, note, code.format(**values)) for title, note, code in EXAMPLES],
            routes=list(_routes()),
            errors=ERRORS.items(),
        )
    )
    policy = f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; frame-ancestors 'none'"
    answer.headers["Content-Security-Policy"] = policy
    return answer


def _described() -> dict[str, Any]:
    """Made once an application: it depends on the settings."""
    found: dict[str, Any] | None = current_app.extensions.get(DESCRIPTION)
    if found is None:
        found = current_app.extensions[DESCRIPTION] = document(current_app)
    return found


def _routes() -> Iterator[tuple[str, str, str]]:
    for path, operations in _described()["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), path, operation["description"]


def _base_url(node: Node) -> str:
    """Where this node listens, by its settings: what a request's Host header says is anybody's word."""
    host, port = node.settings.server.host, node.settings.server.port
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

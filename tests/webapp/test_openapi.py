"""/openapi.json describes what is there, and what answers really look like; /docs shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from typing import Any

import httpx
import pytest
from flask import Flask
from flask.testing import FlaskClient
from jsonschema import Draft202012Validator

from tests.webapp.playing_worker import MODEL, PlayingWorker

SAID = {"input": "x", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def document(http: FlaskClient) -> dict[str, Any]:
    """The description."""
    found: dict[str, Any] = http.get("/openapi.json").get_json()
    return found


def schema(document: dict[str, Any], name: str) -> Draft202012Validator:
    """A validator of one schema, with the others at hand."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})


def test_every_route_is_described(app: Flask, document: dict[str, Any]) -> None:
    """But those that only lead to the page."""
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {
        (method, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert served - described == {("GET", "/"), ("GET", "/docs/")}
    assert described <= served
    assert all(operation["summary"] for methods in document["paths"].values() for operation in methods.values())


def test_what_needs_a_key_says_so(document: dict[str, Any]) -> None:
    """All but the probes and the description: refusals of keys are described there, and nowhere else."""
    keyless = {
        path
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if operation.get("security") == [] and not {"401", "403"} & set(operation["responses"])
    }
    assert keyless == {"/healthz", "/health", "/readyz", "/docs", "/openapi.json"}
    others = [methods for path, methods in document["paths"].items() if path not in keyless]
    assert all({"401", "403"} <= set(operation["responses"]) for methods in others for operation in methods.values())


def test_real_answers_are_as_described(http: FlaskClient, worker: PlayingWorker, document: dict[str, Any]) -> None:
    """Each kind of answer, errors among them."""
    with worker.answering("x", reason="length"):
        response = http.post("/v1/responses", json={"model": MODEL, "input": "x"}).get_json()
        for path, name, body in (
            ("/v1/chat/completions", "ChatCompletion", {"messages": SAID["messages"], "n": 2}),
            ("/v1/completions", "Completion", {"prompt": "x"}),
        ):
            schema(document, name).validate(http.post(path, json={"model": MODEL, **body}).get_json())
    job = response["id"]
    queued = http.post("/v1/responses", json={"model": MODEL, "input": "x", "background": True}).get_json()
    cancelled = http.post(f"/v1/responses/{queued['id']}/cancel").get_json()
    for found in (response, queued, cancelled, http.get(f"/v1/responses/{job}").get_json()):
        schema(document, "Response").validate(found)
    for path, name in (
        (f"/v1/responses/{job}/input_items", "InputItems"),
        ("/v1/models", "Models"),
        (f"/v1/models/{MODEL}", "Model"),
        ("/healthz", "Health"),
        ("/readyz", "Health"),
        ("/v1/responses/none", "Error"),
        ("/nowhere", "Error"),
    ):
        schema(document, name).validate(http.get(path).get_json())
    schema(document, "Deleted").validate(http.delete(f"/v1/responses/{job}").get_json())


@pytest.mark.parametrize(
    ("name", "route", "field"),
    [
        ("ResponsesRequest", "/v1/responses", "input"),
        ("ChatRequest", "/v1/chat/completions", "messages"),
        ("CompletionRequest", "/v1/completions", "prompt"),
    ],
)
def test_the_description_and_the_validation_agree(
    http: FlaskClient, worker: PlayingWorker, document: dict[str, Any], name: str, route: str, field: str
) -> None:
    """What one refuses the other refuses, field by field; null is accepted wherever a field may be left out."""
    described = document["components"]["schemas"][name]
    validator = schema(document, name)
    body = {"model": MODEL, field: SAID[field]}
    assert set(described["required"]) == set(body)
    for optional in set(described["properties"]) - set(body):
        nulled = body | {optional: None}
        assert validator.is_valid(nulled), optional
        with worker.answering("x"):
            assert http.post(route, json=nulled).status_code == 200, optional
    bad: list[dict[str, Any]] = [{}, {"no_such_field": 1}, {field: None}, {field: ""}, {"model": 1}]
    bad += [{"temperature": value} for value in (-1, 2.1, "1", True)] + [
        {"top_p": 0},
        {"stop": [""]},
        {"stop": ["x"] * 5},
        {"presence_penalty": 2.1},
        {"min_p": -0.1},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"5": 101}},
        {"stop_token_ids": [-1]},
    ]
    for fields in bad:
        refused = {} if not fields else body | fields
        assert not validator.is_valid(refused), fields
        assert http.post(route, json=refused).status_code == 400, fields
    assert worker.held == 0


def test_the_page_shows_routes_and_examples(http: FlaskClient) -> None:
    """Nothing of the request gets into it, and it may load nothing from elsewhere."""
    answer = http.get("/docs", headers={"Host": "evil.example"})
    assert "evil" not in answer.text
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    for text in ("curl http://127.0.0.1:8000/v1/responses", "from openai import OpenAI", "apiKey", "genpool.generate"):
        assert text in answer.text
    for route in ("POST /v1/completions", "GET /metrics", "GET /docs", "GET /openapi.json"):
        assert f"<code>{route}</code>" in answer.text


@pytest.mark.parametrize("path", ["/", "/docs/"])
def test_whoever_looks_around_finds_the_page(http: FlaskClient, path: str) -> None:
    """The root, and the page's name as people type it; the page itself leads nowhere else."""
    led = http.get(path)
    assert (led.status_code, led.headers["Location"]) == (302, "/docs")
    assert http.get("/docs").status_code == 200


def test_backticks_are_shown_as_code(app: Flask, http: FlaskClient) -> None:
    """None is left in the page's words, and what looks like HTML stays text."""
    page = http.get("/docs").text
    assert "`" not in re.sub("<(pre|script|style).*?</\\1>", "", page, flags=re.DOTALL)
    assert "(<code>background</code>)" in page
    marked = app.jinja_env.filters["marked"]
    assert marked("a `<b>` & `c") == "a <code>&lt;b&gt;</code> &amp; `c"


def test_the_curl_example_can_be_pasted(http: FlaskClient) -> None:
    """A shell reads it as one command with a JSON body."""
    page = http.get("/docs").get_data(as_text=True)
    code = re.search(r"<pre><code>(curl.*?)</code>", page, re.DOTALL)
    assert code is not None
    command = code[1].replace("&#39;", "'").replace("&#34;", '"')
    shown = subprocess.run(["sh", "-c", command.replace("curl", "printf '%s\\n'", 1)], capture_output=True, check=True)
    assert json.loads(shown.stdout.decode().splitlines()[-1])["model"] == MODEL


def examples(page: str) -> dict[str, str]:
    """Code by title."""
    found = re.findall(r"<h3>(.*?)</h3>.*?<pre><code>(.*?)</code></pre>", page, re.DOTALL)
    return {title: unescape(code) for title, code in found}


ALONE = """
import json, sys
for title, code in json.load(sys.stdin).items():
    print("#", title)
    exec(compile(code, title, "exec"), {"__name__": "__main__"})
    print()
"""


@pytest.mark.skipif(shutil.which("curl") is None, reason="runs curl")
def test_every_example_stands_alone(raw: httpx.Client, worker: PlayingWorker) -> None:
    """As it is on the page of a node: each in an interpreter's or shell's fresh state, and greedy, because a small
    model says little of sense otherwise. Those for Node and Celery need what is not here."""
    found = examples(raw.get("/docs").text)
    assert all(re.search(r"temperature\W{1,3}\s?0\b", code) for code in found.values())
    python = {title: code for title, code in found.items() if title.startswith("Python")}
    cancelled = {title: python.pop(title) for title in list(python) if "cancelled" in title}
    with worker.answering("red"):
        said = run([sys.executable, "-c", ALONE], json.dumps(python))
        for title, code in found.items():
            if title.startswith("curl") and "cancelled" not in title:
                shown = run(["sh", "-e"], code)
                assert '"text":"red"' in shown, (title, shown)
    parts = {part.splitlines()[0]: part for part in said.split("# ")[1:]}
    assert parts.keys() == python.keys()
    for part in parts.values():
        assert "red" in part or "response.completed" in part, said
    once = re.findall(r"(resp_\S+) red", parts["Python: at most once"])
    assert len(once) == 2 and len(set(once)) == 1
    assert "\ncancelled\n" in run([sys.executable, "-c", ALONE], json.dumps(cancelled))
    stored = run(["sh", "-e"], next(code for title, code in found.items() if "polled, cancelled" in title))
    assert [json.loads(line).get("status", "deleted") for line in stored.splitlines()] == [
        "queued",
        "cancelled",
        "deleted",
    ]
    assert worker.held == 0
    assert {"Node", "Celery"} == {title for title in found if not title.startswith(("curl", "Python"))}
    compile(found["Celery"], "Celery", "exec")


def run(command: list[str], sent: str) -> str:
    """What a program prints that reads this."""
    done = subprocess.run(command, input=sent, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
